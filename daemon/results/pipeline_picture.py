"""Draws a pipeline, simulated or measured: a row per worker, a bar per operation; several under each other."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.daemon.errors import ConfigError
from headway.daemon.results.pipeline_trace import kind_of
from headway.stages.schedule.operations import BatchOp
from headway.stages.schedule.simulator import TimedOp

COLOURS = {"forward": "#4c78a8", "backward": "#f2a541", "orthogonalize": "#b279a2", "update": "#59a14f"}
_WIDTH_IN, _MOST_WIDTH_IN, _DPI = 14.0, 60.0, 120
_OPERATION_IN = 0.09
"""A long picture grows until its bars have this average width."""
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


def check_drawing(option: str = "--simulate") -> None:
    """Raise ConfigError if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("draws with matplotlib: pip install 'headway[local]'", option)


def draw_pipeline(
    timeline: Sequence[TimedOp], names: Sequence[str], path: Path, *, window: tuple[float, float], title: str
) -> None:
    """Write a PNG of a window of simulated seconds; names: of the rows, from the top.

    Raises OSError.
    """
    panel = Panel(timeline=timeline, window=window, title=title, x_label="simulated, the pipe is full")
    draw_panels([panel], names, path)


def draw_panels(panels: Sequence[Panel], names: Sequence[str], path: Path) -> None:
    """Write a PNG of timelines under each other, all in the scale of the longest. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    length_s = max(panel.window[1] - panel.window[0] for panel in panels)
    most_ops = max(len(panel.timeline) for panel in panels) / len(names)
    width_in = min(_MOST_WIDTH_IN, max(_WIDTH_IN, most_ops * _OPERATION_IN)) if len(panels) > 1 else _WIDTH_IN
    height_in = min(40.0, (1.2 + 0.42 * len(names)) * len(panels) + 0.4)
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _draw(axes, panel, names, length_s=length_s, least_label_s=length_s / width_in * _LEAST_LABEL_IN)
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
