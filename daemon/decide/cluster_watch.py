"""Keeps a ClusterView current: lists etcd's content, then follows every change, through outages and compactions.

Some changes wait a moment, so that one look is about many of them: while hundreds of daemons join or are lost, each is
told of every other.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from headway.daemon.base.errors import CompactedError, InvariantLostError, StoreError, StoreUnreachableError
from headway.daemon.cluster.client import EtcdClient, KeyValue, Snapshot
from headway.daemon.cluster.format import to_builtins
from headway.daemon.cluster.keys import PREFIX, Keys
from headway.daemon.cluster.records import Phase, PlanRecord
from headway.daemon.cluster.watch import KeyEvent, WatchBatch
from headway.daemon.decide.cluster_view import ClusterView

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HistoryMark:
    """The progress of an etcd history."""

    revision: int = 0
    """Last revision; 0: nothing was seen yet."""
    cluster_id: int = 0
    raft_term: int = 0


def went_back(
    seen: HistoryMark, found: HistoryMark, *, known: Mapping[str, int], listed: Mapping[str, int]
) -> str | None:
    """Return why `found` cannot follow `seen`, or None if it can.

    seen: the mark before the listing was requested; found: the listing's own mark. known: for each key, the revision of
    its last known change or deletion. listed: for each key, its revision in the listing.
    """
    if seen.revision == 0:
        return None
    if found.cluster_id != seen.cluster_id:
        return f"cluster {found.cluster_id:x} answers in place of {seen.cluster_id:x}"
    if found.revision < seen.revision:
        return f"revision {found.revision} after {seen.revision}"
    if found.raft_term < seen.raft_term:
        return f"raft term {found.raft_term} after {seen.raft_term}"
    for key, revision in listed.items():
        if revision < known.get(key, 0) <= found.revision:
            return f"{key} is of revision {revision} after {known[key]}"
    return None


PER_NODE_S: Final = 1e-3
"""Seconds per node of the cluster for which such a change may wait: 10 ms for 10 nodes, 1 s for 1,000."""
_MEASURED: Final = (Keys.PROBES, Keys.REACH)
_OF_NODES: Final = (Keys.NODES, *_MEASURED)
_PATIENT: Final = frozenset({"goodput", "progress", "profile", "events"})
"""Records of a job that no step of a plan waits for."""


def is_for_leader(key: str) -> bool:
    """Return whether only a leader acts on a record: a measured way, unless it is blocked; a job's rate and seconds."""
    _, _, leaf = key.removeprefix(Keys.JOBS).partition("/")
    return key.startswith(_MEASURED) or (key.startswith(Keys.JOBS) and leaf.startswith(("progress", "goodput/")))


def may_wait(key: str, *, is_deleted: bool, leads: bool) -> bool:
    """Return whether a change may wait: of what a node or a worker has measured or says of itself, but not its end.

    leads: whether the daemon that asks is the leader's. The others learn from plans what a node's end means for them.
    """
    if is_deleted:
        return key.startswith(_MEASURED if leads else _OF_NODES)
    if key.startswith(Keys.JOBS):
        _, _, leaf = key.removeprefix(Keys.JOBS).partition("/")
        return leaf.partition("/")[0] in _PATIENT
    return key.startswith(_OF_NODES)


FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
RETRY_PAUSE_S = 0.5
FORGETS_EVERY_S = 60.0
"""Interval at which the memory of what is gone is dropped."""
REFUSED_FOR_S = 60.0
"""Seconds for which etcd may refuse this client before the refusal is final: a role may be changing."""


