"""Draws a pipeline, simulated or measured: a row per worker, a bar per operation; several under each other.

It is also written as a trace that chrome://tracing and ui.perfetto.dev open. Source: "Trace Event Format" (Google,
2016): complete events `X` with microseconds, metadata events `M` for names.
"""

import importlib.util
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from headway.daemon.base.errors import ConfigError
from headway.stages.schedule.operations import Backward, BatchOp, Forward, Update
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


TraceEvent = dict[str, object]

_COLOURS = {
    "forward": "thread_state_running",
    "backward": "thread_state_iowait",
    "orthogonalize": "thread_state_unknown",
    "update": "thread_state_runnable",
}


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


COLOURS = {"forward": "#4c78a8", "backward": "#f2a541", "orthogonalize": "#b279a2", "update": "#59a14f"}
_WIDTH_IN, _DPI = 14.0, 120
_OPERATION_IN = 0.09
"""A long timeline is cut to its last part, in which bars have this average width."""
_LEAST_LABEL_IN = 0.16
"""Narrower bars carry no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One timeline of a picture."""

    timeline: Sequence[TimedOp]
    window: tuple[float, float]
    """Interval of the picture, in seconds of the timeline."""
    title: str
    x_label: str
    prefix: str = ""
    """Begins the names of its rows in a trace."""
    zero_s: float = 0.0
    """Moment of the timeline that becomes 0 in a trace."""


def check_drawing(option: str = "--simulate") -> None:
    """Raise ConfigError if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("draws with matplotlib: pip install 'headway[local]'", option)


def write_panels(
    panels: Sequence[Panel],
    names: Sequence[str],
    *,
    picture: Path | None,
    trace: Path | None,
    about: Mapping[str, object] | None = None,
) -> list[str]:
    """Write the files that were asked for, with a row for each name and panel; return a line for each file.

    about: metadata of the trace. Raises ConfigError for a path that cannot be written.
    """
    path = picture
    try:
        if picture is not None:
            draw_panels(panels, names, picture)
        path = trace
        if trace is not None:
            trace.write_text(json.dumps(trace_document(panels, names, about=about)))
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror or error}", str(path)) from error
    return [f"{what:8}  {path}" for what, path in (("timeline", picture), ("trace", trace)) if path is not None]


def trace_document(
    panels: Sequence[Panel], names: Sequence[str], *, about: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return a JSON document: one process per panel and row; one event per operation."""
    events: list[TraceEvent] = []
    for number, panel in enumerate(panels):
        rows = [f"{panel.prefix}{name}" for name in names]
        events += trace_events(panel.timeline, rows, first_row=number * len(names), zero_s=panel.zero_s)
    document: dict[str, object] = {"displayTimeUnit": "ms", "traceEvents": events}
    return document | {"otherData": dict(about)} if about else document


def draw_panels(panels: Sequence[Panel], names: Sequence[str], path: Path) -> None:
    """Write a PNG of timelines under each other, all in the scale of the longest: as much of their ends as can be read.

    Raises OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    length_s = max(panel.window[1] - panel.window[0] for panel in panels)
    most_ops = max(len(panel.timeline) for panel in panels) / len(names)
    if len(panels) > 1:
        length_s *= min(1.0, _WIDTH_IN / (most_ops * _OPERATION_IN))
        panels = [
            replace(each, window=(max(each.window[0], each.window[1] - length_s), each.window[1])) for each in panels
        ]
    height_in = min(40.0, (1.2 + 0.42 * len(names)) * len(panels) + 0.4)
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _draw(axes, panel, names, length_s=length_s, least_label_s=length_s / _WIDTH_IN * _LEAST_LABEL_IN)
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.savefig(path, dpi=_DPI, format="png")


def _draw(axes: Any, panel: Panel, names: Sequence[str], *, length_s: float, least_label_s: float) -> None:
    begin, end = panel.window
    unit, scale = ("ms", 1e3) if length_s < 10 else ("s", 1.0)
    for row in range(len(names)):
        shown = [done for done in panel.timeline if done.stage == row and done.ended > begin and done.started < end]
        for kind, colour in COLOURS.items():
            bars = [
                ((done.started - begin) * scale, (done.ended - done.started) * scale)
                for done in shown
                if kind_of(done) == kind
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.4)
        for done in shown:
            if done.ended - done.started >= least_label_s and not isinstance(done.op, BatchOp):
                middle = ((done.started + done.ended) / 2 - begin) * scale
                axes.text(middle, row, str(done.op.microbatch), ha="center", va="center", fontsize=6, clip_on=True)
    axes.set(
        xlim=(0, length_s * scale),
        ylim=(len(names) - 0.4, -0.6),
        xlabel=f"{unit} ({panel.x_label})",
        title=panel.title,
    )
    axes.set_yticks(range(len(names)), names, fontsize=8)
