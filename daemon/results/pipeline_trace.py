"""A simulated pipeline as a trace that chrome://tracing and ui.perfetto.dev open. Pure.

Source: "Trace Event Format" (Google, 2016): complete events `X` with microseconds, metadata events `M` for names.
"""

from collections.abc import Sequence

from headway.stages.schedule import Backward, Forward
from headway.stages.simulator import TimedOp

_COLOURS = {"forward": "thread_state_running", "backward": "thread_state_iowait", "update": "thread_state_runnable"}


def chrome_trace(timeline: Sequence[TimedOp], names: Sequence[str]) -> dict[str, object]:
    """A JSON document: one process per row of the timeline, under its name; one event per operation."""
    events: list[dict[str, object]] = []
    for row, name in enumerate(names):
        events.append({"ph": "M", "name": "process_name", "pid": row, "tid": 0, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": row, "tid": 0, "args": {"sort_index": row}})
    for done in timeline:
        about: dict[str, object] = {"batch": done.op.batch, "version": done.version}
        if isinstance(done.op, Forward | Backward):
            about["microbatch"] = done.op.microbatch
        kind = kind_of(done)
        events.append(
            {
                "ph": "X",
                "name": str(done.op),
                "cat": kind,
                "cname": _COLOURS[kind],
                "pid": done.stage,
                "tid": 0,
                "ts": done.started * 1e6,
                "dur": (done.ended - done.started) * 1e6,
                "args": about,
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def kind_of(done: TimedOp) -> str:
    """`forward`, `backward` or `update`"""
    if isinstance(done.op, Forward):
        return "forward"
    return "backward" if isinstance(done.op, Backward) else "update"
