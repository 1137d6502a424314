"""Measures the distance of other nodes: round trip, bandwidth and loss, rarely and in small amounts, as one record.

A node of this machine is not measured: memory lies between. With many nodes each one measures only `MAX_PEERS`, those
to which its plans have links first. A measurement belongs to the way that it went: directly, or through one relay. A
peer that has another relay than before is measured again soon.
"""

import asyncio
import random
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from heapq import nsmallest
from typing import Final, NamedTuple

import structlog

from headway.daemon.agent.node_reports import Reports, interval_s
from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import RecoveryError
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import LinkProbe, ProbeRecord
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.cluster.transaction import Compare
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import Member
from headway.daemon.plan.link_choice import neighbours
from headway.daemon.plan.paths import RelayedWays
from headway.stages.errors import PeerError
from headway.stages.sockets.own_sockets import address_of, grpc_address, own_sockets
from headway.stages.sockets.shared_port import listening_port

log = structlog.get_logger()

MAX_PEERS: Final = 16
MAX_LOTS: Final = 1 << 16
"""Maximum number of lots that a process remembers."""
NUM_PINGS: Final = 5
"""Number of pings; the shortest counts: the others waited for something."""
PROBE_BYTES: Final = 4 << 20
FAR_S: Final = 5e-3
"""Round trip above which a lost packet delays its frame."""
NUM_TRANSFERS: Final = 3
"""Number of transfers over a far line. The fastest counts, because TCP loses packets until it has found its rate."""
SLOW_S: Final = 2.0
"""A transfer that takes longer is the last: finding the rate was a small part of it."""
FRAME_BYTES: Final = 256 << 10
NUM_FRAMES: Final = 60
FRAMES_S: Final = 10.0
"""Time of all frames together; over a slow line they are fewer."""
LEAST_LOST: Final = 3
"""Minimum number of lost packets: fewer are chance."""
EVERY_S: Final = 900.0
"""Interval of probes of one peer."""
REWRITTEN_S: Final = 4 * EVERY_S
"""Time after which a record is written again without news: somebody may have deleted it."""
RETRY_S: Final = 60.0
"""Pause after a peer did not answer."""
PAUSE_S: Final = 2.0
"""Interval of looks for due peers: probes run one by one."""
CALL_TIMEOUT_S: Final = 5.0
TRANSFER_TIMEOUT_S: Final = 30.0
INCOMPLETE_S: Final = 20.0
"""Least interval of a node's records while some peers are still to be measured. Both intervals grow with the cluster
(`interval_s`).
"""
MOVED: Final = 0.25
"""A probe that differs by less, relatively, is not reported."""
LOSS_MOVED: Final = 0.6
"""The same threshold for loss, where only a dozen packets of ten thousand may be counted."""


def peers_of(view: ClusterView, name: str) -> list[NodeRecord]:
    """Return the peers that a node measures: on other machines; those to which its workers have links come first, then
    those that share a plan with it, and the rest by lot; MAX_PEERS at most.
    """
    own = view.nodes.get(name)
    if own is None:
        return []
    linked, shared = set[str](), set[str]()
    for job in view.jobs.values():
        for plan in filter(None, (job.plan, job.next)):
            positions = [position for position, stage in enumerate(plan.workers) if stage.node == name]
            around = {other for at in positions for other in neighbours(plan.workers, at, trains_tie=job.trains_tie)}
            linked |= {plan.workers[other].node for other in around}
            shared |= {stage.node for stage in plan.workers} if positions else set()
    others = [node for node in view.nodes.values() if node.name != name and node.host != own.host]

    def lot(node: NodeRecord) -> bytes:
        return _lot(name, node.name)

    first = sorted(
        filter(lambda node: node.name in shared, others), key=lambda node: (node.name not in linked, lot(node))
    )
    rest = filter(lambda node: node.name not in shared, others)
    return [*first, *nsmallest(MAX_PEERS - len(first), rest, key=lot)][:MAX_PEERS]


class PeerWay(NamedTuple):
    """A peer, and the way to it."""

    name: str
    incarnation: str
    via: str
    """As in LinkProbe."""


