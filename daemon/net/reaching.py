"""Finds out which ports of other nodes this node does not reach, as one record of this node.

A plan's links are dialled before it takes effect, and a node's ports when a link or a file of it was lost. A port that
does not answer is a fact in etcd. It is dialled again with growing pauses, so that plans use a healed pair again.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from headway.daemon.base.activities import SharedWork
from headway.daemon.base.errors import StoreError
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import Port, ReachFact, ReachRecord
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.cluster.transaction import Compare, Put
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import Member
from headway.daemon.net.reach_target import MAX_REASON, Target, worker_target
from headway.proto import control_pb2

log = structlog.get_logger()

FIRST_RETRY_S: Final = 2.0
"""Least pause after a port did not answer."""
RETRY_SHARE: Final = 0.1
"""The pause, as a share of the time for which a port has not answered: an outage costs little more than it lasts."""
LONGEST_RETRY_S: Final = 60.0
LINK_STANDS_S: Final = 5.0
"""Time for which a link's first finding stands against any dial: a dial may succeed where a link does not. Each finding
within LINK_DOUBTED_S of the one before stands twice as long, up to LONGEST_RETRY_S.
"""
LINK_DOUBTED_S: Final = 600.0
REST_S: Final = 0.05
"""Pause between two rounds, so that facts found together are written together."""
RETRY_WRITE_S: Final = 1.0
LONGEST_WAIT_S: Final = 120.0
FRESH_S: Final = 5.0
"""A port that has answered within this time is not dialled again for a plan."""
AT_ONCE: Final = 8
"""Maximum number of dials at a time for one caller."""
MOST_NODES: Final = 64
"""Maximum number of nodes that are dialled for one caller."""

Key = tuple[str, Port, int]
"""(node, port, device). A worker that returns on another port keeps the fact of its predecessor."""


def ports_of(node: NodeRecord) -> list[Target]:
    """Return the registered ports of a node: its daemon, and each of its workers."""
    daemon = Target(node=node.name, incarnation=node.incarnation, port=Port.DAEMON, address=node.address)
    workers = node.workers
    whose = node.name, node.incarnation
    return [daemon, *(worker_target(*whose, each.device_index, each.address, each.incarnation) for each in workers)]


def is_current(view: ClusterView, target: Target) -> bool:
    """Return whether the dialled process still exists. A process that ended is gone, not unreachable."""
    node = view.nodes.get(target.node)
    if node is None or node.incarnation != target.incarnation:
        return False
    if target.port is Port.DAEMON:
        return node.address == target.address
    if target.device_index in node.down_devices:
        return False
    return not node.workers or any(worker.incarnation == target.worker for worker in node.workers)


def key_of(target: Target) -> Key:
    """Return the key of a fact."""
    return target.node, target.port, target.device_index


async def dial_ports(
    view: ClusterView, node: str, names: Iterable[str], prove: Callable[[Target], Awaitable[str]]
) -> list[control_pb2.DialledPort]:
    """Dial every registered port of some nodes except `node`, for a caller that wants to know whom it reaches.

    Nothing else is dialled, and little at once, so nobody can use a daemon as a port scanner. prove: as in Reaching.
    """
    room = asyncio.Semaphore(AT_ONCE)

    async def one(target: Target) -> control_pb2.DialledPort:
        async with room:
            began = time.monotonic()
            reason = await prove(target)
        seconds, port = time.monotonic() - began, str(target.port)
        return control_pb2.DialledPort(
            node=target.node, port=port, address=target.address, reason=reason, seconds=seconds
        )

    known = [view.nodes[name] for name in sorted(set(names) - {node})[:MOST_NODES] if name in view.nodes]
    return list(await asyncio.gather(*(one(target) for other in known for target in ports_of(other))))


@dataclass(slots=True)
class _Silent:
    """A port that does not answer."""

    target: Target
    reason: str
    since: float
    """Time of the first failure since it answered."""
    due_at: float
    measured_at: float
    """Seconds since the epoch."""
    stands_s: float = 0.0
    """Time for which a link's finding stands against successful dials, once etcd has it; 0: a dial found it."""
    stands_until: float = 0.0
    """Infinity until etcd was seen to have it: the worker's failure waits for that."""


