"""What machines keep of a job's boundaries in their memory, which all their workers share. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.predicted_time import PlacedStage
from headway.daemon.plan.stage_costs import StageCosts

WIDTHS: Final = (0.0, 1.5, 1.2, 1.0)
"""How many times its part of a machine's memory a device may fill in a search, one after the other; 0: any."""
NARROWEST: Final = len(WIDTHS) - 1


def rooms_of(slots: Iterable[DeviceSlot]) -> dict[str, int]:
    """Return the memory that devices of one machine have together, by machine; without those that are not limited."""
    slots = tuple(slots)
    unlimited = {slot.machine for slot in slots if not slot.host_memory_bytes}
    rooms = Counter[str]()
    for slot in slots:
        rooms[slot.machine] += slot.host_memory_bytes
    return {machine: room for machine, room in rooms.items() if machine not in unlimited}


def rooms_beside(placed: Sequence[PlacedStage], slots: Iterable[DeviceSlot]) -> dict[str, int]:
    """Return the memory of machines that belongs to the devices of a plan: other jobs have the others' part."""
    used = {slot.key for stage in placed for slot in stage.slots}
    return rooms_of(slot for slot in slots if slot.key in used)


def kept_by(costs: StageCosts, placed: Sequence[PlacedStage]) -> dict[str, int]:
    """Return the bytes that each machine of a plan's workers keeps.

    Every node of a stage writes its layers, and each of its workers has one state under way. Further copies go to other
    machines in equal parts, if there are others.
    """
    memory, kept = costs.memory, Counter[str]()
    machines = dict.fromkeys(slot.machine for stage in placed for slot in stage.slots)
    for stage in placed:
        state = int(memory.state_bytes[costs.slices.slice_of[stage.span]])
        nodes = {slot.node: slot.machine for slot in stage.slots}
        for machine in nodes.values():
            kept[machine] += (memory.num_states - memory.takes_snapshots) * state
        for slot in stage.slots:
            kept[slot.machine] += (1 + (slot.device.kind == "cuda")) * state * memory.takes_snapshots
        copies = max(memory.num_copies - len(nodes), 0) * memory.num_states * state
        others = [machine for machine in machines if machine not in nodes.values()] or list(machines)
        for machine in others:
            kept[machine] += copies // len(others)
    return dict(kept)


def without_room(kept: Mapping[str, int], rooms: Mapping[str, int]) -> list[str]:
    """Return the machines that keep more than they have room for."""
    return [machine for machine, num_bytes in kept.items() if num_bytes > rooms.get(machine, num_bytes)]


class HostWidths:
    """How much of its machine's memory each device may fill in the next search.

    A search asks each device alone. It begins as if each had its whole machine, which is too much where all of them
    want it. So machines that would keep too much narrow their devices step by step, at last to equal parts, which are
    always within the machine's memory if all keep alike.
    """

    def __init__(self, slots: Sequence[DeviceSlot]) -> None:
        self._slots = slots
        number = Counter(slot.machine for slot in slots)
        self._steps = {machine: 0 for machine in rooms_of(slots) if number[machine] > 1}

    def slots(self) -> tuple[DeviceSlot, ...]:
        """Return the devices with what they may fill."""
        return tuple(self._widened(slot) for slot in self._slots)

    def narrow(self, costs: StageCosts, placed: Sequence[PlacedStage]) -> bool:
        """Narrow the devices of machines that would keep too much, or else those that send them copies. False: nothing
        is to be done, or nothing is left to do.
        """
        short = without_room(kept_by(costs, placed), rooms_beside(placed, self._slots))
        wide = [machine for machine, step in self._steps.items() if step < NARROWEST]
        chosen = [machine for machine in wide if machine in short] or wide
        if not short or not chosen:
            return False
        for machine in chosen:
            self._steps[machine] += 1
        return True

    def _widened(self, slot: DeviceSlot) -> DeviceSlot:
        step = self._steps.get(slot.machine, NARROWEST)
        return (
            slot if step == NARROWEST else replace(slot, host_memory_bytes=int(WIDTHS[step] * slot.host_memory_bytes))
        )
