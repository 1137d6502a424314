"""Proves which ports of other nodes this node reaches, at first sight and then repeatedly, as one record of this node.

A peer is dialled as soon as its record is seen: its daemon's port and the port of each of its workers. A failed dial is
repeated with growing pauses, so that a healed pair is used again. Discoveries of links and plans are facts as well.
"""

import asyncio
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Any, Final

import structlog

from headway.daemon.errors import StoreError
from headway.daemon.etcd.client import EtcdClient
from headway.daemon.etcd.transaction import Compare, Put
from headway.daemon.reach.reach_target import MAX_REASON, Target
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import Port, ReachFact, ReachRecord
from headway.daemon.records.records import NodeRecord
from headway.daemon.runtime.shared_work import SharedWork
from headway.daemon.telemetry.probing import MAX_PEERS, peers_of
from headway.daemon.telemetry.report_pace import interval_s
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.cluster_watch import ClusterWatch

log = structlog.get_logger()

MAX_PROVEN: Final = 64
"""Maximum number of peers that a node proves by itself: those of its plans, and others by lot. A plan proves
the rest. In a larger cluster MAX_PEERS of the others are enough: most ways are unproven then, however many it dials.
"""
AT_ONCE: Final = 8
"""Maximum number of dials at a time."""
TO_ONE_NODE: Final = 2
"""Maximum number of those to one node: a hung node with many workers must not hold up the proofs of the others."""
EVERY_S: Final = 120.0
"""Interval of proofs of a port that answers."""
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
DATED_EVERY_S: Final = 600.0
"""Interval at which the date of an unchanged fact is updated."""
REST_S: Final = 0.05
"""Least pause between two rounds, so that facts found together are written together."""
REST_PER_NODE_S: Final = 0.01
"""In a large cluster the pause is longer: a round looks at every node, and more of them come and go."""
RETRY_WRITE_S: Final = 1.0
UNHURRIED_S: Final = 1.0
"""Least delay of news that change no plan, so that they are written together and not while etcd is busy with a
recovery. It grows with the cluster (report_pace.py).
"""
FRESH_S: Final = 5.0
"""A port that has answered within this time is not dialled again for a plan."""

Key = tuple[str, Port, int]
"""(node, port, device)"""


def targets_of(view: ClusterView, name: str) -> list[Target]:
    """Return the ports that a node proves by itself: of its peers, and between its own workers if it has several."""
    own = view.nodes.get(name)
    if own is None:
        return []
    by_lot = MAX_PROVEN if len(view.nodes) <= MAX_PROVEN else MAX_PEERS
    peers = peers_of(view, name, most=MAX_PROVEN, by_lot=by_lot, same_host=True)
    found = [target for peer in peers for target in ports_of(peer)]
    own_workers = [target for target in ports_of(own) if target.port is Port.WORKER]
    return found + (own_workers if len(own.devices) > 1 else [])


def ports_of(node: NodeRecord) -> list[Target]:
    """Return the registered ports of a node: its daemon, and each of its workers."""
    daemon = Target(node=node.name, incarnation=node.incarnation, port=Port.DAEMON, address=node.address)
    workers = (
        Target(
            node=node.name,
            incarnation=node.incarnation,
            port=Port.WORKER,
            address=worker.address,
            device_index=worker.device_index,
            worker=worker.incarnation,
        )
        for worker in node.workers
    )
    return [daemon, *workers]


def _of_keys(keys: Collection[Key], view: ClusterView) -> Iterator[Target]:
    """Yield the present targets of some keys: a port that a plan found silent is dialled until it answers, though its
    node may be no peer any more.
    """
    for name in {name for name, _, _ in keys} & view.nodes.keys():
        yield from (target for target in ports_of(view.nodes[name]) if key_of(target) in keys)


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
    """Return the key of a fact. A worker that returns on another port keeps the fact of its predecessor."""
    return target.node, target.port, target.device_index


@dataclass(slots=True)
class _Proof:
    """The knowledge about one port."""

    target: Target
    """The dialled target."""
    fact: ReachFact
    found_at: float
    due_at: float
    silent_since: float | None = None
    """Time of the first failure since it answered; None: it answers."""


