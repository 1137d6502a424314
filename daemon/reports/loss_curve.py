"""A curve drawn in braille dots: two dots wide and four high per character."""

import math
from collections.abc import Sequence

_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def draw_curve(points: Sequence[tuple[int, float]], *, width: int, height: int, last: int = 0) -> list[str]:
    """Return lines with the curve of (batch, loss) points and its scale at the left; empty without finite points.

    width and height are characters; last: the batch at the right edge (0: the newest point).
    """
    finite = [(batch, loss) for batch, loss in points if math.isfinite(loss)]
    scale_width = 8
    columns = width - scale_width
    if not finite or columns < 2 or height < 1:
        return []
    low, high = min(loss for _, loss in finite), max(loss for _, loss in finite)
    span = high - low or 1.0
    right = max(last, max(batch for batch, _ in finite), 1)
    cells = [[0] * columns for _ in range(height)]
    for x, loss in _means(finite, right=right, num_columns=2 * columns):
        y = round((high - loss) / span * (4 * height - 1))
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    labels = [f"{high:7.3f} "] + [" " * scale_width] * (height - 2) + ([f"{low:7.3f} "] if height > 1 else [])
    return [label + "".join(chr(_BLANK + cell) for cell in row) for label, row in zip(labels, cells, strict=True)]


def _means(points: Sequence[tuple[int, float]], *, right: int, num_columns: int) -> list[tuple[int, float]]:
    """Return the mean loss of each column of dots that has points."""
    sums: dict[int, tuple[float, int]] = {}
    for batch, loss in points:
        x = min(num_columns - 1, batch * (num_columns - 1) // right)
        total, count = sums.get(x, (0.0, 0))
        sums[x] = (total + loss, count + 1)
    return [(x, total / count) for x, (total, count) in sorted(sums.items())]
