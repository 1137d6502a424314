"""Draws a study: for each optimizer what it ends at by rate, and its curves at the best one."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.study.study_file import Cell, Study
from headway.daemon.study.study_results import best, tried
from headway.daemon.study.study_run import Row, losses_of

_COLOURS: Final = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
"""Safe for the colour-blind: Okabe and Ito, https://jfly.uni-koeln.de/color/."""
_PANEL_IN: Final = (5.2, 3.2)
_DPI: Final = 110
_MOST_ROWS: Final = 40
"""Optimizers that are drawn: a picture has an end."""


def draw_study(study: Study, rows: Mapping[Cell, Row], path: Path) -> None:
    """Write a PNG of a complete study. Raises ConfigError when it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    (width, height), drawn = _PANEL_IN, study.optimizers[:_MOST_ROWS]
    figure = Figure(figsize=(2 * width, height * len(drawn)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, optimizer in zip(figure.subplots(len(drawn), 2, squeeze=False), drawn, strict=True):
        _draw_rates(axes[0], study, rows, optimizer)
        _draw_curves(axes[1], study, rows, optimizer)
    try:
        with warnings.catch_warnings(action="ignore"):  # of letters that the font lacks
            figure.savefig(path, dpi=_DPI, format="png")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror or error}", str(path)) from error


def _draw_rates(axes: Any, study: Study, rows: Mapping[Cell, Row], optimizer: str) -> None:
    losses, factors = losses_of(rows), set[float]()
    for treatment, colour in zip(study.treatments, _COLOURS * len(study.treatments), strict=False):
        of_rate = tried(study, losses, optimizer, treatment)
        factors |= of_rate.keys()
        axes.plot([*of_rate], [*of_rate.values()], "o-", color=colour, label=_text(treatment))
    axes.set(title=_text(optimizer), xlabel="factor of the rates", ylabel="held-out loss, nats", xscale="log")
    axes.set_xticks([*factors], labels=[f"{factor:g}" for factor in factors])
    axes.set_xticks([], minor=True)
    axes.legend(frameon=False, fontsize=8)


def _draw_curves(axes: Any, study: Study, rows: Mapping[Cell, Row], optimizer: str) -> None:
    factor = best(study, losses_of(rows), optimizer)
    for treatment, colour in zip(study.treatments, _COLOURS * len(study.treatments), strict=False):
        for seed in study.seeds:
            cell = Cell(optimizer=optimizer, treatment=treatment, factor=factor, seed=seed)
            curve, batches = rows[cell].curve, study.job(cell).train.batches
            places = [(index + 1) * batches / len(curve) for index in range(len(curve))]
            label = _text(treatment) if seed == study.seeds[0] else None
            axes.plot(places, curve, color=colour, linewidth=0.9, label=label)
    axes.set(
        title=f"{_text(optimizer)}, rates × {factor:g}", xlabel="batch", ylabel="training loss, nats", xscale="log"
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, fontsize=8)


def _text(name: str) -> str:
    """Return a name as the drawing shows it: `$` begins no formula, and `_` hides nothing."""
    return name.replace("$", r"\$").replace("_", " _", name.startswith("_"))
