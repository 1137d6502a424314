"""Chooses between `2bw` and `1f1b` for a job whose file says `schedule = "auto"`. Pure.

A bubble costs seconds in every batch, and a delay costs batches: `1f1b` comes to a loss in some number of batches, and
`2bw` to the same one in more. So the schedule with less of (seconds a batch) × (batches) is sooner there. It is chosen
once, for the nodes that the cluster has when the job is submitted: the losses are a function of the job.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.cluster_plan import PlanRefused
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.planner import make_plan
from headway.stages.spec import AUTO, ScheduleName

CHOICES: Final[tuple[ScheduleName, ...]] = ("1f1b", "2bw")
"""Of two that are equally fast the first one is chosen: it has no delay."""
MORE_BATCHES: Final = {
    "adamw": (3.0, 1.6, 1.6),
    "mars": (3.0, 1.6, 1.6),
    "lion": (2.0, 2.0, 2.0),
    "soap": (1.35, 1.15, 1.15),
}
"""Batches of 2bw over those of 1f1b until the same loss, by the optimizer of the matrices: with the bare delay, with
Error Feedback, and with a start without a delay too. Estimated from the gaps after 1,000 batches of a small model that
docs/delay.md has, and from how its loss falls with the batches.
"""
_MORE_BATCHES: Final = (1.2, 1.1, 1.06)
"""Of Muon, of those that are not named there, and of all that train on from given weights."""
START_SHARE: Final = 0.05
"""A shorter start is as good as none."""
SHORT_BATCHES: Final = 600
MORE_IN_SHORT_RUNS: Final = 1.3
"""Times as many again, where weights from a seed are trained for fewer: most of a delay's price is paid early."""


def more_batches(spec: JobSpec) -> float:
    """Return the batches of 2bw over those of 1f1b until the same loss, as docs/delay.md lets expect."""
    is_tuned = bool(spec.origin.url)
    known = _MORE_BATCHES if is_tuned else MORE_BATCHES.get(spec.optim.matrices.name, _MORE_BATCHES)
    bare, corrected, started = known
    has_start = spec.train.sync_batches >= START_SHARE * spec.train.batches
    more = bare if not spec.optim.error_feedback else started if has_start else corrected
    return more if is_tuned or spec.train.batches >= SHORT_BATCHES else more * MORE_IN_SHORT_RUNS


def seconds_until(spec: JobSpec, seconds: Mapping[ScheduleName, float]) -> dict[ScheduleName, float]:
    """Return the seconds until the same loss, for each batch that `1f1b` needs until then. seconds: of a batch."""
    fresh = spec.train.sync_batches / spec.train.batches  # they take the time of 1f1b
    of_2bw = seconds["2bw"] * (1 - fresh) + seconds["1f1b"] * fresh
    return {"1f1b": seconds["1f1b"], "2bw": more_batches(spec) * of_2bw}


def with_chosen_schedule(
    spec: JobSpec, nodes: Sequence[NodeRecord], *, links: LinkAssumptions | None = None
) -> tuple[JobSpec, str]:
    """Return the job with a schedule that it leaves open chosen for these nodes, and a sentence on why; empty: the job
    names one.
    """
    if spec.train.schedule != AUTO:
        return spec, ""
    train = spec.train
    trains = (replace(train, schedule="1f1b", sync_batches=0), replace(train, schedule="2bw"))
    jobs = {each.schedule: replace(spec, train=each) for each in trains}
    plans = {each: make_plan(job, nodes, links=links) for each, job in jobs.items()}
    seconds = {each: plan.predicted_batch_seconds for each, plan in plans.items() if not isinstance(plan, PlanRefused)}
    if len(seconds) < len(CHOICES):
        schedule: ScheduleName = next(iter(seconds), "2bw")
        why = "only under it does the job fit into these nodes" if seconds else "no plan fits these nodes"
        return jobs[schedule], f"Schedule: {schedule}, because {why}."
    more, until = more_batches(spec), seconds_until(spec, seconds)
    schedule = min(CHOICES, key=until.__getitem__)
    took = " and ".join(f"{seconds[each]:.3g} s under {each}" for each in CHOICES)
    return jobs[schedule], (
        f"Schedule: {schedule}. A batch takes {took}; for its delay {spec.optim.matrices.name} is "
        f"taken to need {100 * (more - 1):.0f} % more batches to the same loss, as small models did "
        f"(docs/delay.md), so 2bw is there in "
        f"{until['2bw'] / until['1f1b']:.2f} times the seconds."
    )


def check_named(specs: Iterable[JobSpec], source: str) -> None:
    """Raise ConfigError for a job that leaves its schedule open, where there are no nodes to choose it for."""
    if any(spec.train.schedule == AUTO for spec in specs):
        what = (
            '"auto" is chosen for the nodes of a cluster, and there is none here; name the one that `headway plan` says'
        )
        raise ConfigError(what, f"{source}:train.schedule")
