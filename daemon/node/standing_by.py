"""Lets this node, which others cannot dial, stand by at relays, again and again.

Another relay takes the place of one that is gone. If that one was named, it stays as the last that others dial. The
links of a running plan know the relays of its start, so that is done early: while another one leads here.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

import structlog

from headway.daemon.addresses import NodeEndpoint, split_address
from headway.daemon.errors import RecoveryError
from headway.daemon.front.front_process import FrontProcess
from headway.daemon.front.outpost import Post
from headway.daemon.node.relays import MOST_RELAYS, address_behind, best, candidates, measured, rates, without_gone
from headway.daemon.rpc.peer_client import NodeClient
from headway.daemon.view.cluster_watch import ClusterWatch
from headway.stages.errors import PeerError

log = structlog.get_logger()

PAUSE_S: Final = 1.0
"""Pause before the next attempt."""
GONE_S: Final = 10.0
"""Time without a relay after which another one takes its place."""


class StandingBy:
    """`choose` once, then `run` until cancelled."""

    def __init__(
        self,
        front: FrontProcess,
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
        """Choose by measured paths. Of relays that were named, those that do not answer come last."""
        while True:
            view = self._cluster.view
            found = best(await measured(self._told or candidates(view, self._node)), rates(view))
            silent = (relay for relay in self._told if relay not in found)
            self._take((*found, *silent)[:MOST_RELAYS])
            if self._gone_since:
                log.info("relays_chosen", relays=tuple(self._gone_since))
                return
            if not self._reasons:
                self._reasons[""] = "no node with one_port answers"
                log.warning("no_relay_found", reason=self._reasons[""])
            await asyncio.sleep(PAUSE_S)

    async def run(self) -> None:
        """Stand by at the chosen relays."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    for relay in self._gone_since.keys() - self._tasks.keys():
                        self._tasks[relay] = group.create_task(self._at(relay), name=f"relay {relay}")
                    await asyncio.sleep(PAUSE_S)
                    await self._replace_gone()
                    self.tell(self._trouble())
        finally:
            self._tasks.clear()

    async def _replace_gone(self) -> None:
        now = time.monotonic()
        gone = [relay for relay, since in self._gone_since.items() if since + GONE_S <= now]
        if not gone and len(self._gone_since) == min(MOST_RELAYS, len(self._told) or MOST_RELAYS):
            return
        view = self._cluster.view
        fresh = [each for each in self._told or candidates(view, self._node) if each not in self._gone_since]
        found = best(await measured(fresh), rates(view)) if fresh else ()
        now_chosen = without_gone(tuple(self._gone_since), gone, found, are_named=bool(self._told))
        if now_chosen == tuple(self._gone_since):
            return
        for relay in self._gone_since.keys() - set(now_chosen):
            self._tasks.pop(relay).cancel()
        self._take(now_chosen)
        log.info("relays_chosen", relays=now_chosen)
        self.moved(self.address)

    def _trouble(self) -> str:
        """Return why this node stands by nowhere. It may be moving to another relay, unless it has never stood by."""
        if any(relay not in self._reasons for relay in self._gone_since):
            return ""
        if self._has_stood_by and time.monotonic() < max(self._gone_since.values(), default=0.0) + GONE_S:
            return ""
        return "stands by at no relay: " + "; ".join(f"{relay}: {self._reasons[relay]}" for relay in self._gone_since)

    def _take(self, relays: tuple[str, ...]) -> None:
        now = time.monotonic()
        self._gone_since = {relay: self._gone_since.get(relay, now) for relay in relays}

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
                self._front.stand_by(relay, Post(str(found[0][4][0]), port, reply.token))
                self._gone_since[relay] = float("inf")
                self._reasons.pop(relay, None)
                self._has_stood_by = True
                log.info("standing_by", relay=relay)
