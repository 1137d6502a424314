"""In which order devices could form a pipeline: sites stay together; all orders if few, else good ones. Pure.

Devices that are alike in all that matters to a plan are interchangeable, so only orders of kinds are tried, and each
kind's places go to those devices that hold the layers already.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from headway.daemon.records import Device, NodeRecord, StagePlan

MAX_ORDERS: Final = 720
"""Up to so many different orders are all tried."""


def natural(name: str) -> tuple[str | int, ...]:
    """A name's place in an order in which node-10 comes after node-2."""
    return tuple(int(part) if index % 2 else part for index, part in enumerate(re.split(r"([0-9]+)", name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One device of one node: room for one worker."""

    node: str
    incarnation: str
    site: str
    device: Device
    host_memory_bytes: int
    arithmetic_class: str
    is_only_one: bool
    """The node has no other device."""

    @classmethod
    def of(cls, node: NodeRecord, position: int) -> "Seat":
        """The node's device at a position of its list."""
        return cls(
            node=node.name,
            incarnation=node.incarnation,
            site=node.site,
            device=node.devices[position],
            host_memory_bytes=node.memory_bytes,
            arithmetic_class=node.arithmetic_class,
            is_only_one=len(node.devices) == 1,
        )


Kind = tuple[str, str, str, float, int, int, str]
"""(site, node if it has several devices, device kind, speed, device bytes, host bytes, arithmetic class)"""


def kind_of(seat: Seat) -> Kind:
    """Seats of one kind can change places without any effect on a plan."""
    device = seat.device
    node = "" if seat.is_only_one else seat.node
    return (
        seat.site,
        node,
        device.kind,
        device.speed,
        device.memory_bytes,
        seat.host_memory_bytes,
        seat.arithmetic_class,
    )


def orders(
    seats: tuple[Seat, ...], *, most_stages: int, previous: tuple[StagePlan, ...] = ()
) -> Iterator[tuple[Seat, ...]]:
    """Orders of 1 … most_stages seats, each site's seats next to each other, in a deterministic sequence."""
    for length in range(1, most_stages + 1):
        kinds = list(islice(_kind_orders(Counter(map(kind_of, seats)), length), MAX_ORDERS + 1))
        if len(kinds) > MAX_ORDERS:
            kinds = _good_orders(seats, length)
        for order in kinds:
            yield _seated(order, seats, previous)


def _kind_orders(counts: Counter[Kind], length: int) -> Iterator[tuple[Kind, ...]]:
    """All different sequences of kinds, sites contiguous, in order of kinds."""

    def extend(order: tuple[Kind, ...], closed: frozenset[str]) -> Iterator[tuple[Kind, ...]]:
        if len(order) == length:
            yield order
            return
        for kind in sorted(counts):
            if counts[kind] == 0 or kind[0] in closed:
                continue
            leaves_site = bool(order) and order[-1][0] != kind[0]
            counts[kind] -= 1
            yield from extend((*order, kind), closed | {order[-1][0]} if leaves_site else closed)
            counts[kind] += 1

    yield from extend((), frozenset())


def _good_orders(seats: tuple[Seat, ...], length: int) -> list[tuple[Kind, ...]]:
    """Where there are too many: sites by their total speed, devices within by memory or speed, and every rotation.

    The first stages hold most microbatches in flight, so one candidate puts the largest memory first.
    """
    totals: dict[str, float] = {}
    for seat in seats:
        totals[seat.site] = totals.get(seat.site, 0.0) + seat.device.speed
    by_speed = sorted(seats, key=lambda seat: (-totals[seat.site], seat.site, -seat.device.speed, kind_of(seat)))
    chosen = by_speed[:length]
    fastest = sorted(seats, key=lambda seat: (-seat.device.speed, -totals[seat.site], kind_of(seat)))[:length]
    found: dict[tuple[Kind, ...], None] = {}
    for picked in (chosen, fastest):
        for by_memory in (True, False):
            grouped = sorted(
                picked,
                key=lambda seat, by_memory=by_memory: (  # type: ignore[misc]
                    -totals[seat.site],
                    seat.site,
                    -(seat.device.memory_bytes if by_memory else seat.device.speed),
                    kind_of(seat),
                ),
            )
            found[tuple(map(kind_of, grouped))] = None
            found[tuple(map(kind_of, reversed(grouped)))] = None
            for swap in range(length - 1):
                swapped = list(grouped)
                swapped[swap], swapped[swap + 1] = swapped[swap + 1], swapped[swap]
                if swapped[swap].site == swapped[swap + 1].site:
                    found[tuple(map(kind_of, swapped))] = None
    return list(found)


def _seated(order: tuple[Kind, ...], seats: tuple[Seat, ...], previous: tuple[StagePlan, ...]) -> tuple[Seat, ...]:
    """Concrete seats for an order of kinds: those of the previous plan first and in its order, then by name."""
    rank = {(stage.node, stage.node_incarnation, stage.device_index): index for index, stage in enumerate(previous)}
    free: dict[Kind, list[Seat]] = {}
    for seat in sorted(
        seats,
        key=lambda seat: (
            rank.get((seat.node, seat.incarnation, seat.device.index), len(previous)),
            natural(seat.node),
            seat.device.index,
        ),
    ):
        free.setdefault(kind_of(seat), []).append(seat)
    return tuple(free[kind].pop(0) for kind in order)
