"""Knows which nodes cannot talk to each other, and which links lead through a relay. Pure.

A link, a copy or a fetch may need either direction, so one blocked direction blocks the pair.

A node that can only dial out stands by at relays. Whoever dials it dials the first of them, and only if that one does
not answer the next. A node that is itself this relay finds the other one at its own port, so their link is direct.
Of two workers with a link the earlier one in the plan dials, also when the link is dialled again. So a node that can
only dial out reaches a later neighbour that others dial directly, but an earlier one reaches it through the relay.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby, pairwise, product

from headway.daemon.cluster.measurements import Port, ReachRecord
from headway.daemon.cluster.records import NodeRecord

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


@dataclass(frozen=True)
class RelayedWays:
    """The nodes that can only dial out, and their relays. Sorted, so that equal ways are equal parts of a question."""

    relays: tuple[tuple[str, str], ...] = ()
    """(node that can only dial out, the port that others dial first)"""
    hosts: tuple[tuple[str, str], ...] = ()
    """(such a port, the node whose own it is); a `headway relay` is no node."""

    @classmethod
    def of(cls, ends: Iterable[NodeRecord], nodes: Iterable[NodeRecord]) -> "RelayedWays":
        """Return how some nodes are reached. nodes: all of which some may be relays."""
        relays = {node.name: node.relay for node in ends if node.relay}
        if not relays:
            return NO_RELAYS
        ports = set(relays.values())
        hosts = {node.address: node.name for node in sorted(nodes, key=_name, reverse=True) if node.address in ports}
        return cls(tuple(sorted(relays.items())), tuple(sorted(hosts.items())))

    @cached_property
    def _relay_of(self) -> dict[str, str]:
        return dict(self.relays)

    @cached_property
    def _host_of(self) -> dict[str, str]:
        return dict(self.hosts)

    @cached_property
    def _entrances(self) -> dict[str, str]:
        return {**{node: port for port, node in self.hosts}, **self._relay_of}

    def between(self, dialling: str, dialled: str) -> str:
        """Return the port of the relay through which one node dials another; empty: it dials it directly."""
        relay = self._relay_of.get(dialled, "")
        return "" if not relay or dialling in (dialled, self._host_of.get(relay)) else relay

    def via(self, dialling: str, dialled: str) -> str:
        """Return the relay for people: its name if it is a node, else its port; empty: the way is direct."""
        relay = self.between(dialling, dialled)
        return self._host_of.get(relay, relay)

    def legs(self, dialling: str, dialled: str) -> tuple[tuple[str, str], ...]:
        """Return the two ways of which a relayed one consists: (dialling, dialled). None if the relay is no node."""
        host = self._host_of.get(self.between(dialling, dialled))
        return () if host is None else ((dialling, host), (host, dialled))

    def entrance(self, node: str) -> str:
        """Return what sets a node apart from its like: its relay, or its own port if others stand by there."""
        return self._entrances.get(node, "")

    def num_relayed(self, stages: Sequence[Sequence[str]], *, is_tied: bool) -> int:
        """Return how many links of a pipeline lead through relays. stages: the nodes of each one's workers."""
        linked = [pair for uppers, lowers in pairwise(stages) for pair in product(uppers, lowers)]
        linked += [pair for replicas in stages for pair in combinations(replicas, 2)]
        linked += product(stages[0], stages[-1]) if is_tied and len(stages) > 2 else ()
        return sum(bool(self.between(*pair)) for pair in linked)

    def arranged(self, nodes: Sequence[str]) -> list[int]:
        """Return the places of workers in an order that needs few relays, close to the given one. nodes: of each.

        A relay is followed by a node that stands by there. One that has no such place comes first.
        """
        workers = [tuple(group) for _, group in groupby(range(len(nodes)), key=nodes.__getitem__)]
        outside = {own: relay for own in workers if (relay := self._relay_of.get(nodes[own[0]]))}
        waiting: dict[str, list[tuple[int, ...]]] = {}
        for own, relay in reversed(outside.items()):
            waiting.setdefault(self._host_of.get(relay, ""), []).append(own)
        followers = {own: waiting[nodes[own[0]]].pop() for own in workers if waiting.get(nodes[own[0]])}
        placed = set(followers.values())
        first = next((own for own in outside if own not in placed), ())
        left = (own for own in workers if own != first and own not in placed)
        return [place for own in (first, *left) for place in (*own, *followers.get(own, ()))]

    def __bool__(self) -> bool:
        return bool(self.relays)


NO_RELAYS = RelayedWays()


def _name(node: NodeRecord) -> str:
    return node.name
