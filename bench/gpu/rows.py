"""The rows of the table: a figure of a probe against its bar, and what came of it. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

NO_VALUE: Final = "-"


class Verdict(StrEnum):
    """What a row says."""

    OK = "ok"
    MISSED = "missed"  # measured, and short of the bar
    FAILED = "failed"  # not measured
    SKIPPED = "skipped"  # this machine lacks what the row needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure to show."""

    name: str
    key: str
    """Its name in the probe's JSON line."""
    least: float | None = None
    most: float | None = None
    """The bar; with neither, measuring is all that is wanted."""
    unit: str = ""
    is_general: bool = False
    """Whether its bar holds on a CPU too, as that of equal bits does; speeds there have none."""

    def on(self, device: str) -> "Row":
        """Return the row with the bar that it has on a kind of device."""
        return self if device != "cpu" or self.is_general else replace(self, least=None, most=None)

    @property
    def bar(self) -> str:
        """Return the bar for people."""
        if self.least is not None:
            return f"≥ {self.least:g}"
        return f"≤ {self.most:g}" if self.most is not None else NO_VALUE


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What a probe came to: its figures, or why there are none."""

    figures: Mapping[str, object]
    seconds: float
    trouble: str = ""
    """One line on a probe that ended badly; what it printed before still counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRow:
    """A row with its value."""

    row: Row
    verdict: Verdict
    value: float | None = None
    reason: str = ""


def judge(row: Row, result: ProbeResult) -> JudgedRow:
    """Compare a row's figure with its bar. A figure of null says that the machine lacks what it needs."""
    if row.key not in result.figures:
        reason = result.trouble or f"the probe says nothing of {row.key}"
        return JudgedRow(row=row, verdict=Verdict.FAILED, reason=reason)
    found = result.figures[row.key]
    if found is None:
        reason = str(result.figures.get(f"{row.key}_reason", "not possible on this machine"))
        return JudgedRow(row=row, verdict=Verdict.SKIPPED, reason=reason)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return JudgedRow(row=row, verdict=Verdict.FAILED, reason=f"{row.key} is no number: {found!r}")
    short = (row.least is not None and found < row.least) or (row.most is not None and found > row.most)
    return JudgedRow(row=row, verdict=Verdict.MISSED if short else Verdict.OK, value=float(found))


def table(rows: Sequence[JudgedRow]) -> str:
    """Return the table for people, and below it why rows failed or were skipped."""
    cells = [("figure", "value", "bar", "")]
    for judged in rows:
        value = NO_VALUE if judged.value is None else f"{judged.value:.4g}{judged.row.unit and ' '}{judged.row.unit}"
        cells.append((judged.row.name, value, judged.row.bar, judged.verdict.value))
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = [
        f"{name:{widths[0]}}  {value:>{widths[1]}}  {bar:>{widths[2]}}  {verdict}".rstrip()
        for name, value, bar, verdict in cells
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    named: dict[str, list[str]] = {}
    for judged in rows:
        if judged.reason:
            named.setdefault(judged.reason, []).append(judged.row.name)
    reasons = [f"{'; '.join(names)}: {reason}" for reason, names in named.items()]
    return "\n".join([*lines, *(["", *reasons] if reasons else [])])


def as_records(rows: Sequence[JudgedRow]) -> list[dict[str, object]]:
    """Return the rows for the JSON file."""
    return [
        {
            "name": judged.row.name,
            "value": judged.value,
            "unit": judged.row.unit,
            "bar": judged.row.bar,
            "verdict": judged.verdict.value,
            "reason": judged.reason,
        }
        for judged in rows
    ]


def is_all_well(rows: Sequence[JudgedRow]) -> bool:
    """Return whether no row missed its bar or failed."""
    return not any(judged.verdict in (Verdict.MISSED, Verdict.FAILED) for judged in rows)
