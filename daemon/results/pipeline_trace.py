"""Writes a pipeline, simulated or measured, as a trace that chrome://tracing and ui.perfetto.dev open. Pure.

Source: "Trace Event Format" (Google, 2016): complete events `X` with microseconds, metadata events `M` for names.
"""

from collections.abc import Mapping, Sequence

from headway.stages.schedule.operations import Backward, Forward
from headway.stages.schedule.simulator import TimedOp

TraceEvent = dict[str, object]

_COLOURS = {
    "forward": "thread_state_running",
    "backward": "thread_state_iowait",
    "orthogonalize": "thread_state_unknown",
    "update": "thread_state_runnable",
}


def chrome_trace(timeline: Sequence[TimedOp], names: Sequence[str]) -> dict[str, object]:
    """Return a JSON document: one process per row of the timeline, under its name; one event per operation."""
    return trace_document(trace_events(timeline, names))


def trace_document(*parts: Sequence[TraceEvent], about: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return events of several timelines in one document, with their metadata."""
    document: dict[str, object] = {"displayTimeUnit": "ms", "traceEvents": [event for part in parts for event in part]}
    return document | {"otherData": dict(about)} if about else document


def trace_events(
    timeline: Sequence[TimedOp], names: Sequence[str], *, first_row: int = 0, zero_s: float = 0.0
) -> list[TraceEvent]:
    """Return one process per row, the first of them with this number; zero_s: the moment of the timeline that becomes
    0.
    """
    events: list[TraceEvent] = []
    for row, name in enumerate(names, start=first_row):
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
                "pid": first_row + done.stage,
                "tid": 0,
                "ts": (done.started - zero_s) * 1e6,
                "dur": (done.ended - done.started) * 1e6,
                "args": about,
            }
        )
    return events


def kind_of(done: TimedOp) -> str:
    """Return `forward`, `backward` or `update`."""
    if isinstance(done.op, Forward):
        return "forward"
    return "backward" if isinstance(done.op, Backward) else "update"