@dataclass(slots=True)
class _LinkFinding:
    """The last link to a port that did not open."""

    target: Target
    found_at: float
    stands_s: float
    """Time for which it stands against successful dials, once etcd has it."""
    told_at: float | None = None
    """Time at which etcd was seen to have it: the worker's failure waits for that."""

    @property
    def stands_until(self) -> float:
        """Return the time until which no dial proves the port."""
        return self.told_at + self.stands_s if self.told_at is not None else math.inf

    def stands(self, target: Target, *, now: float) -> bool:
        """Return whether a successful dial of a target does not prove it yet."""
        return self.target == target and now < self.stands_until


class ReachBook:
    """The facts of one node, and when each port is dialled again. No IO; `now` is seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._proofs: dict[Key, _Proof] = {}
        self._findings: dict[Key, _LinkFinding] = {}

    @property
    def silent(self) -> set[Key]:
        """Return ports that did not answer when they were last dialled, at most MAX_PROVEN, the earliest due first."""
        silent = [(proof.due_at, key) for key, proof in self._proofs.items() if proof.fact.reason]
        return {key for _, key in nsmallest(MAX_PROVEN, silent)}

    @property
    def facts(self) -> tuple[ReachFact, ...]:
        """Return the facts, sorted, at most one for each port."""
        return tuple(self._proofs[key].fact for key in sorted(self._proofs))

    def record(self, node: str, incarnation: str) -> ReachRecord:
        """Return what other nodes need to know: the ports that do not answer, and how many peers were dialled."""
        blocked = tuple(fact for fact in self.facts if fact.reason)
        peers = {name for name, _, _ in self._proofs if name != node}
        return ReachRecord(incarnation=incarnation, facts=blocked, num_peers=len(peers))

    def forget(self, nodes: Iterable[tuple[str, str]]) -> None:
        """Keep only the facts about these processes: (name, incarnation)."""
        living = set(nodes)
        self._proofs = {
            key: proof for key, proof in self._proofs.items() if (proof.target.node, proof.target.incarnation) in living
        }
        self._findings = {key: finding for key, finding in self._findings.items() if key in self._proofs}

    def due(self, targets: Iterable[Target], *, now: float) -> list[Target]:
        """Return the targets to dial now: never dialled in this form, or long enough ago.

        The longest due comes first: silent ports are due again soon and take seconds each, and must not hold up others.
        """
        return sorted((target for target in targets if self.due_at(target) <= now), key=self.due_at)

    def due_at(self, target: Target) -> float:
        """Return when a port is dialled next; in the past: now."""
        proof = self._proofs.get(key_of(target))
        return proof.due_at if proof is not None and proof.target == target else 0.0

    def found(self, target: Target, reason: str, *, now: float, at: float) -> bool:
        """Note the result of dialling a port. at: seconds since the epoch. Return whether it is another than before."""
        before, finding = self._proofs.get(key_of(target)), self._findings.get(key_of(target))
        if before is not None and finding is not None and not reason and finding.stands(target, now=now):
            before.due_at = min(finding.stands_until, now + FIRST_RETRY_S)
            return False
        since = before.silent_since if before is not None else None
        silent_since = (since if since is not None else now) if reason else None
        wait_s = EVERY_S
        if silent_since is not None:
            wait_s = min(max(RETRY_SHARE * (now - silent_since), FIRST_RETRY_S), LONGEST_RETRY_S)
        self._note(target, reason, now=now, due_at=now + wait_s * random.uniform(0.8, 1.2), at=at, since=silent_since)
        return before is None or before.fact.reason != reason[:MAX_REASON]

    def link_failed(self, target: Target, reason: str, *, now: float, at: float) -> None:
        """Record that a link to a port did not open. For a while this outweighs any successful dial."""
        last = self._findings.get(key_of(target))
        if last is not None and last.stands(target, now=now):
            return  # several workers and jobs report one incident
        is_doubted = last is not None and now < last.found_at + LINK_DOUBTED_S
        stands_s = min(2 * last.stands_s, LONGEST_RETRY_S) if last is not None and is_doubted else LINK_STANDS_S
        self._findings[key_of(target)] = _LinkFinding(target, now, stands_s)
        self._note(target, reason, now=now, due_at=now + stands_s, at=at, since=now)

    def told(self, *, now: float) -> None:
        """Note that etcd has every fact."""
        for finding in self._findings.values():
            finding.told_at = now if finding.told_at is None else finding.told_at

    def has_just_answered(self, target: Target, *, now: float) -> bool:
        """Return whether a port has answered within FRESH_S, and nothing has contradicted that since."""
        proof = self._proofs.get(key_of(target))
        if proof is None or proof.target != target or proof.fact.reason or proof.due_at <= now:
            return False
        return now < proof.found_at + FRESH_S

    def hurry(self, node: str, *, now: float) -> None:
        """Dial soon the ports of a node that answered before: a lost link contradicts that."""
        for proof in self._proofs.values():
            if proof.target.node == node and not proof.fact.reason:
                proof.due_at = min(proof.due_at, now)

    def _note(self, target: Target, reason: str, *, now: float, due_at: float, at: float, since: float | None) -> None:
        fact = ReachFact(
            to=target.node,
            to_incarnation=target.incarnation,
            port=target.port,
            address=target.address,
            device_index=target.device_index,
            reason=reason[:MAX_REASON],
            measured_at=round(at, 3),
        )
        self._proofs[key_of(target)] = _Proof(target, fact, now, due_at, since)


def is_news(shown: ReachRecord, record: ReachRecord) -> bool:
    """Return whether a record differs from that in etcd by more than a fresh date, or by peers that have gone:
    everybody sees those, and all nodes would write it.
    """
    if not may_wait(shown, record) or len(shown.facts) != len(record.facts) or shown.num_peers < record.num_peers:
        return True
    pairs = zip(shown.facts, record.facts, strict=True)
    return any(new.measured_at - old.measured_at > DATED_EVERY_S for old, new in pairs)


def may_wait(shown: ReachRecord, record: ReachRecord) -> bool:
    """Return whether no plan depends on the news, because the blocked ways are the same as in etcd."""
    blocked, known = (
        [replace(fact, measured_at=0.0) for fact in each.facts if fact.reason] for each in (record, shown)
    )
    return blocked == known


class Reaching:
    """`run` proves and writes until cancelled; `prove` and `link_failed` are for callers that need to know now."""

    def __init__(
        self,
        *,
        node: str,
        incarnation: str,
        etcd: EtcdClient,
        cluster: ClusterWatch,
        dial: Callable[[Target], Coroutine[Any, Any, str]],
        lease_id: Callable[[], int],
    ) -> None:
        """dial: returns why a target does not answer; empty: it does."""
        self._node = node
        self._incarnation = incarnation
        self._etcd = etcd
        self._cluster = cluster
        self._dial = dial
        self._lease_id = lease_id
        self._book = ReachBook()
        self._dialling: dict[Key, asyncio.Task[None]] = {}
        self._targets: list[Target] = []
        self._waiting: deque[Target] = deque()
        """Targets that are due, and wait for a running dial to end."""
        self._looked_at: tuple[int, int] | None = None
        """The changes of nodes and of plans from which `_targets` follow."""
        self._dials: SharedWork[Target, str] = SharedWork(kept_s=0.0)
        self._news_since: float | None = None
        self._changed = asyncio.Event()
        self._is_urgent = asyncio.Event()
        """Set when a port is known not to answer: plans depend on it, so the pause ends."""

    async def run(self) -> None:
        """Prove and write until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    seen = self._cluster.version
                    self._is_urgent.clear()  # what is urgent from now on ends the rest after this round
                    wait_s = self._dial_what_is_due(group)
                    if not await self._write():
                        wait_s = min(wait_s, RETRY_WRITE_S)
                    await self._wait(seen, wait_s)
                    await self._rest()
        finally:
            self._dialling.clear()

    async def prove(self, target: Target) -> str:
        """Dial a port now, unless it has just answered.

        Returns why it does not answer, which is a fact from now on; empty: it answers.
        """
        if self._book.has_just_answered(target, now=time.monotonic()):
            return ""
        reason = await self._answer_of(target)
        if not reason or is_current(self._cluster.view, target):
            self._found(target, reason)
        return reason

    def link_failed(self, target: Target, reason: str) -> None:
        """Note that a link to a port did not open."""
        self._book.link_failed(target, reason, now=time.monotonic(), at=time.time())
        log.warning("link_not_opened", peer=target.node, address=target.address, reason=reason)
        self._is_urgent.set()
        self._changed.set()

    def hurry(self, node: str) -> None:
        """Prove a node's ports soon, because a link with it was lost."""
        self._book.hurry(node, now=time.monotonic())
        self._is_urgent.set()
        self._changed.set()

    def _dial_what_is_due(self, group: asyncio.TaskGroup) -> float:
        """Start the dials that are due; return the seconds until more are due."""
        view, now = self._cluster.view, time.monotonic()
        changes = (view.num_record_changes, view.num_plan_changes)
        if changes != self._looked_at:
            self._looked_at, self._targets = changes, targets_of(view, self._node)
            self._book.forget((node.name, node.incarnation) for node in view.nodes.values())
        targets = {key_of(target): target for target in (*_of_keys(self._book.silent, view), *self._targets)}
        idle = [target for key, target in targets.items() if key not in self._dialling]
        due = self._book.due(idle, now=now)
        self._waiting = deque(due)
        self._dial_next(group)
        if due:
            return EVERY_S  # the end of a running dial wakes the loop
        return max(min((self._book.due_at(target) - now for target in idle), default=EVERY_S), 0.05)

    def _dial_next(self, group: asyncio.TaskGroup) -> None:
        to_node = Counter(node for node, _, _ in self._dialling)
        held_back: deque[Target] = deque()
        while self._waiting and len(self._dialling) < AT_ONCE:
            target = self._waiting.popleft()
            if to_node[target.node] >= TO_ONE_NODE:
                held_back.append(target)
                continue
            to_node[target.node] += 1
            name = f"reach {target.node} {target.port}"
            self._dialling[key_of(target)] = group.create_task(self._prove_one(target, group), name=name)
        self._waiting.extendleft(reversed(held_back))

    async def _prove_one(self, target: Target, group: asyncio.TaskGroup) -> None:
        try:
            reason = await self._answer_of(target)
        finally:
            self._dialling.pop(key_of(target), None)
        if not reason or is_current(self._cluster.view, target):
            self._found(target, reason)
        self._dial_next(group)
        self._changed.set()

    async def _answer_of(self, target: Target) -> str:
        """Dial once for all callers that wait for an answer."""
        return await self._dials.result(target, lambda: self._dial(target))

    def _found(self, target: Target, reason: str) -> None:
        is_news = self._book.found(target, reason, now=time.monotonic(), at=time.time())
        if reason and is_news:
            log.warning(
                "peer_not_reached", peer=target.node, port=str(target.port), address=target.address, reason=reason
            )
            self._is_urgent.set()
        self._changed.set()

    async def _wait(self, seen: int, wait_s: float) -> None:
        """Wait for a change of the cluster, the end of a proof, or the timeout."""
        waits = [
            asyncio.ensure_future(self._cluster.changed(seen)),
            asyncio.ensure_future(self._changed.wait()),
        ]
        try:
            await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        # Cleared after the wait, so that a proof that ended before it wakes the loop at once.
        self._changed.clear()

    async def _rest(self) -> None:
        """Pause between two rounds."""
        await asyncio.sleep(REST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(REST_PER_NODE_S * len(self._cluster.view.nodes) - REST_S, 0.0)):
                await self._is_urgent.wait()

    async def _write(self) -> bool:
        """Write news that the view does not show yet. While etcd is unreachable, this is retried."""
        record, view = self._book.record(self._node, self._incarnation), self._cluster.view
        seen = view.reach.get(self._node)
        is_own = seen is not None and seen.incarnation == self._incarnation
        shown = seen if seen is not None and is_own else ReachRecord(incarnation=self._incarnation)
        now = time.monotonic()
        if may_wait(shown, record):
            self._book.told(now=now)
        if not is_news(shown, record) or not self._cluster.is_reachable:
            self._news_since = None
            return True
        # The delay counts from the first of several changes, so that a stream of changes is written too.
        self._news_since = self._news_since if self._news_since is not None else now
        if may_wait(shown, record) and now < self._news_since + interval_s(UNHURRIED_S, len(view.nodes)):
            return False
        alive = Compare.present(Keys.node(self._node))
        try:
            revision = await self._etcd.transaction(
                [alive], [Put(Keys.reach(self._node), encode(record), self._lease_id())]
            )
        except StoreError as error:
            log.info("reach_not_written", error=str(error))
            return False
        self._news_since = None
        await self._cluster.caught_up(revision, timeout_s=RETRY_WRITE_S)
        return True
