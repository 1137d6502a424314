"""Folds etcd's content into one value: the nodes, the leader, and every job with its records.

Pure. Keys may come in any order, twice, or late: a key's older revision never replaces a newer one. Unknown keys and
unreadable values are set aside in `unreadable` with the reason; they change nothing else.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Final

from headway.daemon.costs.paths import BlockedWays, blocked_ways
from headway.daemon.records.certificate_records import IssuedRecord, RevokedRecord
from headway.daemon.records.cluster_records import (
    LeaderRecord,
    NodeFailureRecord,
    RetiredRecord,
    SharesRecord,
    UsageRecord,
)
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import (
    ProbeRecord,
    ReachRecord,
)
from headway.daemon.records.records import (
    NodeRecord,
    seen_key,
)
from headway.daemon.view.derived import Derived
from headway.daemon.view.job_view import MAX_REMEMBERED, JobView, note_storage, set_inner_record, set_record
from headway.daemon.view.quarantine import QUARANTINE_AFTER, left_out
from headway.daemon.view.record_places import DECISIVE, RecordPlace, Unreadable, place_of, read_record, unreadable
from headway.daemon.view.usage import UsageMeter

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
_BESIDE_DEVICES = attrgetter(*({each.name for each in fields(NodeRecord)} - {"devices", "generations"}))
_WHEREABOUTS = attrgetter("incarnation", "protocol", "host", "site", "is_draining")


def is_another_member(before: NodeRecord | None, after: NodeRecord | None) -> bool:
    """Return whether what matters for plans has changed: any other change is only a heartbeat."""
    if before is None or after is None:
        return before is not after
    if _MEMBERSHIP(before) != _MEMBERSHIP(after):
        return True
    return _has_other_devices(before, after)


def _has_other_devices(before: NodeRecord, after: NodeRecord) -> bool:
    """Return whether more than measured speeds of devices has changed."""
    if before.devices == after.devices:
        return False
    return [each.unmeasured for each in before.devices] != [each.unmeasured for each in after.devices]


def says_more(before: NodeRecord | None, after: NodeRecord | None) -> bool:
    """Return whether more has changed than what a node has seen: of that, all tell more with every plan of any job."""
    if before is None or after is None:
        return before is not after
    return before.devices != after.devices or _BESIDE_DEVICES(before) != _BESIDE_DEVICES(after)


def says_more_than_speeds(before: NodeRecord | None, after: NodeRecord | None) -> bool:
    """Return whether more has changed than that, and than how fast its devices are."""
    if before is None or after is None:
        return before is not after
    return _BESIDE_DEVICES(before) != _BESIDE_DEVICES(after) or _has_other_devices(before, after)


def tells(reach: ReachRecord | None) -> tuple[Any, ...]:
    """Return the blocked ways of which a node tells, without their dates: decisions rest on nothing else."""
    if reach is None or not reach.facts:
        return ()
    return reach.incarnation, *(replace(fact, measured_at=0.0) for fact in reach.facts)


def whereabouts(node: NodeRecord | None) -> Any:
    """Return the fields that decide where copies of a job's state are, and whether they count."""
    return _WHEREABOUTS(node) if node is not None else None


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


Seen = tuple[str, bool]
"""A key of `NodeRecord.generations`, and whether it is the name of a job of which the node counts no submission."""
NONE: Final = Counter[int]()


class GenerationsSeen:
    """What `NodeRecord.generation_seen` says, over all nodes. A change costs as much as one node has to say."""

    def __init__(self, nodes: Iterable[NodeRecord] = ()) -> None:
        self._told: defaultdict[Seen, Counter[int]] = defaultdict(Counter)
        """How many nodes say each generation."""
        for node in nodes:
            self.replace(None, node)

    def replace(self, before: NodeRecord | None, after: NodeRecord | None) -> bool:
        """Take over a node's new record; None: there is none. Return whether an answer may be another one now."""
        if before is not None and after is not None and before.generations == after.generations:
            return False
        gone, come = frozenset(_told(before)), frozenset(_told(after))
        answers = {key: self._highest(key) for key, _ in gone ^ come}
        for key, generation in come - gone:
            self._told[key][generation] += 1
        for key, generation in gone - come:
            self._told[key] -= Counter([generation])
            if not self._told[key]:
                del self._told[key]
        return any(self._highest(key) != answer for key, answer in answers.items())

    def clear(self) -> None:
        """Forget all nodes."""
        self._told.clear()

    def of_name(self, job: str) -> int:
        """Return the highest generation of all jobs of a name; 0: none."""
        return max(self._highest((job, False)), self._highest((job, True)))

    def of_submission(self, job: str, uid: str) -> int:
        """Return the highest generation of one submission; 0: none."""
        return max(self._highest((seen_key(job, uid), False)), self._highest((job, True)))

    def _highest(self, key: Seen) -> int:
        return max(self._told.get(key, NONE), default=0)


