"""Draws the Hamiltonian of Muon on a small problem, by full batches, without a delay and with one.

The problem and the function are those of tests/unit/optim/test_delay_theory.py. `--out FILE` takes the picture.
"""

import argparse
import sys
from pathlib import Path

from rigs.measure import Figure, report

from tests.rigs.delayed_steps import hamiltonian

RUNS = {"no delay": (0, 0.0, "#000000"), "delay 1": (1, 0.0, "#d55e00"), "delay 1 + EF": (1, 1.0, "#0072b2")}
"""Delay, α and colour."""
RATES = (0.1, 0.03)
LEVEL = 150
"""The last so many of the batches, over which a run stays at a level."""


def draw(runs: dict[float, dict[str, list[float]]], path: Path) -> None:
    """Draw a panel for each rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet(figsize=(10.4, 3.2), layout="constrained")
    FigureCanvasAgg(sheet)
    for axes, (rate, of_rate) in zip(sheet.subplots(1, len(runs)), runs.items(), strict=True):
        for name, energies in of_rate.items():
            axes.plot(range(1, len(energies) + 1), energies, color=RUNS[name][-1], linewidth=0.9, label=name)
        axes.set(title=f"rate {rate:g}", xlabel="update", ylabel="Hamiltonian", yscale="log")
        axes.legend(frameon=False, fontsize=8)
    sheet.savefig(path, dpi=110)


def main() -> int:
    """Compute, draw and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the picture")
    out = parser.parse_args().out
    runs = {
        rate: {
            name: hamiltonian(delay=delay, alpha=alpha, lr=rate, batches=800)
            for name, (delay, alpha, _) in RUNS.items()
        }
        for rate in RATES
    }
    if out:
        draw(runs, out)
    levels = {
        f"rate {rate:g}, {name}: level over that without a delay": Figure.of(
            [one / other for one, other in zip(energies[-LEVEL:], of_rate["no delay"][-LEVEL:], strict=True)]
        )
        for rate, of_rate in runs.items()
        for name, energies in of_rate.items()
        if name != "no delay"
    }
    return report("Muon's Hamiltonian", levels)


if __name__ == "__main__":
    sys.exit(main())
