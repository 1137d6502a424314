"""A simulated pipeline as a picture: a row per worker, a bar per operation."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from headway.daemon.errors import ConfigError
from headway.daemon.results.pipeline_trace import kind_of
from headway.stages.schedule import Update
from headway.stages.simulator import TimedOp

COLOURS = {"forward": "#4c78a8", "backward": "#f2a541", "update": "#59a14f"}
_WIDTH_IN, _DPI = 14.0, 120
_LEAST_LABEL_IN = 0.16
"""Bars that are narrower carry no number."""


def check_drawing() -> None:
    """Raises ConfigError where there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("draws with matplotlib: pip install 'headway[local]'", "--simulate")


def draw_pipeline(
    timeline: Sequence[TimedOp], names: Sequence[str], path: Path, *, window: tuple[float, float], title: str
) -> None:
    """Write a PNG of what happens within a window of simulated seconds; names: of the rows, from the top.

    Raises OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    begin, end = window
    unit, scale = ("ms", 1e3) if end - begin < 10 else ("s", 1.0)
    figure = Figure(figsize=(_WIDTH_IN, min(40.0, 1.6 + 0.42 * len(names))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    least_label = (end - begin) / _WIDTH_IN * _LEAST_LABEL_IN
    for row in range(len(names)):
        shown = [done for done in timeline if done.stage == row and done.ended > begin and done.started < end]
        for kind, colour in COLOURS.items():
            bars = [
                ((done.started - begin) * scale, (done.ended - done.started) * scale)
                for done in shown
                if kind_of(done) == kind
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.4)
        for done in shown:
            if done.ended - done.started >= least_label and not isinstance(done.op, Update):
                middle = ((done.started + done.ended) / 2 - begin) * scale
                axes.text(middle, row, str(done.op.microbatch), ha="center", va="center", fontsize=6, clip_on=True)
    axes.set(
        xlim=(0, (end - begin) * scale),
        ylim=(len(names) - 0.4, -0.6),
        xlabel=f"{unit} (simulated, the pipe is full)",
        title=title,
    )
    axes.set_yticks(range(len(names)), names, fontsize=8)
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.savefig(path, dpi=_DPI, format="png")
