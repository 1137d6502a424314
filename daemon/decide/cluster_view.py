"""Folds etcd's content into one value: the nodes, the leader, and every job with its records.

Pure. Keys may come in any order, twice, or late: a key's older revision never replaces a newer one. Unknown keys and
unreadable values are set aside in `unreadable` with the reason; they change nothing else.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from headway.daemon.cluster.cluster_records import (
    IssuedRecord,
    LeaderRecord,
    NodeFailureRecord,
    RetiredRecord,
    RevokedRecord,
    SharesRecord,
    UsageRecord,
)
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import (
    ProbeRecord,
    ReachRecord,
)
from headway.daemon.cluster.memo import remembered
from headway.daemon.cluster.records import (
    NodeRecord,
)
from headway.daemon.decide.job_view import MAX_REMEMBERED, JobView, note_storage, with_inner_record, with_record
from headway.daemon.decide.quarantine import QUARANTINE_AFTER, left_out
from headway.daemon.decide.record_places import DECISIVE, RecordPlace, Unreadable, place_of, read_record, unreadable
from headway.daemon.decide.usage import UsageMeter
from headway.daemon.jobs.job import PLUGINS
from headway.daemon.plan.paths import BlockedWays, blocked_ways

_MEMBERSHIP = attrgetter(
    "incarnation",
    "is_draining",
    "stays_out",
    "down_devices",
    "site",
    "site_is_private",
    "arithmetic_class",
    "protocol",
)


def is_another_member(before: NodeRecord | None, after: NodeRecord | None) -> bool:
    """Return whether what matters for plans has changed: any other change is only a heartbeat."""
    if before is None or after is None:
        return before is not after
    if _MEMBERSHIP(before) != _MEMBERSHIP(after) or refused_code(before) != refused_code(after):
        return True
    return _has_other_devices(before, after)


def refused_code(node: NodeRecord) -> dict[str, str]:
    """Return why a node cannot import code of jobs, by ailment."""
    return {what: text for what, text in node.ailments.items() if what.startswith(PLUGINS)}


def _has_other_devices(before: NodeRecord, after: NodeRecord) -> bool:
    """Return whether more than measured speeds of devices has changed."""
    if before.devices == after.devices:
        return False
    return [each.unmeasured for each in before.devices] != [each.unmeasured for each in after.devices]


def offers_more(before: NodeRecord, after: NodeRecord) -> bool:
    """Return whether plans may now use something of a node that they could not use before."""
    is_released = before.is_draining and not after.is_draining
    return is_released or not set(before.down_devices) <= set(after.down_devices)


SETTLE_S: Final = 2.0
"""Seconds without change before a job starts on a node; and of all nodes, before a job starts or grows at once."""
LONGEST_UNREST_S: Final = 10.0
"""Maximum wait of a job for nodes that keep changing."""


@dataclass(slots=True)
class Unrest:
    """The last change of each node: it came, went, was replaced, or began to drain."""

    changed_at: dict[str, float] = field(default_factory=dict)
    """Node to its last change, for recent moments, the earliest first; other nodes have settled."""
    last_at: float = 0.0
    since: float = 0.0
    """Start of the unrest to which `last_at` belongs."""

    def changed(self, node: str, *, now: float) -> None:
        """Note that a node has changed; an empty name: something else about nodes has changed."""
        if now > self.last_at + SETTLE_S or not self.last_at:
            self.since = now
        self.last_at = now
        self.changed_at.pop(node, None)
        if node:
            self.changed_at[node] = now
        while self.changed_at and now >= self.changed_at[first := next(iter(self.changed_at))] + SETTLE_S:
            del self.changed_at[first]

    @property
    def settled_at(self) -> float:
        """Return from when a job may start or change: nothing has changed for a moment, or changes never end."""
        return min(self.last_at + SETTLE_S, self.since + LONGEST_UNREST_S)

    def steady_at(self, node: str) -> float:
        """Return when a node has settled, if it does not change again."""
        return self.changed_at.get(node, float("-inf")) + SETTLE_S

    def unsettled(self, nodes: Container[str], *, now: float) -> frozenset[str]:
        """Return nodes that have changed a moment ago."""
        if now >= self.last_at + SETTLE_S:
            return frozenset()
        return frozenset(name for name in self.changed_at if name in nodes and self.steady_at(name) > now)


NONE: Final = Counter[int]()


@remembered(size=4)
def _those_ahead(nodes: dict[str, NodeRecord]) -> tuple[NodeRecord, ...]:
    """Return the nodes that have seen generations above those in etcd's records: none, unless its history went back."""
    return tuple(node for node in nodes.values() if node.generations)


