"""Which relays a node that can only dial out stands by at: the best ones by their measured paths.

A relay is another node with one_port, or a `headway relay`. Each has the time of a connection, and the rate at which
other nodes have fetched bytes from there. What counts is the time of a frame.
"""

import asyncio
import statistics
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Final

from headway.daemon.addresses import split_address
from headway.daemon.errors import ConfigError
from headway.daemon.front.opening import VIA
from headway.daemon.view.cluster_view import ClusterView

AUTO: Final = "auto"
"""Instead of addresses: any node of the cluster that others dial at one port."""
MOST_RELAYS: Final = 3
"""Number of relays at which a node stands by at once: others dial the next when one is gone."""
MOST_MEASURED: Final = 16
NUM_CONNECTIONS: Final = 3
"""Number of connections to a relay; the quickest counts."""
CONNECT_S: Final = 2.0
FRAME_BYTES: Final = 4 << 20


def read_relays(text: str, key: str) -> tuple[str, ...]:
    """Return the addresses of a setting, separated by commas; none: it is `auto`. Raises ConfigError."""
    relays = () if text == AUTO else tuple(each.strip() for each in text.split(","))
    for relay in relays:
        split_address(relay, key)
    return relays


def address_behind(relays: Iterable[str], node: str) -> str:
    """Return where others dial a node that stands by at relays."""
    return f"{','.join(relays)}/{node}{VIA}"


def candidates(view: ClusterView, node: str) -> tuple[str, ...]:
    """Return the addresses of other nodes that may be relays, by a lot of each pair."""
    others = [
        other
        for other in view.nodes.values()
        if other.name != node and "/" not in other.address and all("/" in worker.address for worker in other.workers)
    ]
    others.sort(key=lambda other: sha256(f"{node}/{other.name}".encode()).digest())
    return tuple(other.address for other in others[:MOST_MEASURED])


def rates(view: ClusterView) -> dict[str, float]:
    """Return the bytes a second that other nodes fetch from a node, the median, by its address."""
    found: dict[str, list[float]] = {}
    for record in view.probes.values():
        for peer, probe in record.peers.items():
            if peer in view.nodes and probe.bytes_per_s > 0:
                found.setdefault(view.nodes[peer].address, []).append(probe.bytes_per_s)
    return {address: statistics.median(told) for address, told in found.items()}


def best(trips_s: Mapping[str, float], rates: Mapping[str, float]) -> tuple[str, ...]:
    """Return the relays by the time of a frame, the shortest first; rates: of those where one is known."""

    def frame_s(relay: str) -> float:
        return trips_s[relay] + (FRAME_BYTES / rates[relay] if relay in rates else 0.0)

    return tuple(sorted(trips_s, key=frame_s))[:MOST_RELAYS]


def without_gone(
    chosen: Sequence[str], gone: Collection[str], found: Sequence[str], *, are_named: bool
) -> tuple[str, ...]:
    """Return the relays after some are gone. found: others that answer, the best first.

    One that is gone stays only as the last one, if it was named or there is no other: it may come back.
    """
    there = [*(relay for relay in chosen if relay not in gone), *found]
    last = [relay for relay in chosen if relay in gone] if are_named or not there else []
    return tuple([*there, *last][:MOST_RELAYS])


async def measured(relays: Iterable[str]) -> dict[str, float]:
    """Return the seconds of a connection to each relay that answers."""
    relays = tuple(relays)
    found = await asyncio.gather(*map(_trip_s, relays))
    return {relay: trip_s for relay, trip_s in zip(relays, found, strict=True) if trip_s is not None}


async def _trip_s(relay: str) -> float | None:
    trips = []
    for _ in range(NUM_CONNECTIONS):
        began = time.perf_counter()
        # Another node's address may be no address at all: ConfigError, ValueError and OverflowError.
        with suppress(OSError, TimeoutError, ConfigError, ValueError, OverflowError):
            host, port = split_address(relay, "relay")
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(host, port)
            trips.append(time.perf_counter() - began)
            writer.close()
    return min(trips, default=None)
