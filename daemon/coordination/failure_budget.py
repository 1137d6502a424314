"""How often a job may fail without getting further before it is given up. Pure.

A job that goes back and fails again at the same place would do so for ever; one that gets further has a new budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from headway.daemon.records import FailureCount, PlanRecord, WorkerRecord

MAX_SAME_BATCH: Final = 3
"""Failures in a row at one batch."""
MAX_DEATHS: Final = 10
"""Incidents without a new boundary to go back to. Workers that fail together are one: a switch may take ten of them."""
DEATH_SIGNS: Final = ("ended by signal", "it was killed")
"""What the first lines of a worker's error say when its process was ended from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker that failed, or did not answer in time."""

    node: str
    batch: int = -1
    """-1: not known."""
    fault: str = ""
    error: str = ""
    is_hopeless: bool = False


def was_killed(worker: WorkerRecord) -> bool:
    """Whether its process was ended from outside: that says nothing about the job."""
    head = worker.error.split("\n", 2)[:2]
    return not worker.fault and any(sign in line for line in head for sign in DEATH_SIGNS)


def counted(
    before: FailureCount, deaths: Sequence[Death], *, boundary: int, plan: PlanRecord | None = None
) -> FailureCount:
    """The count after one more failure. boundary: the newest that the job can go back to; no deaths: nodes alone.

    plan: in force. Holders that come and go move that boundary to and fro; only one beyond all that a failure has found
    on the plan's timeline is progress. A plan that begins further back, after a loss of files, begins there.
    """
    if plan is not None and plan.timeline != before.timeline:
        reached = min(before.boundary, plan.boundary) if before.timeline else before.boundary
        before = replace(before, timeline=plan.timeline, boundary=reached)
    if boundary > before.boundary:
        before = FailureCount(boundary=boundary, timeline=before.timeline)
    if not deaths:
        return before
    batch = max(death.batch for death in deaths)
    is_same = batch >= 0 and batch == before.batch
    faults = {*before.faults, *((death.fault, death.node) for death in deaths if death.fault)}
    return FailureCount(
        boundary=before.boundary,
        timeline=before.timeline,
        num_deaths=before.num_deaths + 1,
        batch=batch,
        num_same_batch=before.num_same_batch + 1 if is_same else int(batch >= 0),
        faults=tuple(sorted(faults)),
    )


def broken_rule(count: FailureCount, deaths: Sequence[Death]) -> str:
    """Which rule a count breaks, as a sentence's end; empty: the job may go on."""
    if any(death.is_hopeless for death in deaths):
        return "trying again would end in the same error"
    for fault in dict.fromkeys(fault for fault, _ in count.faults):
        nodes = sorted({node for other, node in count.faults if other == fault})
        if len(nodes) > 1:
            return f"the same error came on {' and '.join(nodes)}: {fault}"
    if count.num_same_batch >= MAX_SAME_BATCH:
        return f"batch {count.batch} failed {count.num_same_batch} times without a new boundary to go back to"
    if count.num_deaths >= MAX_DEATHS:
        return f"it failed {count.num_deaths} times without a new boundary to go back to"
    return ""
