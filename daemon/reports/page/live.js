// What both pages of `headway web` share: elements, numbers, and the stream of states.
"use strict";

// Texts of a cluster become text nodes alone, so no name in one is ever markup.
function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== ""));
  return node;
}

// Replaces what an element shows; whoever had the focus in it keeps it.
function show(id, ...children) {
  const focused = document.activeElement && document.activeElement.id;
  document.getElementById(id).replaceChildren(...children.flat());
  if (focused && document.activeElement.id !== focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

// A sentence whose commands stand in backquotes.
function sentence(text) {
  return text.split("`").map((part, index) => (index % 2 ? el("code", {}, part) : part));
}

// Each column: [title, cell of a row, class]. Columns in which no row has anything are left out.
function table(columns, rows) {
  const isEmpty = (cell) => cell === null || cell === undefined || cell === "" || (Array.isArray(cell) && !cell.length);
  const cells = columns.map(([, cell]) => rows.map((row) => cell(row)));
  const kept = columns.flatMap((_, index) => (cells[index].every(isEmpty) ? [] : [index]));
  const head = kept.map((index) => el("th", { class: columns[index][2] }, columns[index][0]));
  const body = rows.map((_, row) => el("tr", {}, kept.map((index) => {
    const [[title, , kind], cell] = [columns[index], cells[index][row]];
    return isEmpty(cell) ? el("td", { class: kind }) : el("td", { class: kind, "data-title": title }, el("div", {}, cell));
  })));
  return el("table", { class: "told" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
}

function bytes(number, unit = "B") {
  let power = 0;
  while (number >= 999.5 && power < 4) [number, power] = [number / 1000, power + 1];
  return `${number >= 99.5 || !power ? number.toFixed(0) : number.toPrecision(2)} ${["", "k", "M", "G", "T"][power]}${unit}`;
}

const seconds = (number) => (number < 0.1 ? `${(1e3 * number).toPrecision(2)} ms` : `${number.toPrecision(2)} s`);
const whole = (number) => Math.round(number).toLocaleString("en");

// What is wrong with what, and what to do next.
const trouble = (each) => [`${each.about}: `, ...sentence(each.sentence), ...(each.advice ? [" — ", ...sentence(each.advice)] : [])];

function health(kind, ...content) {
  document.getElementById("health").className = kind;
  show("health", ...content);
}

// Ends on a circle; a line is as thick as its way is fast, dashed where no plan uses it, and crossed out where blocked.
function linkMap(rows, names) {
  const [wide, high, radius] = [640, 300, 105];
  const at = new Map(names.map((name, index) => {
    const angle = (2 * Math.PI * index) / names.length - Math.PI / 2;
    return [name, [wide / 2 + 1.9 * radius * Math.cos(angle), high / 2 + radius * Math.sin(angle)]];
  }));
  const svg = (tag, props, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const lines = rows.filter((row) => row.ends[0] !== row.ends[1]).map((row) => {
    const [[x1, y1], [x2, y2]] = row.ends.map((end) => at.get(end));
    const width = row.num_measured ? Math.max(1, Math.min(9, Math.log10(Math.max(...row.bytes_per_s, 1)) - 4)) : 1;
    const kind = row.blocked.length ? "blocked" : row.jobs.length ? "used" : "idle";
    return svg("line", { x1, y1, x2, y2, "stroke-width": width, class: kind }, svg("title", {}, document.createTextNode(rate(row))));
  });
  const dots = names.map((name) => {
    const [x, y] = at.get(name);
    const anchor = Math.abs(x - wide / 2) < 20 ? "middle" : x < wide / 2 ? "end" : "start";
    const shift = { middle: 0, end: -12, start: 12 }[anchor];
    const label = svg("text", { x: x + shift, y: anchor === "middle" ? (y < high / 2 ? y - 14 : y + 22) : y + 5, "text-anchor": anchor });
    label.textContent = name.length > 22 ? `${name.slice(0, 21)}…` : name;
    return svg("g", {}, svg("circle", { cx: x, cy: y, r: 7 }), label);
  });
  return svg("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": "map of links" }, ...lines, ...dots);
}

function rate(row) {
  if (!row.num_measured) return "not measured";
  const [there, back] = row.bytes_per_s.map((number) => (number ? bytes(number, "B/s") : "?"));
  return `${there === back ? there : `${there} →, ${back} ←`}, ${seconds(row.round_trip_s)}`;
}

// A map, if it can be read, and a table of links.
function linksOf(rows) {
  const names = [...new Set(rows.flatMap((row) => row.ends))].sort();
  return rows.length ? [names.length > 2 && names.length <= 40 ? linkMap(rows, names) : "", table([
    ["between", (row) => row.ends[0] === row.ends[1] ? `inside ${row.ends[0]}` : row.ends.join(" — ")],
    ["rate", rate],
    ["lost", (row) => (row.loss ? `${(100 * row.loss).toPrecision(2)} %` : ""), "number"],
    ["jobs", (row) => row.jobs.join(", ")],
    ["through", (row) => row.via],
    ["trouble", (row) => row.blocked.map((text) => el("div", { class: "trouble" }, text)), "wide"],
  ], rows)] : [el("p", {}, "no way between nodes is measured yet")];
}

// Listens to events by name, and dials again after any end.
function listen(url, parts) {
  const source = new EventSource(url);
  for (const [name, take] of Object.entries(parts)) {
    source.addEventListener(name, (event) => take(JSON.parse(event.data)));
  }
  source.onerror = () => {
    const isRefused = source.readyState === EventSource.CLOSED;
    health("bad", ...sentence(`✗ no answer from \`headway web\`: ${isRefused
      ? "it refuses this page; open the address that it printed"
      : "is it still running? This page dials again by itself; what is below is old"}`));
    if (isRefused) setTimeout(() => listen(url, parts), 5000);
    else source.onopen = () => location.reload();
  };
}