def peers_by_way(view: ClusterView, name: str) -> dict[PeerWay, NodeRecord]:
    """Return the peers that a node measures, each with the way that a dial tries first."""
    peers = peers_of(view, name)
    ways = RelayedWays.of(peers, view.nodes.values())
    return {PeerWay(peer.name, peer.incarnation, ways.between(name, peer.name)): peer for peer in peers}


def has_moved(before: Mapping[str, LinkProbe], after: Mapping[str, LinkProbe]) -> bool:
    """Return whether the probes have news. That a peer has gone is none: everybody sees it, and all would write it."""
    if after.keys() - before.keys():
        return True
    return any(
        _differs(before[peer].round_trip_s, probe.round_trip_s)
        or _differs(before[peer].bytes_per_s, probe.bytes_per_s)
        or _differs(before[peer].loss, probe.loss, by=LOSS_MOVED)
        or before[peer].via != probe.via
        for peer, probe in after.items()
    )


async def measure(client: NodeClient, endpoint: NodeEndpoint) -> LinkProbe:
    """Return round trip, bytes a second from there, and loss. Raises PeerError and RecoveryError."""
    round_trips = []
    for _ in range(NUM_PINGS + 1):  # the first ping opens the connection
        began = time.perf_counter()
        await client.describe(endpoint, timeout_s=CALL_TIMEOUT_S)
        round_trips.append(time.perf_counter() - began)
    round_trip_s = min(round_trips[1:])
    is_far = round_trip_s >= FAR_S
    transfers_s = [await _transfer_s(client, endpoint, PROBE_BYTES)]
    while is_far and len(transfers_s) < NUM_TRANSFERS and transfers_s[-1] < SLOW_S:
        transfers_s.append(await _transfer_s(client, endpoint, PROBE_BYTES))
    return LinkProbe(
        round_trip_s=_rounded(round_trip_s),
        bytes_per_s=_rounded(PROBE_BYTES / max(min(transfers_s) - round_trip_s, 1e-6)),
        loss=_rounded(await _loss(client, endpoint)) if is_far else 0.0,
    )


async def _loss(client: NodeClient, endpoint: NodeEndpoint) -> float:
    """Return the share of lost packets of frames requested one after the other, so that they fill no queue of
    the line.
    """
    until = time.perf_counter() + FRAMES_S
    number, num_lost = await _counted(client, endpoint)
    for _ in range(NUM_FRAMES):
        await _transfer_s(client, endpoint, FRAME_BYTES)
        if time.perf_counter() > until:
            break
    number_after, num_lost_after = await _counted(client, endpoint)
    sent, lost = number_after - number, num_lost_after - num_lost
    return lost / sent if lost >= LEAST_LOST and sent > 0 else 0.0


async def _counted(client: NodeClient, endpoint: NodeEndpoint) -> tuple[int, int]:
    """Return the segments that the other end has sent, and those of them that were lost."""
    async for reply in client.probe(endpoint, 0, timeout_s=CALL_TIMEOUT_S, counted=True):
        return reply.num_segments, reply.num_lost
    return 0, 0


async def _transfer_s(client: NodeClient, endpoint: NodeEndpoint, num_bytes: int) -> float:
    began = time.perf_counter()
    async for _ in client.probe(endpoint, num_bytes, timeout_s=TRANSFER_TIMEOUT_S):
        pass
    return time.perf_counter() - began


