"""How long each kind of layer takes on this device: timed on few microbatches and updates, as medians of the newest.

A sampled forward is marked between its layers, its backward where the gradient of the hidden state between two layers
is done. On CUDA a mark is an event that is read once the device has passed it: nothing waits for the device. What is
not sampled costs one call a microbatch, and nothing per layer.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean, median
from time import perf_counter
from typing import Final

import torch
from torch import Tensor

MICROBATCHES_PER_SAMPLE: Final = 50
UPDATES_PER_SAMPLE: Final = 10
SECONDS_PER_SAMPLE: Final = 0.5
"""After so long the next microbatch, or update, is sampled too: where they are slow, a sample costs little of them, and
fifty of them are a long time to train along a bad cut."""
NUM_EARLY: Final = 8
"""The second and the next ones are sampled too, so that something is known soon. The first one is not: it pays for what
is made once."""
WINDOW: Final = 7
"""Samples that a median is of: fewer than the early ones, the first of which meet cold caches and fresh memory."""

Mark = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """One layer of a kind: forward and backward of a microbatch, and one update.

    A backward includes what is computed again. Clipping and the sums of gradients are no layer's.
    """

    forward_s: float
    backward_s: float
    update_s: float
    spread: float = 0.0
    """Of forward and backward: half of what the middle samples span, relative to the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What a worker knows about its stage's layers."""

    layers: Mapping[str, LayerSeconds] = field(default_factory=dict)
    """By kind, `embed`, `block` or `head`: those of which every time is known."""
    peak_bytes: int = 0
    """Most that was allocated on a CUDA device at once, since the plan began; 0: not known."""
    num_samples: int = 0
    """Microbatches that were timed."""


class Sample:
    """One microbatch, or one update, that is timed layer by layer."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._last = mark()
        self.spans: dict[str, list[tuple[int, Mark, Mark]]] = {"forward": [], "backward": [], "update": []}
        """By what was done: (layer, begin, end)."""

    @property
    def last(self) -> Mark:
        """The newest mark."""
        return self._last

    def begin(self) -> None:
        """What comes next is timed from now."""
        self._last = self._mark()

    def ended(self, what: str, layer: int) -> None:
        """`forward`, `backward` or `update` of a layer, by its position in the stage, has ended; more begins."""
        now = self._mark()
        self.spans[what].append((layer, self._last, now))
        self._last = now

    def ends_backward(self, layer: int, hidden: Tensor) -> None:
        """The backward of a layer will have ended when the gradient of its input is done."""
        hidden.register_hook(lambda _gradient: self.ended("backward", layer))  # type: ignore[no-untyped-call]


class LayerTimes:
    """One stage's, for the time of one generation. Written by the thread that computes, read by any."""

    def __init__(self, layers: Sequence[str], device: torch.device) -> None:
        """layers: their names."""
        self._kinds = tuple(name.partition(".")[0] for name in layers)
        self._device = device
        self._num_microbatches = 0
        self._num_updates = 0
        self._num_samples = 0
        self._microbatch_due = self._update_due = -inf
        self._unread: list[Sample] = []
        self._newest: dict[tuple[str, str], deque[float]] = {}
        self._layers: Mapping[str, LayerSeconds] = {}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def measured(self) -> Measurements:
        """What is known now."""
        peak_bytes = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        return Measurements(layers=self._layers, peak_bytes=peak_bytes, num_samples=self._num_samples)

    def microbatch(self) -> Sample | None:
        """To be asked once per forward: where to write its times, and its backward's, if it is sampled."""
        number = self._num_microbatches
        self._num_microbatches = number + 1
        if self._unread:
            self._read()
        now = perf_counter()
        if number % MICROBATCHES_PER_SAMPLE == 0 or number <= NUM_EARLY or now >= self._microbatch_due:
            self._microbatch_due = now + SECONDS_PER_SAMPLE
            return Sample(self._marker()) if number else None
        return None

    def update(self) -> Sample | None:
        """The same, once per update."""
        number = self._num_updates
        self._num_updates = number + 1
        now = perf_counter()
        if number % UPDATES_PER_SAMPLE == 0 or number <= NUM_EARLY or now >= self._update_due:
            self._update_due = now + SECONDS_PER_SAMPLE
            return Sample(self._marker()) if number else None
        return None

    def finished(self, sample: Sample) -> None:
        """A sample has all its marks."""
        self._unread.append(sample)
        self._read()

    def _marker(self) -> Callable[[], Mark]:
        return _event if self._device.type == "cuda" else perf_counter

    def _read(self) -> None:
        """Take in the samples whose marks have all been passed, in their order."""
        while self._unread and _is_passed(self._unread[0].last):
            sample = self._unread.pop(0)
            self._num_samples += bool(sample.spans["backward"])
            for what, spans in sample.spans.items():
                by_kind: dict[str, list[float]] = {}
                for layer, begin, end in spans:
                    by_kind.setdefault(self._kinds[layer], []).append(_seconds(begin, end))
                for kind, seconds in by_kind.items():
                    self._newest.setdefault((kind, what), deque(maxlen=WINDOW)).append(fmean(seconds))
        medians = {key: median(seconds) for key, seconds in self._newest.items()}
        self._layers = {
            kind: LayerSeconds(
                medians[kind, "forward"],
                medians[kind, "backward"],
                medians[kind, "update"],
                spread=max(spread_of(self._newest[kind, what]) for what in ("forward", "backward")),
            )
            for kind in dict.fromkeys(self._kinds)
            if all((kind, what) in medians for what in ("forward", "backward", "update"))
        }


def spread_of(samples: Sequence[float]) -> float:
    """Half of what samples span without the quarter at either end, relative to their median.

    About as far as the median of so many may be off. 0 where there is nothing to relate it to: few samples, or times
    below the clock's resolution.
    """
    quarter = max(1, round(len(samples) / 4))
    middle = sorted(samples)[quarter:-quarter]
    centre = median(middle) if middle else 0.0
    return (middle[-1] - middle[0]) / (2 * centre) if centre else 0.0


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _is_passed(mark: Mark) -> bool:
    return isinstance(mark, float) or bool(mark.query())  # type: ignore[no-untyped-call]


def _seconds(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin
    return float(begin.elapsed_time(end)) / 1e3
