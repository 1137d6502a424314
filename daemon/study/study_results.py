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
    loss: float
    """Mean of the seeds."""
    gap: Estimate
    recovered: Estimate | None
    """Share of the second treatment's gap; None: there is no gap to speak of, or this is one of the two."""


def wanted(study: Study, losses: Losses) -> list[Cell]:
    """Return the cells that are to be trained now: every rate with the first seed, and then, of the rates that are best
    without the delay and for each treatment itself, the other seeds. Empty: the study is complete.
    """
    first, *others = study.seeds
    kinds = [*study.jobs]
    tuning = [
        Cell(optimizer=o, treatment=t, factor=f, seed=first) for f in _from_the_middle(study.rates) for o, t in kinds
    ]
    if missing := [cell for cell in tuning if cell not in losses]:
        return missing
    kept = dict.fromkeys(
        (o, t, factor) for o, t in kinds for factor in (best(study, losses, o), best(study, losses, o, t))
    )
    repeated = [Cell(optimizer=o, treatment=t, factor=f, seed=seed) for seed in others for o, t, f in kept]
    return [cell for cell in repeated if cell not in losses]


def best(study: Study, losses: Losses, optimizer: str, treatment: str = "") -> float:
    """Return the factor of the rates with which the first seed ends lowest, under the first treatment or another."""
    of = treatment or study.treatments[0]
    return min(
        study.rates,
        key=lambda factor: losses[Cell(optimizer=optimizer, treatment=of, factor=factor, seed=study.seeds[0])],
    )


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
                    loss=statistics.fmean(ends[treatment]),
                    gap=estimate(gaps[treatment]),
                    recovered=_recovered(study, gaps, treatment),
                )
            )
    return lines


def _recovered(study: Study, gaps: Mapping[str, Sequence[float]], treatment: str) -> Estimate | None:
    if len(study.treatments) < 3 or treatment in study.treatments[:2]:
        return None
    delayed = gaps[study.treatments[1]]
    if any(gap <= 0 or not math.isfinite(gap) for gap in delayed):
        return None
    return estimate([1 - gap / of for gap, of in zip(gaps[treatment], delayed, strict=True)])


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of some numbers with its 90 % interval."""
    mean = statistics.fmean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return Estimate(mean, math.nan)
    t = _T_90[min(len(values) - 1, len(_T_90)) - 1]
    return Estimate(mean, t * statistics.stdev(values) / math.sqrt(len(values)))


def _from_the_middle(rates: Sequence[float]) -> list[float]:
    """Return the rates, those that are most likely the best first: an interrupted study has something to say."""
    middle = (len(rates) - 1) / 2
    return [rates[index] for index in sorted(range(len(rates)), key=lambda index: abs(index - middle))]


def markdown(lines: Iterable[Line]) -> list[str]:
    """Return a table for people and for pages."""
    found = ["| optimizer | treatment | rates × | held-out loss | gap | recovered |", "|---|---|---|---|---|---|"]
    for line in lines:
        share = "" if line.recovered is None else f"{line.recovered.mean:.0%}{_half(line.recovered, '.0%')}"
        gap = "" if line.gap.mean == 0 else f"{line.gap.mean:+.4f}{_half(line.gap, '.4f')}"
        found.append(f"| {line.optimizer} | {line.treatment} | {line.factor:g} | {line.loss:.4f} | {gap} | {share} |")
    return found


def _half(of: Estimate, form: str) -> str:
    return "" if math.isnan(of.half) else f" ± {of.half:{form}}"
