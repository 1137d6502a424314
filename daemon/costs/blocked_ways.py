"""Knows which nodes cannot talk to each other: the ways without an answer, and the pairs that plans avoid. Pure.

A link, a copy or a fetch may need either direction, so one blocked direction blocks the pair.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headway.daemon.records.measurements import Port, ReachRecord
from headway.daemon.records.records import NodeRecord

Pair = tuple[str, str]
"""Two nodes by name, the smaller name first; a node with several devices can be its own peer."""

REMEDY = (
    "open these ports, or set worker_ports and a host that every node reaches (docs/deployment.md), "
    "and try `headway doctor`"
)
"""The remedy for a blocked way."""
MOST_NAMED = 4
"""Maximum number of ways named in one sentence; the rest is counted."""


def pair_of(one: str, other: str) -> Pair:
    """Return two nodes as a pair without direction."""
    return (one, other) if one <= other else (other, one)


@dataclass(frozen=True, slots=True, order=True)
class BlockedWay:
    """One direction between two nodes in which one port does not answer."""

    source: str
    target: str
    port: Port
    address: str
    reason: str

    @property
    def pair(self) -> Pair:
        """The two nodes."""
        return pair_of(self.source, self.target)

    def __str__(self) -> str:
        return f"{self.source} cannot reach the {self.port} port of {self.target} at {self.address} ({self.reason})"


@dataclass(frozen=True, slots=True)
class BlockedWays:
    """All blocked ways at one moment, sorted."""

    ways: tuple[BlockedWay, ...] = ()

    @property
    def pairs(self) -> frozenset[Pair]:
        """The pairs of nodes that cannot talk."""
        return frozenset(way.pair for way in self.ways)

    def among(self, nodes: Iterable[str]) -> "BlockedWays":
        """Return the ways with both ends among some nodes."""
        if not self.ways:
            return self
        names = frozenset(nodes)
        return BlockedWays(tuple(way for way in self.ways if way.source in names and way.target in names))

    def between(self, pairs: Iterable[Pair]) -> "BlockedWays":
        """Return the ways between the nodes of some pairs."""
        wanted = frozenset(pairs)
        return BlockedWays(tuple(way for way in self.ways if way.pair in wanted))

    def cannot_ask(self, source: str, target: str) -> bool:
        """Return whether a node does not reach another node's daemon, and so can fetch no file from it."""
        return any((way.source, way.target, way.port) == (source, target, Port.DAEMON) for way in self.ways)

    def relays(self, source: str, holders: Iterable[str], nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the nodes that can pass on a file: the reader reaches them, and they reach a holder."""
        wanted = tuple(holders)
        return tuple(
            node
            for node in sorted(nodes)
            if node != source
            and node not in wanted
            and not self.cannot_ask(source, node)
            and not all(self.cannot_ask(node, holder) for holder in wanted)
        )

    def __bool__(self) -> bool:
        return bool(self.ways)

    def __str__(self) -> str:
        """Return which ways are blocked, each with its direction, address and reason."""
        named = [str(way) for way in self.ways[:MOST_NAMED]]
        more = len(self.ways) - len(named)
        return "; ".join([*named, *([f"{more} more ways are blocked"] if more else [])])


NOTHING_BLOCKED = BlockedWays()


def blocked_ways(reach: Mapping[str, ReachRecord], nodes: Mapping[str, NodeRecord]) -> BlockedWays:
    """Return what the present processes found about each other. Facts of an ended process do not count."""
    found = set()
    for name, record in reach.items():
        source = nodes.get(name)
        if source is None or source.incarnation != record.incarnation:
            continue
        for fact in record.facts:
            target = nodes.get(fact.to) if fact.reason else None
            if target is not None and target.incarnation == fact.to_incarnation:
                found.add(BlockedWay(name, fact.to, fact.port, fact.address, fact.reason))
    return BlockedWays(tuple(sorted(found)))
