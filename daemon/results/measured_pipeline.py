"""The last batches of a running pipeline, joined from each worker's memory. Pure.

Only batches that every worker remembers completely are shown: the window begins where the youngest memory does, and
ends where the first worker was asked.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from headway.daemon.results.pipeline_trace import kind_of
from headway.stages.schedule.operations import Backward, Forward, Update
from headway.stages.schedule.simulator import TimedOp

Window = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFigures:
    """The figures of one worker in a window. Seconds are medians of one operation; None: there was none."""

    forward_s: float | None
    backward_s: float | None
    update_s: float | None
    idle: float
    """Share of the window without an operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPipeline:
    """Some batches of all workers. Time 0 is where the window begins."""

    first_batch: int
    last_batch: int
    step_seconds: float
    """Seconds per batch."""
    window: Window
    timeline: tuple[TimedOp, ...]
    """Operations in the window, also those of other batches."""


def measured_pipeline(memories: Mapping[int, Sequence[TimedOp]], *, num_batches: int) -> MeasuredPipeline | None:
    """Return the newest batches that all workers remember completely, num_batches at most. None: there is no such
    batch.

    memories: by position, each worker's operations, in order and on one clock; none is empty.
    """
    known = max(ops[0].started for ops in memories.values()), min(ops[-1].ended for ops in memories.values())
    whole = set.intersection(*(_whole_batches(ops, known) for ops in memories.values()))
    if not whole:
        return None
    last = first = max(whole)
    while first - 1 in whole and last - first + 1 < num_batches:
        first -= 1
    of_window = [op for ops in memories.values() for op in ops if first <= op.op.batch <= last]
    begin, end = min(op.started for op in of_window), max(op.ended for op in of_window)
    ends = [op.ended for op in memories[min(memories)] if isinstance(op.op, Update) and first <= op.op.batch <= last]
    return MeasuredPipeline(
        first_batch=first,
        last_batch=last,
        step_seconds=(ends[-1] - ends[0]) / (last - first) if last > first else end - begin,
        window=(0.0, end - begin),
        timeline=tuple(
            TimedOp(op.stage, op.op, op.version, op.started - begin, op.ended - begin)
            for _, ops in sorted(memories.items())
            for op in ops
            if op.ended > begin and op.started < end
        ),
    )


def figures(timeline: Sequence[TimedOp], position: int, window: Window) -> WorkerFigures:
    """Return a worker's figures within a window."""
    begin, end = window
    done = [op for op in timeline if op.stage == position and op.ended > begin and op.started < end]
    busy = sum(min(op.ended, end) - max(op.started, begin) for op in done)

    def typical(kind: str) -> float | None:
        seconds = [op.ended - op.started for op in done if kind_of(op) == kind]
        return median(seconds) if seconds else None

    return WorkerFigures(
        forward_s=typical("forward"),
        backward_s=typical("backward"),
        update_s=typical("update"),
        idle=max(0.0, 1.0 - busy / (end - begin)),
    )


def _whole_batches(ops: Sequence[TimedOp], known: Window) -> set[int]:
    """Return batches of which a worker remembers every operation, within all workers' memories."""
    forwards = Counter(op.op.batch for op in ops if isinstance(op.op, Forward))
    backwards = Counter(op.op.batch for op in ops if isinstance(op.op, Backward))
    updated = {op.op.batch for op in ops if isinstance(op.op, Update)}
    outside = {op.op.batch for op in ops if op.started < known[0] or op.ended > known[1]}
    num_held = max(forwards.values(), default=0)
    return {batch for batch in updated - outside if forwards[batch] == backwards[batch] == num_held > 0}