class Probing:
    """`run` measures each due peer, one by one."""

    def __init__(self, member: Member, client: NodeClient) -> None:
        self._member = member
        self._client = client
        self._found: dict[PeerWay, LinkProbe] = {}
        self._due_at: dict[PeerWay, float] = {}
        self._peers: dict[PeerWay, NodeRecord] = {}
        self._reports = Reports(member)
        self._began_at: float | None = None
        """Time of the first look."""

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))
            peers = self._peers_now()
            due = [peer for peer in peers if self._due_at.get(peer, 0.0) <= time.monotonic()]
            if due:
                await self._probe(due[0], peers[due[0]])
            await self._write(is_complete=len(due) <= 1)

    def _peers_now(self) -> dict[PeerWay, NodeRecord]:
        view = self._member.view
        peers = peers_by_way(view, self._member.node)
        if peers != self._peers:
            self._peers = peers
            self._due_at = {peer: at for peer, at in self._due_at.items() if peer in peers}
            self._found = {peer: probe for peer, probe in self._found.items() if peer in peers}
        return self._peers

    async def _probe(self, way: PeerWay, peer: NodeRecord) -> None:
        # The daemon's open connection may go through another relay, since the first one did not answer for a while.
        client, wait_s = self._client.anew(), RETRY_S
        try:
            probe = await measure(client, peer.endpoint)
            if client.port_to(peer.endpoint) == listening_port(peer.address):
                self._found[way] = replace(probe, via=way.via)
                wait_s = EVERY_S * random.uniform(0.8, 1.2)
            else:
                log.info("peer_not_probed", peer=peer.name, reason=f"its relay {way.via} does not answer")
        except (PeerError, RecoveryError) as error:
            log.info("peer_not_probed", peer=peer.name, reason=str(error))
        finally:
            await client.close()
        self._due_at[way] = time.monotonic() + wait_s

    async def _write(self, *, is_complete: bool) -> None:
        """Write news that etcd does not have yet; while etcd is away every look retries.

        While some peers are still to be measured, news waits for them: it is then one record.
        """
        probes = {way.name: probe for way, probe in sorted(self._found.items())}
        key, now, num_nodes = Keys.probes(self._member.node), time.monotonic(), len(self._member.view.nodes)
        if self._began_at is None:  # in a large cluster many nodes may have come at once
            self._began_at = now
        age_s, known = self._reports.age_s(key, now), self._reports.known(key)
        is_too_early = age_s < interval_s(PAUSE_S if is_complete else INCOMPLETE_S, num_nodes) or (
            not is_complete and now < self._began_at + interval_s(0.0, num_nodes)
        )
        before = known.peers if known is not None and age_s < REWRITTEN_S else {}
        if is_too_early or not has_moved(before, probes) or not self._member.cluster.is_reachable:
            return
        record = ProbeRecord(incarnation=self._member.incarnation, peers=probes)
        await self._reports.write({key: record}, [Compare.present(Keys.node(self._member.node))], now=now)


@lru_cache(maxsize=MAX_LOTS)
def _lot(name: str, peer: str) -> bytes:
    """Draw a lot that is equal for both ends, so that one end's measurement serves the other."""
    return sha256("/".join(sorted((name, peer))).encode()).digest()


def _differs(one: float, other: float, *, by: float = MOVED) -> bool:
    return abs(one - other) > by * max(abs(one), abs(other))


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


INFO_BYTES: Final = 220
SENT_AGAIN_AT, SENT_AT, NEEDLESS_AT = 100, 156, 216
"""Offsets in Linux's `struct tcp_info`, which only grows at its end (include/uapi/linux/tcp.h): tcpi_total_retrans,
tcpi_data_segs_out and tcpi_dsack_dups, segments that the other end had already; 32 bits each.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentSegments:
    """The segments of one connection, since it was made."""

    number: int
    """Segments with data, with those that were sent again."""
    num_lost: int
    """Segments that were sent again, and that the other end did not have."""


def sent_segments(peer: str) -> SentSegments | None:
    """Return the segments sent by this end to a peer, as gRPC names it; None: unknown peer, or the system does not
    count.

    peer: `ipv4:10.0.0.7:4711` or `ipv6:[::1]:4711`, the brackets perhaps escaped.
    """
    wanted = grpc_address(peer)
    for copy in own_sockets() if wanted is not None else ():
        if address_of(copy, is_peer=True) == wanted:
            return _counted_in(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES))
    return None


def _counted_in(info: bytes) -> SentSegments | None:
    if len(info) < INFO_BYTES:  # an old kernel
        return None
    sent_again, sent, needless = (struct.unpack_from("I", info, at)[0] for at in (SENT_AGAIN_AT, SENT_AT, NEEDLESS_AT))
    return SentSegments(number=sent, num_lost=max(0, sent_again - needless))