@remembered(size=4, is_lasting=True)
def _blocked(reach: dict[str, ReachRecord], nodes: dict[str, NodeRecord]) -> BlockedWays:
    return blocked_ways(reach, nodes)


ABSENT_FOR_S: Final = 86400.0
"""A node that has been absent this long is forgotten: if it returns, it counts as new."""
MAX_ABSENT: Final = 1000
"""Maximum number of absent nodes remembered, the latest first."""
UNREADABLE: Final = -1
"""A revision that no key has."""


@dataclass(slots=True, kw_only=True)
class ClusterView:
    """The fold of all keys under the prefix. One owner applies changes; everybody else reads."""

    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    leader: LeaderRecord | None = None
    failures: dict[str, dict[int, NodeFailureRecord]] = field(default_factory=dict)
    """Recent failures by node and number."""
    jobs: dict[str, JobView] = field(default_factory=dict)
    retired: dict[str, RetiredRecord] = field(default_factory=dict)
    """What is left of jobs whose records were deleted."""
    revisions: dict[str, int] = field(default_factory=dict)
    """Revision of the last change of every key that exists; an absent key has none."""
    unreadable: dict[str, Unreadable] = field(default_factory=dict)
    """Keys that are set aside because their record cannot be used. Their names may hold any bytes: print them with
    `terminal.printable_name`.
    """
    nodes_changed_at: float = 0.0
    """Time of the last change of the set of usable nodes: one came, went, was replaced or began to drain."""
    unrest: Unrest = field(default_factory=Unrest)
    """Recent changes of nodes."""
    shares: SharesRecord = field(default_factory=SharesRecord)
    usage: UsageMeter = field(default_factory=UsageMeter)
    absent_since: dict[str, float] = field(default_factory=dict)
    """Time at which a known node was found gone; it may return after an outage in its old incarnation."""
    arrived_at: dict[str, float] = field(default_factory=dict)
    """Time since which a node's present incarnation has been there."""
    arrived_in: dict[str, int] = field(default_factory=dict)
    """Revision in which a node came (see `newcomers`), as far as it was seen; 0: in another epoch."""
    departures: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Times at which a node's incarnations were seen to go, the last `MAX_REMEMBERED`."""
    probes: dict[str, ProbeRecord] = field(default_factory=dict)
    """Measurements that nodes made of the ways to their peers; none where a daemon does not lead (Keys.FOR_LEADER)."""
    reach: dict[str, ReachRecord] = field(default_factory=dict)
    """Reachability of each node's peers, by port."""
    issued: dict[str, IssuedRecord] = field(default_factory=dict)
    """Newest certificates that were made for invitations, by name in small letters."""
    revoked: dict[str, RevokedRecord] = field(default_factory=dict)
    """Names whose certificates count no more, in small letters. No such node is among `nodes`."""
    started_at: float | None = None
    """Time at which the first key of this epoch was applied."""
    steady_since: float | None = None
    """Time since which etcd has been in sight without a break; None: it is away, and absences prove nothing."""
    epoch: int = 0
    """Number of times that etcd's history went back (an older backup, an empty store), so that the view was rebuilt."""
    _deleted: dict[str, int] = field(default_factory=dict)
    _num_keys: Counter[str] = field(default_factory=Counter, compare=False)
    """Number of present keys below each job."""
    _restored: set[str] = field(default_factory=set)
    """Nodes that have not registered again since etcd's history went back."""
    _incarnations: dict[str, str] = field(default_factory=dict)
    """Newest incarnation of each node, also while it is absent."""
    _shut_out: dict[str, tuple[NodeRecord, int]] = field(default_factory=dict)
    """Records of revoked nodes with their create revisions, for the case that the name is restored."""

    def apply(
        self,
        key: str,
        value: bytes | None,
        *,
        mod_revision: int,
        create_revision: int,
        now: float = 0.0,
    ) -> None:
        """Take over one key. value None: deleted, in `mod_revision`.

        now: seconds of this process's monotonic clock. Settle times and deadlines count from it, so that no two
        clocks are ever compared; a new leader therefore gives every wait its full time again.
        """
        if mod_revision <= self.last_revision_of(key):
            return
        if self.started_at is None:
            self.started_at = now
        if value is None:
            if self.revisions.pop(key, None) is not None:
                self._count_key(key, -1)
            self._deleted[key] = mod_revision
        else:
            if key not in self.revisions:
                self._count_key(key, 1)
            self.revisions[key] = mod_revision
            self._deleted.pop(key, None)
        self.unreadable.pop(key, None)
        try:
            place = place_of(key)
            record = read_record(place, value) if value is not None else None
            if value is None or place.kind is not None:
                self._fold(place, record, create_revision=create_revision, now=now)
        except Exception as error:  # anybody may have written the value: an error in it concerns that key alone
            if value is not None:
                self._set_aside(key, error, now=now)

    def _count_key(self, key: str, by: int) -> None:
        """Count a key that came or went below its job."""
        if key.startswith(Keys.JOBS):
            name = key.removeprefix(Keys.JOBS).partition("/")[0]
            self._num_keys[name] += by
            if not self._num_keys[name]:
                del self._num_keys[name]

    def is_revoked(self, name: str) -> bool:
        """Return whether no certificate of a name counts."""
        return name.casefold() in self.revoked

    def set_in_sight(self, is_in_sight: bool, *, now: float) -> None:
        """Note that etcd answers, or that it no longer does."""
        if not is_in_sight:
            self.steady_since = None
        elif self.steady_since is None:
            self.steady_since = now

    def start_anew(self, *, now: float) -> None:
        """Forget every key, because etcd's history went back. The known nodes count as absent from now on."""
        known = {*self.nodes, *self.absent_since}
        self.nodes, self.failures, self.probes, self.reach = {}, {}, {}, {}
        self.jobs, self.retired, self.issued, self.revoked = {}, {}, {}, {}
        notes = (self._shut_out, self._num_keys, self.revisions, self.unreadable, self._deleted)
        for records in notes:
            records.clear()
        self.leader = None
        self.absent_since = dict.fromkeys(known, now)
        self.arrived_in = dict.fromkeys(known, 0)
        self._restored = known
        self.usage.advance(now)
        self.usage.held.clear()
        self.nodes_changed_at = now
        self.unrest.changed("", now=now)
        self.started_at = now
        self.epoch += 1

    def last_revision_of(self, key: str) -> int:
        """Return the revision of a key's last change or deletion, if remembered; 0: unknown."""
        return max(self.revisions.get(key, 0), self._deleted.get(key, 0))

    def revision_of(self, key: str) -> int:
        """Return the revision of a key's last change; 0: the key is absent.

        UNREADABLE: the key exists and cannot be read. No transaction that compares it succeeds.
        """
        return UNREADABLE if key in self.unreadable else self.revisions.get(key, 0)

    def why_set_aside(self, job: str) -> str:
        """Return which unreadable record blocks decisions about a job; empty: none."""
        for leaf in sorted(DECISIVE) if self.unreadable else ():
            if (found := self.unreadable.get(Keys.of(job, leaf))) is not None:
                remedy = "upgrade this machine" if found.is_newer else "delete its keys, or write them again"
                return f"its {leaf} cannot be read: {found.reason}; {remedy}"
        return ""

    def newer_jobs(self) -> Iterator[tuple[str, str]]:
        """Yield the jobs whose submission only a newer release can read, with the reason."""
        for key, found in sorted(self.unreadable.items()):
            name = key.removeprefix(Keys.JOBS).partition("/")[0]
            if found.is_newer and key == Keys.of(name, "spec"):
                yield name, self.why_set_aside(name)

    def why_left_alone(self, job: str) -> str:
        """Return why nobody takes a step of a job: a record that cannot be read, or a submission that breaks a rule."""
        found = self.jobs.get(job)
        return (found.refusal if found is not None else "") or self.why_set_aside(job)

    def forget_deleted(self, *, below: int) -> None:
        """Drop the memory of deletions older than a revision: nothing that old can arrive now."""
        self._deleted = {key: revision for key, revision in self._deleted.items() if revision >= below}

    def forget_absent(self, *, now: float) -> None:
        """Drop the memory of nodes that have long been gone: rented machines have a new name each time."""
        since = self.absent_since
        newest_first = sorted(since, key=lambda name: -since[name])
        kept = {name for name in newest_first[:MAX_ABSENT] if now - since[name] <= ABSENT_FOR_S}
        memories: tuple[dict[str, Any], ...] = (self.arrived_at, self.arrived_in, self.departures, self._incarnations)
        for name in since.keys() - kept:
            for memory in (since, *memories):
                memory.pop(name, None)
            self._restored.discard(name)

    def retired_generation(self, name: str) -> int:
        """Return the highest generation of jobs of a name that were retired; 0: none."""
        found = self.retired.get(name)
        return found.generation if found is not None else 0

    def jobs_in_order(self) -> list[JobView]:
        """Return the jobs whose spec is known, first in first."""
        return sorted(
            (job for job in self.jobs.values() if job.submission is not None), key=lambda job: job.spec_revision
        )

    def newcomers(self, job: JobView, among: Iterable[str]) -> frozenset[str]:
        """Return those of some nodes that came after a job's plan came into force, and that are not in the plan.

        A node comes when it registers, also again after its lease was lost. It comes when it is released from draining
        or quarantine, and when a device that had no worker gets one.
        """
        planned_in = self.revision_of(Keys.of(job.name, "plan"))
        own = {(stage.node, stage.node_incarnation) for stage in (job.plan.workers if job.plan is not None else ())}
        return frozenset(
            name
            for name in among
            if (node := self.nodes.get(name)) is not None
            and self.arrived_in.get(name, 0) > planned_in
            and (name, node.incarnation) not in own
        )

    @property
    def blocked(self) -> BlockedWays:
        """Return the ways between the present processes of nodes that are blocked."""
        return _blocked(self.reach, self.nodes)

    def known_generation(self, job: str, uid: str) -> int:
        """Return the highest generation that a present node has seen of one submission; 0: none."""
        return max((node.generation_seen(job, uid) for node in _those_ahead(self.nodes)), default=0)

    def known_generation_of_name(self, job: str) -> int:
        """Return the highest generation that a present node has seen of all jobs of a name; 0: none."""
        return max((node.generations.get(job, 0) for node in _those_ahead(self.nodes)), default=0)

    def _fold(self, place: RecordPlace, record: Any, *, create_revision: int, now: float) -> None:
        """Fold one record in. record: None if the key is gone."""
        match place.folder:
            case "leader":
                self.leader = record
            case "shares":
                self.shares = record if record is not None else SharesRecord()
                self.usage.advance(now)
                self.usage.half_life_s = self.shares.half_life_s
            case "usage":
                self.usage.read(record if record is not None else UsageRecord(), now=now)
            case "retired":
                self.retired = with_record(self.retired, place.name, record)
            case "issued":
                self.issued = with_record(self.issued, place.name, record)
            case "revoked":
                self.revoked = with_record(self.revoked, place.name, record)
                self._shut_out_or_readmit(place.name, now=now)
            case "nodes":
                if self.is_revoked(place.name):
                    shut_out = (record, create_revision) if record is not None else None
                    self._shut_out = with_record(self._shut_out, place.name, shut_out)
                    record = None
                self._fold_node(place.name, record, create_revision=create_revision, now=now)
            case "probes":
                self.probes = with_record(self.probes, place.name, record)
            case "reach":
                self.reach = with_record(self.reach, place.name, record)
            case "failures":
                was_left_out = self._is_left_out(place.name)
                self.failures = with_inner_record(self.failures, place.name, place.numbers[0], record)
                if was_left_out and not self._is_left_out(place.name):
                    self.arrived_in[place.name] = self.last_revision_of(Keys.failure(place.name, place.numbers[0]))
                self.nodes_changed_at = now
                self.unrest.changed("", now=now)
            case "jobs":
                self._fold_job(place, record, create_revision=create_revision, now=now)

    def _shut_out_or_readmit(self, name: str, *, now: float) -> None:
        """Apply that a name, in small letters, was revoked or restored."""
        is_revoked = name in self.revoked
        for node in [node for node in (self.nodes if is_revoked else self._shut_out) if node.casefold() == name]:
            if is_revoked:
                self._shut_out[node] = (self.nodes[node], self.arrived_in.get(node, 0))
                self._fold_node(node, None, create_revision=0, now=now)
            else:
                record, create_revision = self._shut_out.pop(node)
                self._fold_node(node, record, create_revision=create_revision, now=now)

    def _set_aside(self, key: str, error: Exception, *, now: float) -> None:
        """Treat an unusable record as deleted, unless it decides about a job. In that case the last readable one stays.

        Training continues under that record, and the coordinator decides nothing about the job.
        """
        self.unreadable[key] = unreadable(error)
        try:
            place = place_of(key)
        except ValueError:
            return
        if place.folder != "jobs" or place.leaf not in DECISIVE:
            self._fold(place, None, create_revision=0, now=now)

    def _is_left_out(self, node: str) -> bool:
        """Return whether a node is in quarantine for all jobs."""
        limit = self.leader.quarantine_after if self.leader is not None else QUARANTINE_AFTER
        return bool(left_out({node: self.failures.get(node, {}).values()}, limit=limit))

    def _fold_node(self, name: str, record: NodeRecord | None, *, create_revision: int, now: float) -> None:
        before = self.nodes.get(name)
        self.nodes = with_record(self.nodes, name, record)
        if record is not None:
            self.absent_since.pop(name, None)
        elif before is not None:
            self.absent_since[name] = now
        after = self.nodes.get(name)
        if before is not None and (after is None or after.incarnation != before.incarnation):
            self.departures[name] = (*self.departures.get(name, ()), now)[-MAX_REMEMBERED:]
        if after is not None and (before is None or after.incarnation != before.incarnation):
            self.arrived_at[name] = now
        if after is not None and after.incarnation != self._incarnations.get(name):
            self._incarnations[name] = after.incarnation
            self.arrived_in[name] = create_revision
        elif after is not None and before is None:
            if name not in self._restored:  # an older etcd has lost the writes of all nodes
                self.arrived_in[name] = create_revision
        elif after is not None and before is not None and offers_more(before, after):
            self.arrived_in[name] = self.revision_of(Keys.node(name))
        if after is not None:
            self._restored.discard(name)
            note_storage(self.jobs.values(), before, after, now=now)
        if is_another_member(before, after):
            self.nodes_changed_at = now
            self.unrest.changed(name, now=now)

    def _fold_job(self, place: RecordPlace, record: Any, *, create_revision: int, now: float) -> None:
        name = place.name
        known = name in self.jobs
        # A deletion of a key that was never seen must not create the job.
        if not known and record is None:
            return
        job = copy(self.jobs[name]) if known else JobView(name=name, entered_at=now, stop_changed_at=now)
        job.fold(place, record, create_revision=create_revision, is_new=not known, now=now)
        if place.leaf in ("spec", "plan", "next"):
            # Only these keys change the job's devices or its user, by which use is counted.
            num_devices = len(job.devices) if job.submission is not None else 0
            self.usage.hold(name, job.user, num_devices, now=now)
        # Keys arrive in any order, so the job stays until the last of them is gone.
        is_over = record is None and job.submission is None and not self._num_keys[name]
        self.jobs = with_record(self.jobs, name, job if not is_over else None)
