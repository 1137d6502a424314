"""What all benches share: alternating pairs, medians with their spread, a table for people and one JSON line last.

The machines are noisy, so every figure is a ratio of two sides measured in the same run, in turns; the order within a
pair alternates too, so that a drift of the machine's speed cancels.
"""

import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUM_BOOTSTRAP = 2000
TOLERANCE = 0.03  # how far below a bar the lower end of the interval may lie


@dataclass(frozen=True, slots=True)
class Figure:
    """A median with its 90 % bootstrap interval."""

    median: float
    low: float
    high: float
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float], *, seed: int = 0) -> "Figure":
        """The median of the samples; the interval resamples them NUM_BOOTSTRAP times."""
        generator = random.Random(seed)
        medians = sorted(statistics.median(generator.choices(samples, k=len(samples))) for _ in range(NUM_BOOTSTRAP))
        low, high = medians[int(0.05 * NUM_BOOTSTRAP)], medians[int(0.95 * NUM_BOOTSTRAP)]
        return cls(statistics.median(samples), low, high, len(samples))

    def holds(self, bar: float) -> bool:
        """Return whether the median reaches the bar with the interval's lower end no further than TOLERANCE
        below it.
        """
        return self.median >= bar and self.low >= bar - TOLERANCE

    def __str__(self) -> str:
        return f"{self.median:.3f}  [{self.low:.3f}, {self.high:.3f}]  n={self.num_samples}"


def alternate(num_rounds: int, *sides: Callable[[], float]) -> list[tuple[float, ...]]:
    """Measure all sides `num_rounds` times in turns, forwards and backwards: their values, in the order given."""
    rounds = []
    for index in range(num_rounds):
        order = range(len(sides)) if index % 2 == 0 else reversed(range(len(sides)))
        found = {side: sides[side]() for side in order}
        rounds.append(tuple(found[side] for side in range(len(sides))))
        progress(f"round {index + 1} of {num_rounds}: {' against '.join(f'{value:.4g}' for value in rounds[-1])}")
    return rounds


def progress(text: str) -> None:
    """A line for those who wait, apart from the results."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, str | int]:
    """Return the machine of the figures."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _cpu_lines() if line.startswith("model name")), platform.machine()
    )
    return {"cpu": model, "cores": os.cpu_count() or 0, "system": f"{platform.system()} {platform.release()}"}


def versions() -> dict[str, str]:
    """Versions of what decides the speed."""
    names = ("headway", "torch", "grpcio", "protobuf")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def report(
    title: str,
    figures: dict[str, Figure],
    *,
    bars: dict[str, float] | None = None,
    extra: dict[str, object] | None = None,
) -> int:
    """Print the table and, last, the JSON line. Returns the exit status: 1 if a bar does not hold."""
    bars = bars or {}
    print(f"\n{title}\n{'=' * len(title)}")
    width = max(len(name) for name in figures)
    for name, figure in figures.items():
        verdict = (
            "" if name not in bars else f"   bar {bars[name]:g}: {'holds' if figure.holds(bars[name]) else 'MISSED'}"
        )
        print(f"{name:{width}}  {figure}{verdict}")
    body: dict[str, object] = {name: round(figure.median, 4) for name, figure in figures.items()}
    body["spread"] = {name: [round(figure.low, 4), round(figure.high, 4)] for name, figure in figures.items()}
    body.update(extra or {})
    print(json.dumps({**body, "machine": machine(), "versions": versions()}), flush=True)
    return int(any(not figures[name].holds(bar) for name, bar in bars.items()))


def _cpu_lines() -> list[str]:
    try:
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123
            return lines.read().splitlines()
    except OSError:
        return []