class ReachBook:
    """The facts of one node, and when each port is dialled again. No IO; `now` is seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._silent: dict[Key, _Silent] = {}
        self._answered: dict[Key, tuple[Target, float]] = {}
        """When ports answered last, if that was within FRESH_S."""
        self._links: dict[Key, tuple[float, float]] = {}
        """When the last link to a port did not open, and for how long that stood."""

    def record(self, incarnation: str) -> ReachRecord:
        """Return what other nodes need to know."""
        facts = (
            ReachFact(
                to=one.target.node,
                to_incarnation=one.target.incarnation,
                port=one.target.port,
                address=one.target.address,
                device_index=one.target.device_index,
                reason=one.reason[:MAX_REASON],
                measured_at=round(one.measured_at, 3),
            )
            for _, one in sorted(self._silent.items())
        )
        return ReachRecord(incarnation=incarnation, facts=tuple(facts))

    def look(self, view: ClusterView) -> None:
        """Forget facts about daemons that have gone, and dial the successor of a worker at once."""
        for key, one in list(self._silent.items()):
            node = view.nodes.get(one.target.node)
            if node is None or node.incarnation != one.target.incarnation:
                del self._silent[key]
            elif (now := next((each for each in ports_of(node) if key_of(each) == key), one.target)) != one.target:
                one.target, one.due_at, one.stands_until = now, 0.0, 0.0

    def due(self, *, now: float) -> list[Target]:
        """Return the silent ports to dial now."""
        return [one.target for one in self._silent.values() if one.due_at <= now]

    def next_due_at(self) -> float:
        """Return when a silent port is dialled next; infinity: none is silent."""
        return min((one.due_at for one in self._silent.values()), default=math.inf)

    def found(self, target: Target, reason: str, *, now: float, at: float) -> bool:
        """Note the result of a dial. at: seconds since the epoch. Return whether it is silent for a new reason."""
        key = key_of(target)
        before = self._silent.get(key)
        if not reason:
            if before is not None and before.target == target and now < before.stands_until:
                before.due_at = before.stands_until
                return False
            self._silent.pop(key, None)
            self._answered = {each: told for each, told in self._answered.items() if now < told[1] + FRESH_S}
            self._answered[key] = target, now
            return False
        since = before.since if before is not None else now
        wait_s = min(max(RETRY_SHARE * (now - since), FIRST_RETRY_S), LONGEST_RETRY_S) * random.uniform(0.8, 1.2)
        self._silent[key] = _Silent(target, reason, since, now + wait_s, at)
        self._answered.pop(key, None)
        return before is None or before.reason != reason

    def link_failed(self, target: Target, reason: str, *, now: float, at: float) -> None:
        """Note that a link to a port did not open. For a while this outweighs any successful dial."""
        key = key_of(target)
        before = self._silent.get(key)
        if before is not None and before.target == target and now < before.stands_until:
            return  # several workers and jobs report one incident
        last_at, last_s = self._links.get(key, (-math.inf, 0.0))
        stands_s = min(2 * last_s, LONGEST_RETRY_S) if now < last_at + LINK_DOUBTED_S else LINK_STANDS_S
        self._links[key] = now, stands_s
        self._silent[key] = _Silent(target, reason, now, math.inf, at, stands_s, math.inf)
        self._answered.pop(key, None)

    def told(self, *, now: float) -> None:
        """Note that etcd has every fact."""
        for one in self._silent.values():
            if one.stands_until == math.inf:
                one.due_at = one.stands_until = now + one.stands_s

    def has_just_answered(self, target: Target, *, now: float) -> bool:
        """Return whether a port has answered within FRESH_S, and nothing has contradicted that since."""
        answered, at = self._answered.get(key_of(target), (None, 0.0))
        return answered == target and now < at + FRESH_S

    def is_silent(self, target: Target) -> bool:
        """Return whether it is a fact that a port does not answer."""
        return key_of(target) in self._silent

    def doubt(self, target: Target) -> None:
        """Let an earlier answer count no more."""
        self._answered.pop(key_of(target), None)


class Reaching:
    """`run` dials silent ports again, and writes; `prove` and `link_failed` are for callers that need to know now."""

    def __init__(self, member: Member, dial: Callable[[Target], Coroutine[Any, Any, str]]) -> None:
        """dial: returns why a target does not answer; empty: it does."""
        self._member = member
        self._cluster = member.cluster
        self._dial = dial
        self._book = ReachBook()
        self._dials: SharedWork[Target, str] = SharedWork(kept_s=0.0)
        self._doubted: set[Target] = set()
        """Ports to dial because a link or a file was lost."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Dial and write until cancelled."""
        async with asyncio.TaskGroup() as group:
            dialling: dict[Target, asyncio.Task[str]] = {}
            while True:
                seen = self._cluster.version
                self._book.look(self._cluster.view)
                dialling = {target: task for target, task in dialling.items() if not task.done()}
                due, self._doubted = {*self._book.due(now=time.monotonic()), *self._doubted}, set()
                for target in due - dialling.keys():
                    name = f"reach {target.node} {target.port}"
                    dialling[target] = group.create_task(self.prove(target), name=name)
                wait_s = min(self._book.next_due_at() - time.monotonic(), LONGEST_WAIT_S)
                if not await self._write():
                    wait_s = min(wait_s, RETRY_WRITE_S)
                await self._wait(seen, LONGEST_WAIT_S if dialling else max(wait_s, 0.0))
                await asyncio.sleep(REST_S)

    async def prove(self, target: Target) -> str:
        """Dial a port now, unless it has just answered.

        Returns why it does not answer, which is a fact from now on; empty: it answers.
        """
        if self._book.has_just_answered(target, now=time.monotonic()):
            return ""
        reason = await self._dials.result(target, lambda: self._dial(target))
        if not reason or is_current(self._cluster.view, target):
            if self._book.found(target, reason, now=time.monotonic(), at=time.time()):
                port, address = str(target.port), target.address
                log.warning("peer_not_reached", peer=target.node, port=port, address=address, reason=reason)
            self._changed.set()
        return reason

    def link_failed(self, target: Target, reason: str) -> None:
        """Note that a link to a port did not open."""
        self._book.link_failed(target, reason, now=time.monotonic(), at=time.time())
        log.warning("link_not_opened", peer=target.node, address=target.address, reason=reason)
        self._changed.set()

    def doubt(self, node: str) -> None:
        """Dial a node's ports soon, because a link with it was lost, or it did not send a file."""
        if (record := self._cluster.view.nodes.get(node)) is not None:
            for target in ports_of(record):
                self._book.doubt(target)
                self._doubted |= {target} if not self._book.is_silent(target) else set()
            self._changed.set()

    async def _wait(self, seen: int, wait_s: float) -> None:
        """Wait for a change of the cluster, a finding, or the timeout."""
        waits = [asyncio.ensure_future(self._cluster.changed(seen)), asyncio.ensure_future(self._changed.wait())]
        try:
            await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._changed.clear()  # after the wait, so that a dial that ended before it wakes the loop at once

    async def _write(self) -> bool:
        """Write facts that the view does not show yet. While etcd is unreachable, this is retried."""
        node, incarnation = self._member.node, self._member.incarnation
        record, shown = self._book.record(incarnation), self._cluster.view.reach.get(node)
        if shown is None or shown.incarnation != incarnation:
            shown = ReachRecord(incarnation=incarnation)
        if _undated(shown) == _undated(record):
            self._book.told(now=time.monotonic())
            return True
        if not self._cluster.is_reachable:
            return True
        put = Put(Keys.reach(node), encode(record), self._member.lease_id())
        try:
            revision = await self._member.etcd.transaction([Compare.present(Keys.node(node))], [put])
        except StoreError as error:
            log.info("reach_not_written", error=str(error))
            return False
        await self._cluster.caught_up(revision, timeout_s=RETRY_WRITE_S)
        return True


def _undated(record: ReachRecord) -> list[ReachFact]:
    return [replace(fact, measured_at=0.0) for fact in record.facts]
