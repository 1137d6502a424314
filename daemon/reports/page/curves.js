"use strict";
/* Numbers of curves: points by batch, rising. */
const Curves = (() => {
  /* Index of the point that is nearest to a batch; -1: there is none. */
  const nearest = (batches, batch) => {
    let low = 0, high = batches.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (batches[middle] < batch) low = middle + 1; else high = middle;
    }
    return low > 0 && batch - batches[low - 1] < batches[low] - batch ? low - 1 : high;
  };
  /* Index of the newest point up to a batch; -1: there is none. */
  const upTo = (batches, batch) => {
    const found = nearest(batches, batch);
    return found >= 0 && batches[found] > batch ? found - 1 : found;
  };

  /* Round numbers between two others, about `most` of them. */
  const steps = (from, to, most) => {
    const raw = Math.max((to - from) / Math.max(most, 1), 1), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
    const found = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
    return found;
  };

  /* Halves a curve in place: of each four points the least and the greatest stay. */
  const thin = (line) => {
    const kept = { batches: [], values: [] };
    for (let i = 0; i < line.batches.length; i += 4) {
      const four = [0, 1, 2, 3].map((k) => i + k).filter((k) => k < line.batches.length).sort((a, b) => line.values[a] - line.values[b]);
      for (const k of [...new Set([four[0], four[four.length - 1]])].sort((a, b) => a - b)) { kept.batches.push(line.batches[k]); kept.values.push(line.values[k]); }
    }
    Object.assign(line, kept);
  };
  /* What is seen of a curve between two batches: no more points than pixels. */
  const part = (line, from, to, pixels) => {
    const begin = Math.max(nearest(line.batches, from) - 1, 0), end = nearest(line.batches, to) + 2;
    const seen = { batches: line.batches.slice(begin, end), values: line.values.slice(begin, end) };
    while (seen.batches.length > pixels) thin(seen);
    return seen;
  };

  return { nearest, part, steps, thin, upTo };
})();
