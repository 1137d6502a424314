"""Limits how often a job may fail without progress before it is given up. Pure.

Without a limit, a job that fails at the same place after each rollback would repeat that without end. A job that gets
further has a new budget.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final

from headway.daemon.records.records import FailureCount, PlanRecord, WorkerRecord

MAX_SAME_BATCH: Final = 3
"""Failures in a row at one batch."""
MAX_SAME_FAULT: Final = 4
"""Failures by one error on one node. After three plans leave the node out; a fourth shows that no other takes its
place.
"""
MOST_SILENT: Final = 2
"""Failures without a new boundary after which each sentence about the job says how often it failed, and why."""
MAX_DEATHS: Final = 10
"""Incidents without a new boundary. Workers that fail together count once: one switch may take ten of them."""
DEATH_SIGNS: Final = ("ended by signal", "it was killed")
"""Signs, in the first lines of a worker's error, that its process was ended from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker that failed, or did not answer in time."""

    node: str
    batch: int = -1
    """Batch of the failure; -1: unknown."""
    fault: str = ""
    error: str = ""
    is_hopeless: bool = False


def was_killed(worker: WorkerRecord) -> bool:
    """Return whether the process was ended from outside, which is not the job's fault."""
    head = worker.error.split("\n", 2)[:2]
    return not worker.fault and any(sign in line for line in head for sign in DEATH_SIGNS)


def counted(
    before: FailureCount, deaths: Sequence[Death], *, boundary: int, plan: PlanRecord | None = None
) -> FailureCount:
    """Return the count after one more failure. boundary: the newest that the job can go back to; no deaths: only nodes
    went.

    plan: the plan in force. Holders that come and go move that boundary to and fro. Only a boundary beyond all that
    earlier failures found on the plan's timeline is progress. A plan that begins further back, after a loss of files,
    resets it.
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
    faults = (*before.faults, *{(death.fault, death.node) for death in deaths if death.fault})
    return FailureCount(
        boundary=before.boundary,
        timeline=before.timeline,
        num_deaths=before.num_deaths + 1,
        batch=batch,
        num_same_batch=before.num_same_batch + 1 if is_same else int(batch >= 0),
        faults=tuple(sorted(faults)),
    )


def repetition(count: FailureCount) -> str:
    """Return how often a job failed without progress, and why the last time, as the end of a sentence; empty: not
    often.
    """
    if count.num_deaths <= MOST_SILENT:
        return ""
    why = f", the last time because {count.cause}" if count.cause else ""
    return f"; it failed {count.num_deaths} times without a new boundary{why}; after {MAX_DEATHS} it is given up"


def broken_rule(count: FailureCount, deaths: Sequence[Death]) -> str:
    """Return which rule a count breaks, as the end of a sentence; empty: the job may continue."""
    if any(death.is_hopeless for death in deaths):
        return "another attempt would end in the same error"
    for fault in dict.fromkeys(fault for fault, _ in count.faults):
        nodes = sorted({node for other, node in count.faults if other == fault})
        if len(nodes) > 1:
            return f"the same error occurred on {' and '.join(nodes)}: {fault}"
    (fault, node), num_same = max(Counter(count.faults).items(), key=itemgetter(1), default=(("", ""), 0))
    if num_same >= MAX_SAME_FAULT:
        return f"the same error occurred {num_same} times on {node} without a new boundary to go back to: {fault}"
    if count.num_same_batch >= MAX_SAME_BATCH:
        return f"batch {count.batch} failed {count.num_same_batch} times without a new boundary to go back to"
    if count.num_deaths >= MAX_DEATHS:
        return f"it failed {count.num_deaths} times without a new boundary to go back to"
    return ""
