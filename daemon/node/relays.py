"""Lets a node that can only dial out stand by at relays: named ones, or found once among the cluster's nodes.

A relay is another node with one_port, or a `headway relay`. The nearest are chosen when the daemon starts. Others dial
the next one when a relay is gone, so one that is gone comes last. If all are gone, others are found.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing, suppress
from hashlib import sha256
from typing import Any, Final

import grpc
import structlog

from headway.daemon.base.addresses import NodeEndpoint, split_address
from headway.daemon.base.errors import ConfigError, RecoveryError
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.net.port import VIA, Relay
from headway.daemon.net.port_process import PortProcess
from headway.proto import control_pb2
from headway.stages.errors import PeerError
from headway.stages.sockets.tls_identity import is_borne, names_of_client, other_node

log = structlog.get_logger()

AUTO: Final = "auto"
"""Instead of addresses: any node of the cluster that others dial at one port."""
MOST_RELAYS: Final = 3
"""Number of relays at which a node stands by at once: others dial the next when one is gone."""
MOST_MEASURED: Final = 16
NUM_CONNECTIONS: Final = 3
"""Number of connections to a relay; the quickest counts."""
CONNECT_S: Final = 2.0


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


PAUSE_S: Final = 1.0
"""Pause before the next attempt."""
GONE_S: Final = 10.0
"""Time without a relay after which another one takes its place."""


class StandingBy:
    """`choose` once, then `run` until cancelled."""

    def __init__(
        self,
        front: PortProcess,
        client: NodeClient,
        cluster: ClusterWatch,
        *,
        node: str,
        relays: tuple[str, ...],
    ) -> None:
        """relays: the addresses of the setting; none: any node of the cluster that others dial at one port."""
        self._front = front
        self._client = client
        self._cluster = cluster
        self._node = node
        self._told = relays
        self._gone_since: dict[str, float] = {}
        """Each chosen relay; infinity: this node stands by there."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reasons: dict[str, str] = {}
        self._has_stood_by = False
        self.tell: Callable[[str], None] = lambda _: None
        """Told every second why nobody can reach this node; empty: it stands by somewhere, or was gone for a moment."""
        self.moved: Callable[[str], None] = lambda _: None
        """Told the node's other address after relays have changed."""

    @property
    def address(self) -> str:
        """Return where others dial this node."""
        return address_behind(self._gone_since, self._node)

    async def choose(self) -> None:
        """Choose the nearest. Of relays that were named, those that do not answer come last."""
        while True:
            found = await self._nearest()
            self._take((*found, *(relay for relay in self._told if relay not in found)))
            if self._gone_since:
                log.info("relays_chosen", relays=tuple(self._gone_since))
                return
            if not self._reasons:
                self._reasons[""] = "no node with one_port answers"
                log.warning("no_relay_found", reason=self._reasons[""])
            await asyncio.sleep(PAUSE_S)

    async def _nearest(self) -> list[str]:
        """Return the relays that answer, the nearest first."""
        trips_s = await measured(self._told or candidates(self._cluster.view, self._node))
        return sorted(trips_s, key=trips_s.__getitem__)

    async def run(self) -> None:
        """Stand by at the chosen relays."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    for relay in self._gone_since.keys() - self._tasks.keys():
                        self._tasks[relay] = group.create_task(self._at(relay), name=f"relay {relay}")
                    await asyncio.sleep(PAUSE_S)
                    await self._look()
                    self.tell(self._trouble())
        finally:
            self._tasks.clear()

    async def _look(self) -> None:
        """Let others dial last what is gone, or choose again if all are gone and none was named."""
        before, now = tuple(self._gone_since), time.monotonic()
        gone = [relay for relay, since in self._gone_since.items() if since + GONE_S <= now]
        others = await self._nearest() if len(gone) == len(before) and not self._told else []
        self._take(others or sorted(before, key=gone.__contains__))
        for relay in self._tasks.keys() - self._gone_since.keys():
            self._tasks.pop(relay).cancel()
        if tuple(self._gone_since) != before:
            self.moved(self.address)

    def _trouble(self) -> str:
        """Return why this node stands by nowhere. It may be moving to another relay, unless it has never stood by."""
        if any(relay not in self._reasons for relay in self._gone_since):
            return ""
        if self._has_stood_by and time.monotonic() < max(self._gone_since.values(), default=0.0) + GONE_S:
            return ""
        return "stands by at no relay: " + "; ".join(f"{relay}: {self._reasons[relay]}" for relay in self._gone_since)

    def _take(self, relays: Sequence[str]) -> None:
        now = time.monotonic()
        self._gone_since = {relay: self._gone_since.get(relay, now) for relay in relays[:MOST_RELAYS]}

    async def _at(self, relay: str) -> None:
        while True:
            reason = "the stream has ended"
            try:
                await self._stand_by(relay)
            except (PeerError, RecoveryError) as error:
                reason = error.reason
            except OSError as error:
                reason = str(error)
            finally:
                self._front.stand_by(relay, None)
            if relay in self._gone_since:
                self._gone_since[relay] = min(self._gone_since[relay], time.monotonic())
            if reason != self._reasons.get(relay):
                log.warning("not_standing_by", relay=relay, reason=reason)
            self._reasons[relay] = reason
            await asyncio.sleep(PAUSE_S)

    async def _stand_by(self, relay: str) -> None:
        """Stand by at a relay as long as the stream to it lasts. Raises PeerError, RecoveryError, OSError."""
        host, port = split_address(relay, "relay")
        registered = (node.endpoint for node in self._cluster.view.nodes.values() if node.address == relay)
        endpoint = next(registered, NodeEndpoint("", relay))  # one that is no node has its host in its certificate
        found = await asyncio.get_running_loop().getaddrinfo(host, port)
        async with aclosing(self._client.stand_by(endpoint, self._node)) as replies:
            async for reply in replies:
                self._front.stand_by(relay, Relay(str(found[0][4][0]), port, reply.token))
                self._gone_since[relay] = float("inf")
                self._reasons.pop(relay, None)
                self._has_stood_by = True
                log.info("standing_by", relay=relay)


async def stand_by_replies(
    request: control_pb2.StandByRequest,
    context: Any,
    let_stand_by: Callable[[str], AbstractContextManager[str]],
    ending: asyncio.Event,
) -> AsyncIterator[control_pb2.StandByReply]:
    """Let the caller's own node stand by until the stream ends, or whoever answers."""
    names = names_of_client(context.auth_context())
    if not is_borne(request.node, names):
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, other_node(request.node, names))
    with let_stand_by(request.node) as token:
        yield control_pb2.StandByReply(token=token)
        await ending.wait()