class ClusterWatch:
    """The one owner of a view: `run` applies changes, everybody else reads `view` and waits on `changed`."""

    def __init__(
        self,
        client: EtcdClient,
        *,
        view: ClusterView | None = None,
        clock: Callable[[], float] = time.monotonic,
        refused_for_s: float = REFUSED_FOR_S,
        chooses_relays: bool = False,
    ) -> None:
        """chooses_relays: the view has what is measured of ways, whoever leads."""
        self.view = view if view is not None else ClusterView()
        self.revision = 0
        """The view holds every change up to this revision; 0: nothing was listed yet. It falls when `view.epoch` rises.
        """
        self.version = 0
        """Number that rises whenever the view or `is_reachable` changes; for `changed`."""
        self.is_reachable = False
        self.reachable_since = clock()
        """Time at which `is_reachable` took its present value."""
        self.unreachable_reason = "not asked yet"
        self.leads: Callable[[], bool] = lambda: True
        """Whether whoever waits on `changed` decides for the cluster. If so, it has to know of lost nodes at once, and
        of the records for the leader alone (Keys.FOR_LEADER), which are most of what nodes write. A daemon that begins
        to lead waits for `probes_seen`.
        """
        self._client = client
        self._clock = clock
        self._refused_for_s = refused_for_s
        self._chooses_relays = chooses_relays
        self._refused_since: float | None = None
        self._mark = HistoryMark()
        self._forgot_at = clock()
        self._signal = asyncio.Event()
        self._applied = asyncio.Event()
        """Set, and replaced, when the view has got a change, also one that wakes nobody yet."""
        self._waking: asyncio.TimerHandle | None = None
        self._has_probes = False
        self._watching: asyncio.Timeout | None = None
        """Ends the present watch, to get the records for the leader."""

    async def run(self) -> None:
        """Follow etcd until cancelled, waiting while it is away.

        Raises InvariantLostError when etcd has refused this client for REFUSED_FOR_S.
        """
        while True:
            try:
                await self._follow()
            except StoreError as error:
                self._refused(error)
                await asyncio.sleep(RETRY_PAUSE_S * random.uniform(0.5, 1.5))

    async def _follow(self) -> None:
        """List and watch, repeatedly. Raises StoreError when etcd refuses this client."""
        is_right, pause = False, FIRST_PAUSE_S
        while True:
            # A daemon that led goes on hearing of ways: dropped and listed again, they would be an older history.
            needs_probes = self._has_probes or self._chooses_relays or self.leads()
            if is_right and needs_probes and not self._has_probes:
                is_right = await self._took_probes()
            if not is_right:
                seen = self._mark
                listed = await self._list(below=_below(needs_probes))
                self._has_probes = needs_probes
                self._take_listing(listed, seen)
            is_right, started_at = False, self._clock()
            try:
                await self._watch()
            except TimeoutError:
                is_right = True  # the records for the leader are called for
                continue
            except CompactedError as error:
                _log.warning("watch_compacted", etcd=error.target, reason=error.reason)
            except StoreUnreachableError as error:
                self._reached(False, f"{error.target} {error.reason}")
            pause = FIRST_PAUSE_S if self._clock() - started_at > LONGEST_PAUSE_S else min(pause * 2, LONGEST_PAUSE_S)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    async def _watch(self) -> None:
        """Take changes. Raises TimeoutError when the view lacks the records for the leader that it needs, and what the
        watch raises: a watch that ends may have missed changes, so everything is listed again.
        """
        below, start = _below(self._has_probes), self.revision + 1
        try:
            async with asyncio.timeout(None) as self._watching:
                async for batch in self._client.watch(PREFIX, below=below, from_revision=start):
                    self._take_batch(batch)
        finally:
            self._watching = None

    def _refused(self, error: StoreError) -> None:
        now = self._clock()
        self._reached(False, f"{error.target} {error.reason}")
        if self._refused_since is None:
            self._refused_since = now
        elif now >= self._refused_since + self._refused_for_s:
            raise InvariantLostError(f"etcd refuses this daemon for good: {error.reason}", error.target) from error

    async def changed(self, seen: int) -> int:
        """Return the version when it differs from `seen`. One return may stand for many changes; none is missed.

        Some changes wait for others (urgency.py): the view has them before the version rises.
        """
        while self.version == seen:
            await self._signal.wait()
        return self.version

    async def caught_up(self, revision: int, *, timeout_s: float) -> bool:
        """Return True when the view holds every change up to a revision, False when it does not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.revision < revision:
                    await self._applied.wait()
        except TimeoutError:
            return False
        return True

    async def probes_seen(self, *, timeout_s: float) -> bool:
        """Return True when the view has also the records for the leader alone, False when it does not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (self._has_probes and self.revision):
                    if self._watching is not None and not self._watching.expired():
                        self._watching.reschedule(asyncio.get_running_loop().time())
                    await self._applied.wait()
        except TimeoutError:
            return False
        return True

    async def _took_probes(self) -> bool:
        """Apply the records for the leader; return whether etcd lists them. Raises StoreError.

        The next watch tells all their changes since the view's revision again. If etcd is away, everything is listed
        once it is back, because its history may be another one.
        """
        try:
            listed = await self._client.get_prefix(Keys.FOR_LEADER)
        except (StoreUnreachableError, CompactedError):
            return False
        self._apply(listed.entries)
        self._has_probes = True
        self._bump()
        return True

    def _forget(self, *, below: int) -> None:
        """Drop what the view remembers of keys and nodes that are gone. No change before a revision can arrive now."""
        self._forgot_at = self._clock()
        self.view.forget_deleted(below=below)
        self.view.forget_absent(now=self._forgot_at)

    async def _list(self, *, below: str) -> Snapshot:
        while True:
            try:
                return await self._client.get_prefix(PREFIX, below=below)
            except StoreUnreachableError as error:
                self._reached(False, error.reason)
            except CompactedError as error:
                _log.info("listing_compacted", reason=error.reason)
            await asyncio.sleep(RETRY_PAUSE_S * random.uniform(0.5, 1.5))

    def _take_listing(self, listed: Snapshot, seen: HistoryMark) -> None:
        """Apply a listing. seen: etcd's progress before the listing was requested; the view has every change
        up to it.
        """
        now, view = self._clock(), self.view
        revisions = {entry.key: entry.mod_revision for entry in listed.entries}
        found = HistoryMark(listed.revision, listed.cluster_id, listed.raft_term)
        known = {key: view.last_revision_of(key) for key in revisions}
        reason = went_back(seen, found, known=known, listed=revisions)
        if reason is not None:
            view.set_in_sight(False, now=now)
            view.start_anew(now=now)
            _log.error("etcd_history_went_back", etcd=self._client.target, reason=reason, epoch=view.epoch)
        self._apply(listed.entries)
        for key in [key for key in view.revisions if key not in revisions]:
            view.apply(key, None, mod_revision=listed.revision, create_revision=0, now=now)
        self._forget(below=listed.revision)
        self._mark = found
        self.revision = listed.revision
        self._reached(True, "")
        self._bump()

    def _apply(self, changed: Iterable[KeyValue | KeyEvent]) -> None:
        now = self._clock()
        for each in changed:
            self.view.apply(
                each.key, each.value, mod_revision=each.mod_revision, create_revision=each.create_revision, now=now
            )

    def _came_to(self, revision: int) -> None:
        """Note that the view has every change up to a revision, and wake all who wait for it."""
        self._mark = replace(self._mark, revision=revision)
        self.revision = revision
        applied, self._applied = self._applied, asyncio.Event()
        applied.set()

    def _take_batch(self, batch: WatchBatch) -> None:
        leads, blocked = self.leads(), self.view.blocked
        self._apply(batch.events)
        self._came_to(batch.revision)
        if self._clock() >= self._forgot_at + FORGETS_EVERY_S:
            self._forget(below=batch.revision)
        is_measured = all(is_for_leader(event.key) for event in batch.events)
        if is_measured and not leads and self.view.blocked is blocked:
            return
        if not all(may_wait(event.key, is_deleted=event.value is None, leads=leads) for event in batch.events):
            self._bump()
        elif self._waking is None:
            self._waking = asyncio.get_running_loop().call_later(PER_NODE_S * len(self.view.nodes), self._bump)

    def _reached(self, is_reachable: bool, reason: str) -> None:
        self.unreachable_reason = reason
        self.view.set_in_sight(is_reachable, now=self._clock())
        if is_reachable is self.is_reachable:
            return
        if is_reachable:
            self._refused_since = None
        self.is_reachable = is_reachable
        self.reachable_since = self._clock()
        if is_reachable:
            _log.info("etcd_reached", etcd=self._client.target)
        else:
            _log.warning("etcd_lost", etcd=self._client.target, reason=reason)
        self._bump()

    def _bump(self) -> None:
        """Wake all who wait for a change."""
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        self.version += 1
        signal, self._signal = self._signal, asyncio.Event()
        applied, self._applied = self._applied, asyncio.Event()
        signal.set()
        applied.set()