def _told(node: NodeRecord | None) -> Iterator[tuple[Seen, int]]:
    """Yield what one node says."""
    generations = node.generations if node is not None else {}
    submitted = {key.partition("/")[0] for key in generations if "/" in key}
    for key, generation in generations.items():
        yield (key, "/" not in key and key not in submitted), generation


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
    num_changes: int = field(default=0, compare=False)
    """Number of changes of anything but one job's own records, measured ways and speeds of devices; which devices a job
    has counts among the others.
    """
    num_node_changes: int = field(default=0, compare=False)
    """Number of changes of which nodes there are, where they are, and whom they reach."""
    num_record_changes: int = field(default=0, compare=False)
    """Number of changes of what nodes say of themselves, beside the generations that they have seen."""
    num_probe_changes: int = field(default=0, compare=False)
    """Number of changes of measured ways."""
    num_plan_changes: int = field(default=0, compare=False)
    """Number of changes of jobs' specs and plans."""
    generations: GenerationsSeen = field(default_factory=GenerationsSeen, compare=False, repr=False)
    """What the present nodes have seen."""
    derived: Derived = field(default_factory=Derived, compare=False, repr=False)
    """What follows from records of nodes alone, whichever job asks for it."""

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
        if self.unreadable.pop(key, None) is not None:
            self.num_changes += 1
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
        self.num_changes += 1
        if not is_in_sight:
            self.steady_since = None
        elif self.steady_since is None:
            self.steady_since = now

    def start_anew(self, *, now: float) -> None:
        """Forget every key, because etcd's history went back. The known nodes count as absent from now on."""
        known = {*self.nodes, *self.absent_since}
        folded = (
            self.nodes,
            self.failures,
            self.probes,
            self.reach,
            self.jobs,
            self.retired,
            self.issued,
            self.revoked,
        )
        notes = (self._shut_out, self._num_keys, self.revisions, self.unreadable, self._deleted)
        for records in (*folded, *notes):
            records.clear()
        self.leader = None
        self.generations.clear()
        self.derived = Derived()  # the numbers of changes of jobs begin anew
        self.absent_since = dict.fromkeys(known, now)
        self.arrived_in = dict.fromkeys(known, 0)
        self._restored = known
        self.usage.advance(now)
        self.usage.held.clear()
        self.nodes_changed_at = now
        self.unrest.changed("", now=now)
        self.started_at = now
        self.epoch += 1
        self.num_changes += 1
        self.num_node_changes += 1
        self.num_record_changes += 1
        self.num_probe_changes += 1
        self.num_plan_changes += 1

    @property
    def acted_on(self) -> tuple[int, ...]:
        """Return numbers that differ after every change on which a daemon may act that does not lead.

        What is measured is for the leader: ways between nodes, the rate of a job, how its seconds were spent.
        """
        num_in_jobs = sum(job.num_changes for job in self.jobs.values())
        return self.num_changes, self.num_node_changes, self.num_record_changes, num_in_jobs

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
                return f"its {leaf} cannot be read: {found.reason}"
        return ""

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
            self.num_changes += 1
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
        rests_on = (self.num_record_changes, self.num_node_changes)
        return self.derived.lasting("blocked", rests_on, lambda: blocked_ways(self.reach, self.nodes))

    def _fold(self, place: RecordPlace, record: Any, *, create_revision: int, now: float) -> None:
        """Fold one record in. record: None if the key is gone."""
        if place.folder not in ("jobs", "nodes", "probes", "reach"):
            self.num_changes += 1
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
                set_record(self.retired, place.name, record)
            case "issued":
                set_record(self.issued, place.name, record)
            case "revoked":
                set_record(self.revoked, place.name, record)
                self._shut_out_or_readmit(place.name, now=now)
            case "nodes":
                if self.is_revoked(place.name):
                    shut_out = (record, create_revision) if record is not None else None
                    set_record(self._shut_out, place.name, shut_out)
                    record = None
                self._fold_node(place.name, record, create_revision=create_revision, now=now)
            case "probes":
                self.num_probe_changes += 1
                set_record(self.probes, place.name, record)
            case "reach":
                if tells(self.reach.get(place.name)) != tells(record):
                    self.num_changes += 1
                    self.num_node_changes += 1
                set_record(self.reach, place.name, record)
            case "failures":
                was_left_out = self._is_left_out(place.name)
                set_inner_record(self.failures, place.name, place.numbers[0], record)
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
        self.num_changes += 1
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
        if record is not None:
            self.nodes[name] = record
            self.absent_since.pop(name, None)
        elif before is not None:
            del self.nodes[name]
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
        has_seen_more = self.generations.replace(before, after)
        has_said_more = says_more(before, after)
        # Numbers are compared by identity: adding nothing would make another number.
        if has_said_more:
            self.num_record_changes += 1
        if has_seen_more or (has_said_more and says_more_than_speeds(before, after)):
            self.num_changes += 1
        if whereabouts(before) != whereabouts(after):
            self.num_node_changes += 1

    def _fold_job(self, place: RecordPlace, record: Any, *, create_revision: int, now: float) -> None:
        name = place.name
        known = name in self.jobs
        # A deletion of a key that was never seen must not create the job.
        if not known and record is None:
            return
        job = self.jobs.get(name) or JobView(name=name, entered_at=now, stop_changed_at=now)
        job.fold(place, record, create_revision=create_revision, is_new=not known, now=now)
        if place.leaf in ("spec", "plan", "next"):
            # Only these keys change the job's devices or its user, by which use is counted.
            self.num_changes += 1
            self.num_plan_changes += 1
            num_devices = len(job.devices) if job.submission is not None else 0
            self.usage.hold(name, job.user, num_devices, now=now)
        if not known:
            self.jobs[name] = job
        # Keys arrive in any order, so the job stays until the last of them is gone.
        if record is None and job.submission is None and not self._num_keys[name]:
            del self.jobs[name]
            self.num_changes += 1
            self.derived = Derived()  # a name that never comes again would be remembered for ever
