"""Knows what a job has learned of its memory: how far predictions were too low, and which device had less room. Pure.

A measured peak above the prediction raises the prediction for the job on all devices of that model, whatever the cut:
what the estimate misses, such as an operator's work space, grows with the stage. A device that ran out of memory also
gets less than was planned there, because other processes or fragments may have taken the rest.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Final

from headway.daemon.records.records import Device
from headway.daemon.records.shortages import DeviceShortage, MemoryShortage

LEFT_FREE: Final = 0.1
"""Part of the prediction that a device gets less after it ran out of memory: each attempt is clearly smaller."""
NEGLIGIBLE: Final = 1.01
"""A demand below this factor is noise."""
MOST_DEMAND: Final = 1e6
"""Maximum of a demand. It is more than any device has room for, and no computed number of bytes overflows."""
ROUNDING: Final = 1e-9

Model = tuple[str, str]
"""(kind, model) of a device"""


@dataclass(frozen=True, slots=True)
class MemoryLessons:
    """What plans of one job respect beside the devices' own limits. Equal lessons are equal keys of a cache."""

    demands: tuple[tuple[Model, float], ...] = ()
    """Factor on predicted bytes, by model of the device; sorted. Models without one have a factor of 1."""
    rooms: tuple[tuple[tuple[str, str, int], int], ...] = ()
    """Most bytes that plans put on a device, by (node, incarnation, device); sorted."""

    @classmethod
    def of(cls, shortages: Iterable[DeviceShortage], demands: Mapping[Model, float]) -> "MemoryLessons":
        """Join what shortages and measured peaks tell. demands: measured factors by model."""
        factors = {model: factor for model, factor in demands.items() if factor >= NEGLIGIBLE}
        rooms = {}
        for each in shortages:
            rooms[each.node, each.node_incarnation, each.device_index] = each.room_bytes
            if each.demand >= NEGLIGIBLE:
                factors[each.kind, each.model] = max(each.demand, factors.get((each.kind, each.model), 1.0))
        demands_of = ((model, min(factor, MOST_DEMAND)) for model, factor in factors.items())
        return cls(demands=tuple(sorted(demands_of)), rooms=tuple(sorted(rooms.items())))

    def demand(self, device: Device) -> float:
        """Return the factor on the bytes that are predicted for a device."""
        return next((factor for model, factor in self.demands if model == (device.kind, device.model)), 1.0)

    def room(self, node: str, incarnation: str, device_index: int) -> int:
        """Return the most bytes that plans put on a device; 0: no shortage limits it."""
        return dict(self.rooms).get((node, incarnation, device_index), 0)


NOTHING_LEARNED: Final = MemoryLessons()


def measured_demand(peak_bytes: int, predicted_bytes: int, *, usable_bytes: int) -> float:
    """Return the factor by which a stage's measured peak exceeded its prediction, to hundredths; at least 1.

    usable_bytes: the plan's limit on that device; 0: none. A stage that has run there fits there: a peak inside the
    reserve counts as the limit, so that the same plan is possible again.
    """
    if peak_bytes <= 0 or predicted_bytes <= 0:
        return 1.0
    factor = ceil(100 * peak_bytes / predicted_bytes) / 100
    if usable_bytes:
        factor = min(factor, (1 - ROUNDING) * usable_bytes / predicted_bytes)
    return max(factor, 1.0)


def faded(demand: float) -> float:
    """Return a factor with half its excess; 1 once that is noise."""
    less = 1 + (demand - 1) / 2
    return less if less >= NEGLIGIBLE else 1.0


def after_shortage(
    before: Iterable[DeviceShortage],
    shortage: MemoryShortage,
    *,
    place: tuple[str, str, int],
    device: Device,
    predicted_bytes: int,
    demand: float,
) -> tuple[DeviceShortage, ...]:
    """Return the shortages after one more, at most one a device.

    place: (node, incarnation, device). predicted_bytes: of the stage there, before any factor. demand: the factor that
    plans have used. The same report twice changes nothing.
    """
    earlier = {(each.node, each.node_incarnation, each.device_index): each for each in before}
    needed = shortage.believed(device.memory_bytes).needed_bytes
    factor = max(demand, ceil(100 * needed / predicted_bytes) / 100) if predicted_bytes else demand
    room = int((1 - LEFT_FREE) * (predicted_bytes * factor or needed))
    if place in earlier:
        room, factor = min(room, earlier[place].room_bytes), max(factor, earlier[place].demand)
    node, incarnation, index = place
    earlier[place] = DeviceShortage(
        node=node,
        node_incarnation=incarnation,
        device_index=index,
        kind=device.kind,
        model=device.model,
        room_bytes=max(room, 1),
        demand=factor,
    )
    return tuple(earlier[key] for key in sorted(earlier))


def still_of_use(shortages: Iterable[DeviceShortage], present: Iterable[tuple[str, str]]) -> tuple[DeviceShortage, ...]:
    """Return the shortages on present (node, incarnation), and of each model the largest demand, wherever it was."""
    if not (shortages := tuple(shortages)):
        return ()
    there, kept = frozenset(present), []
    largest: dict[Model, DeviceShortage] = {}
    for each in sorted(shortages, key=lambda each: -each.demand):
        is_first = largest.setdefault((each.kind, each.model), each) is each
        if (each.node, each.node_incarnation) in there or (is_first and each.demand >= NEGLIGIBLE):
            kept.append(each)
    return tuple(sorted(kept, key=lambda each: (each.node, each.node_incarnation, each.device_index)))