def _below(with_probes: bool) -> str:
    """Return the key before which all keys lie that a view has."""
    return "" if with_probes else Keys.FOR_LEADER


class PlanLog:
    """Reports each plan and each phase once, when a view first shows it."""

    def __init__(self) -> None:
        self._plans: dict[str, PlanRecord] = {}
        self._phases: dict[str, tuple[Phase, int]] = {}

    def note(self, view: ClusterView) -> None:
        """Look at a view after every change of it."""
        for job in view.jobs.values():
            if job.plan is not None and self._plans.get(job.name) != job.plan:
                self._plans[job.name] = job.plan
                _log.info(
                    "plan_seen",
                    job=job.name,
                    generation=job.plan.generation,
                    timeline=job.plan.timeline,
                    plan=to_builtins(job.plan),
                )
            phase = (job.phase.phase, job.phase.generation)
            if self._phases.get(job.name) != phase:
                self._phases[job.name] = phase
                _log.info(
                    "phase_seen",
                    job=job.name,
                    generation=job.phase.generation,
                    phase=job.phase.phase.value,
                    reason=job.phase.reason,
                    boundary=job.checkpoint.boundary if job.checkpoint is not None else None,
                )
        for name in self._phases.keys() - view.jobs.keys():
            del self._phases[name]
            self._plans.pop(name, None)


async def log_plans(cluster: ClusterWatch) -> None:
    """Look at the cluster after every change of it, until cancelled."""
    plan_log, seen = PlanLog(), -1
    while True:
        seen = await cluster.changed(seen)
        plan_log.note(cluster.view)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node as a member of its cluster, for one incarnation of its daemon."""

    node: str
    """Its name."""
    incarnation: str
    etcd: EtcdClient
    cluster: ClusterWatch
    lease_id: Callable[[], int]
    """The node's present lease: after a lost lease the node takes another."""

    @property
    def view(self) -> ClusterView:
        """Return the cluster as the node sees it."""
        return self.cluster.view
