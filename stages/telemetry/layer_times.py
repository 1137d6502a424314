"""Times each kind of layer on this device: on few microbatches and updates, as medians of the newest.

A sampled forward is marked between its layers, its backward where the gradient of the hidden state between two layers
is done. A mark of the device is read once it is done, so no code waits for the device. A microbatch without sample
costs one call, and nothing per layer.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean, median
from time import perf_counter
from typing import Final

from torch import Tensor

from headway.stages.device.device import Mark, StageDevice
from headway.stages.spec import timed_kind

MICROBATCHES_PER_SAMPLE: Final = 50
UPDATES_PER_SAMPLE: Final = 10
SECONDS_PER_SAMPLE: Final = 0.5
"""Time after which the next microbatch, or update, is sampled too. With slow operations, a sample costs little of them,
and fifty of them are a long time to train along a bad cut.
"""
NUM_EARLY: Final = 8
"""Number of early samples, after the first microbatch, so that a first result comes soon. The first one pays for
one-time work.
"""
WINDOW: Final = 7
"""Samples of a median: fewer than the early ones, the first of which meet cold caches and fresh memory."""


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """The times of one layer of a kind: forward and backward of a microbatch, and one update.

    A backward includes its recomputation. Clipping and the sums of gradients belong to no layer.
    """

    forward_s: float
    backward_s: float
    update_s: float
    """0: no whole update is timed, because replicas share it or the layer is frozen."""
    spread: float = 0.0
    """Spread of forward and backward: half of the middle samples' range, relative to the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """A worker's knowledge of its stage's layers."""

    layers: Mapping[str, LayerSeconds] = field(default_factory=dict)
    """Times by kind, as in `timed_kind`, if every time of the kind is known."""
    peak_bytes: int = 0
    """Maximum allocation on the device, since the plan began; 0: not known."""
    num_samples: int = 0
    """Number of timed microbatches."""


class Sample:
    """One microbatch, or one update, that is timed layer by layer."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._last = mark()
        self.spans: dict[str, list[tuple[int, Mark, Mark]]] = {"forward": [], "backward": [], "update": []}
        """Spans by kind of work: (layer, begin, end)."""

    @property
    def last(self) -> Mark:
        """Return the newest mark."""
        return self._last

    def begin(self) -> None:
        """Begin to time the next work now."""
        self._last = self._mark()

    def ended(self, what: str, layer: int) -> None:
        """Note the end of `forward`, `backward` or `update` of a layer, by its position in the stage; more begins."""
        now = self._mark()
        self.spans[what].append((layer, self._last, now))
        self._last = now

    def ends_backward(self, layer: int, hidden: Tensor) -> None:
        """Mark the end of a layer's backward, when the gradient of its input is done."""
        if not hidden.requires_grad:
            return  # the embedding under an adapter: no gradient goes so far
        hidden.register_hook(lambda _gradient: self.ended("backward", layer))  # type: ignore[no-untyped-call]


class LayerTimes:
    """One stage's, for the time of one generation. Written by the thread that computes, read by any."""

    def __init__(
        self, layers: Sequence[str], device: StageDevice, *, recompute: str = "none", has_updates: bool = True
    ) -> None:
        """layers: their kinds, as in `ModelSpec.kind_of`, or their names where all blocks are of one kind.

        recompute: what the stage's backward computes again. has_updates: whether whole updates are timed.
        """
        self._timed = ("forward", "backward", "update") if has_updates else ("forward", "backward")
        self._kinds = tuple(timed_kind(name, recompute) for name in layers)
        self._device = device
        self._num_microbatches = 0
        self._num_updates = 0
        self._num_samples = 0
        self._microbatch_due = self._update_due = -inf
        self._unread: list[Sample] = []
        self._newest: dict[tuple[str, str], deque[float]] = {}
        self._layers: Mapping[str, LayerSeconds] = {}
        self._peak_bytes = 0
        device.begin_peak()

    @property
    def measured(self) -> Measurements:
        """Return the present knowledge. Never asks the device: its allocator may wait, as long as a hung card does."""
        return Measurements(layers=self._layers, peak_bytes=self._peak_bytes, num_samples=self._num_samples)

    def microbatch(self) -> Sample | None:
        """Return where to write the times of a microbatch, and of its backward, if it is sampled. Call once per
        forward.
        """
        number = self._num_microbatches
        self._num_microbatches = number + 1
        if self._unread:
            self._read()
        now = perf_counter()
        if number % MICROBATCHES_PER_SAMPLE == 0 or number <= NUM_EARLY or now >= self._microbatch_due:
            self._microbatch_due = now + SECONDS_PER_SAMPLE
            return Sample(self._device.mark) if number else None
        return None

    def update(self) -> Sample | None:
        """Return where to write the times of an update, if it is sampled. Call once per update."""
        number = self._num_updates
        self._num_updates = number + 1
        now = perf_counter()
        if number % UPDATES_PER_SAMPLE == 0 or number <= NUM_EARLY or now >= self._update_due:
            self._update_due = now + SECONDS_PER_SAMPLE
            return Sample(self._device.mark) if number else None
        return None

    def finished(self, sample: Sample) -> None:
        """Note that a sample has all its marks."""
        self._unread.append(sample)
        self._read()

    def _read(self) -> None:
        """Read the samples whose marks have all been passed, in their order, and with them the peak."""
        if self._unread[0].last.is_done:
            self._peak_bytes = self._device.peak_bytes
        while self._unread and self._unread[0].last.is_done:
            sample = self._unread.pop(0)
            self._num_samples += bool(sample.spans["backward"])
            for what, spans in sample.spans.items():
                by_kind: dict[str, list[float]] = {}
                for layer, begin, end in spans:
                    by_kind.setdefault(self._kinds[layer], []).append(end.seconds_since(begin))
                for kind, seconds in by_kind.items():
                    self._newest.setdefault((kind, what), deque(maxlen=WINDOW)).append(fmean(seconds))
        medians = {key: median(seconds) for key, seconds in self._newest.items()}
        self._layers = {
            kind: LayerSeconds(
                medians[kind, "forward"],
                medians[kind, "backward"],
                medians.get((kind, "update"), 0.0),
                spread=max(spread_of(self._newest[kind, what]) for what in ("forward", "backward")),
            )
            for kind in dict.fromkeys(self._kinds)
            if all((kind, what) in medians for what in self._timed)
        }


def spread_of(samples: Sequence[float]) -> float:
    """Return half of the samples' range without the quarter at either end, relative to their median.

    The median of so few samples may be off by about that. 0 if it cannot be computed: few samples, or times below the
    clock's resolution.
    """
    quarter = max(1, round(len(samples) / 4))
    middle = sorted(samples)[quarter:-quarter]
    centre = median(middle) if middle else 0.0
    return (middle[-1] - middle[0]) / (2 * centre) if centre else 0.0
