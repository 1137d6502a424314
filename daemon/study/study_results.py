"""What a study has found: the cells that are still to be trained, and the tables of those that are. Pure.

A gap is the loss of a treatment less that of the first one, of equal seeds. What is recovered of the second treatment's
gap is its share that another treatment does not have. Intervals are those of Student's t that hold 90 %.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headway.daemon.study.study_file import Cell, Study

_T_90: Final = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""95 % quantiles of Student's t, by degrees of freedom from 1; beyond them that of the last one, which is wider."""

Losses = Mapping[Cell, float]
"""Held-out losses after the last update, nats per token; infinite: the training diverged."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of paired differences, or of shares, over the seeds."""

    mean: float
    half: float
    """Half of the interval; NaN: there is one seed."""

    @property
    def excludes_0(self) -> bool:
        """Return whether the interval does not contain 0."""
        return abs(self.mean) > self.half


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One treatment of an optimizer."""

    optimizer: str
    treatment: str
    factor: float
    """Of the rates."""
    is_at_edge: bool
    """Whether the study has no lower, or no higher factor: a better one may lie beyond."""
    loss: float
    """Mean of the seeds."""
    gap: Estimate
    recovered: Estimate | None
    """Share of the second treatment's gap; None: there is no gap to speak of, or this is one of the two."""


def wanted(study: Study, losses: Losses) -> list[Cell]:
    """Return the cells that are to be trained now: with the first seed rates from the middle outwards, until the best
    one has worse neighbours on both sides or there is none; then the other seeds, at the rates that are best for the
    first treatment and for each itself. Empty: the study is complete.
    """
    first = study.seeds[0]
    tuning = [
        Cell(optimizer=o, treatment=t, factor=factor, seed=first)
        for o, t in study.jobs
        for factor in _untried(study, tried(study, losses, o, t))
    ]
    if tuning:
        return tuning
    kept = dict.fromkeys(
        (o, t, factor) for o, t in study.jobs for factor in (best(study, losses, o), best(study, losses, o, t))
    )
    repeated = [Cell(optimizer=o, treatment=t, factor=f, seed=seed) for seed in study.seeds for o, t, f in kept]
    return [cell for cell in repeated if cell not in losses]


def best(study: Study, losses: Losses, optimizer: str, treatment: str = "") -> float:
    """Return the factor of the rates with which the first seed ends lowest, under the first treatment or another."""
    of_rate = tried(study, losses, optimizer, treatment or study.treatments[0])
    return min(of_rate, key=of_rate.__getitem__)


def tried(study: Study, losses: Losses, optimizer: str, treatment: str) -> dict[float, float]:
    """Return the losses of the first seed by factor."""
    cells = {f: Cell(optimizer=optimizer, treatment=treatment, factor=f, seed=study.seeds[0]) for f in study.rates}
    return {factor: losses[cell] for factor, cell in cells.items() if cell in losses}


def _untried(study: Study, of_rate: Mapping[float, float]) -> list[float]:
    """Return the factors that come next: the middle one, then those beside the best."""
    if not of_rate:
        return [study.rates[(len(study.rates) - 1) // 2]]
    place = study.rates.index(min(of_rate, key=of_rate.__getitem__))
    return [factor for factor in study.rates[max(0, place - 1) : place + 2] if factor not in of_rate]


def table(study: Study, losses: Losses, *, own_rates: bool = False) -> list[Line]:
    """Return the lines of a complete study: at the rates that are best for the first treatment, or for each itself."""
    lines = []
    base, *_ = study.treatments
    for optimizer in study.optimizers:
        at = {t: best(study, losses, optimizer, t if own_rates else "") for t in study.treatments}
        ends = {
            t: [losses[Cell(optimizer=optimizer, treatment=t, factor=at[t], seed=seed)] for seed in study.seeds]
            for t in study.treatments
        }
        gaps = {t: [loss - synced for loss, synced in zip(ends[t], ends[base], strict=True)] for t in ends}
        for treatment in study.treatments:
            lines.append(
                Line(
                    optimizer=optimizer,
                    treatment=treatment,
                    factor=at[treatment],
                    is_at_edge=len(study.rates) > 1 and at[treatment] in (study.rates[0], study.rates[-1]),
                    loss=mean_of(ends[treatment]),
                    gap=estimate(gaps[treatment]),
                    recovered=_recovered(study, gaps, treatment),
                )
            )
    return lines


def _recovered(study: Study, gaps: Mapping[str, Sequence[float]], treatment: str) -> Estimate | None:
    if len(study.treatments) < 3 or treatment in study.treatments[:2]:
        return None
    delayed = gaps[study.treatments[1]]
    if not all(map(math.isfinite, (*delayed, *gaps[treatment]))) or min(delayed) <= 0:
        return None
    return estimate([1 - gap / of for gap, of in zip(gaps[treatment], delayed, strict=True)])


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of some numbers; NaN: they are infinite in both directions."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of some numbers with its 90 % interval."""
    mean = mean_of(values)
    if len(values) < 2 or not math.isfinite(mean):
        return Estimate(mean, math.nan)
    t = _T_90[min(len(values) - 1, len(_T_90)) - 1]
    return Estimate(mean, t * statistics.stdev(values) / math.sqrt(len(values)))


def markdown(lines: Iterable[Line]) -> list[str]:
    """Return a table for people and for pages."""
    found = ["| optimizer | treatment | rates × | held-out loss | gap | recovered |", "|---|---|---|---|---|---|"]
    for line in lines:
        share = "" if line.recovered is None else f"{line.recovered.mean:.0%}{_half(line.recovered, '.0%')}"
        has_gap, loss = line.gap.mean != 0 and math.isfinite(line.gap.mean), f"{line.loss:.4f}"
        gap = f"{line.gap.mean:+.4f}{_half(line.gap, '.4f')}" if has_gap else ""
        loss = loss if math.isfinite(line.loss) else "diverged"
        found.append(f"| {line.optimizer} | {line.treatment} | {line.factor:g} | {loss} | {gap} | {share} |")
    return found


def edge_note(lines: Iterable[Line]) -> list[str]:
    """Return a line that names what ends lowest at the edge of the rates; none: nothing does."""
    found = [f"{line.optimizer}, {line.treatment} (× {line.factor:g})" for line in lines if line.is_at_edge]
    return [f"lowest at the edge of study.rates, so better ones may lie beyond: {'; '.join(found)}"] if found else []


def _half(of: Estimate, form: str) -> str:
    return "" if math.isnan(of.half) else f" ± {of.half:{form}}"
