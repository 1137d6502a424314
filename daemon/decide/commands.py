"""The commands of the coordinator: plain values, carried out by the leader's shell. Pure.

The compared keys, and the keys written with every move, are the same for all actions. etcd's limits split a decision:
the decision stays one step, its notes follow.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from headway.daemon.cluster.cluster_records import PlacementRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import DeviceShortage, LinkCuts
from headway.daemon.cluster.records import CheckpointRecord, EventRecord, FailureCount, Phase, PhaseRecord, PlanRecord
from headway.daemon.decide.boundaries import Origin
from headway.daemon.decide.failures import LostWorker
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.plans import PlanRequest
from headway.daemon.decide.quarantine import QUARANTINE_S
from headway.daemon.decide.situation import JobSituation
from headway.daemon.plan.cluster_plan import ClusterPlan, sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """Apply all puts and deletes at once if every compared key still has the revision that was read; otherwise nothing.

    The shell adds the comparison with the leader's own key. A failed transaction is dropped: the changed keys are about
    to reach the view, and the coordinator decides again.

    """

    job: str
    reason: str
    """The reason, for the log."""
    compare: dict[str, int] = field(default_factory=dict)
    """Compared keys, each with the revision of its last change; 0: the key must be absent."""
    puts: dict[str, bytes] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()
    leased: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """Keys under a lease, each with its value and lifetime in seconds. The shell grants one lease per lifetime.

    These keys are notes: if they do not fit into one transaction, later transactions write the rest (`parts`).

    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPart:
    """Copy a file to a journal part. Both URLs may be relative, as the job's `checkpoint_dir`."""

    source: str
    target: str
    is_inherited: bool = False
    """True if it is a part of the job from whose checkpoint this job started. The job goes on without such a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteManifest:
    """Write a checkpoint's manifest to its folder; once the manifest is durable, run `then`.

    `url` may be relative, as the job's `checkpoint_dir`: resolve it as the daemons do.
    """

    job: str
    url: str
    manifest: bytes
    then: Transaction
    parts: tuple[CopyPart, ...] = ()
    """Journal parts that the manifest names and that do not exist yet: they are copied first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteCheckpoints:
    """Delete the folders of old checkpoints, the manifest of each first; then run `then`.

    `urls` may be relative, as the job's `checkpoint_dir`.
    """

    job: str
    urls: tuple[str, ...]
    then: Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """Set a damaged checkpoint aside and read older manifests, newest first; then run `then` with the first sound one.

    `url` and `older` may be relative, as the job's `checkpoint_dir`.
    """

    job: str
    url: str
    reason: str
    older: tuple[str, ...]
    then: Callable[[CheckpointRecord | None], Transaction] = field(compare=False)
    """None: no older one can be read."""


Command = Transaction | WriteManifest | DeleteCheckpoints | SetAside


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenJob:
    """A job about which the coordinator could not decide."""

    job: str
    reason: str
    """The error in one line."""
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The commands to carry out now, and the time of the next decision even if nothing happens."""

    commands: tuple[Command, ...] = ()
    wake_at: float | None = None
    """The next deadline or settle time, by the clock of `now`; None: nothing is pending."""
    missing: tuple[PlanRequest, ...] = ()
    """Plans that decisions need and that do not exist yet, the most urgent first."""
    stale: tuple[PlanRequest, ...] = ()
    """Plans that were used although measurements have changed since."""
    broken: tuple[BrokenJob, ...] = ()
    """Jobs about which no decision was possible because of an unexpected error."""


READ_LEAVES: Final = ("spec", "desired", "phase", "plan", "next", "stop", "checkpoint")
"""Keys of a job that every decision about it compares, also absent ones: if another process creates one, it fails."""
MAX_SWEPT: Final = 32
"""Maximum number of generations whose worker records one transaction deletes: etcd takes 128 operations in one."""
MAX_EVENTS: Final = 500
"""Maximum number of a job's events in etcd: each new event deletes an older one."""
MAX_OUTLINES: Final = 128
"""Newest events of a job that keep the layers of a plan of many stages."""
FEW_STAGES: Final = 16
"""Stages that every event may keep."""
MAX_TRIMMED: Final = 32
"""Maximum number of events that one transaction deletes."""


def _past(job: JobView, puts: Mapping[str, bytes], deletes: tuple[str, ...], *, is_saved: bool) -> PhaseRecord:
    """Return a phase record with what it keeps of the past. is_saved: a whole checkpoint has the rest itself."""
    before, plan = job.phase, job.plan
    is_over = "plan" in deletes or "plan" in puts
    past = PhaseRecord(spent_s=job.told_s if is_over else before.spent_s)
    if is_saved or "plan" in puts:  # or a new plan has it
        return past
    # The plan is about to disappear, and the next start must know what its weights have seen.
    told = plan if "plan" in deletes and plan is not None else before
    lineage, classes, was_rounded = told.lineage, told.arithmetic_classes, told.was_rounded
    return replace(past, lineage=lineage, arithmetic_classes=classes, was_rounded=was_rounded)


def move(
    situation: JobSituation,
    to: Phase,
    reason: str,
    *,
    puts: dict[str, bytes] | None = None,
    plan: PlanRecord | None = None,
    deletes: tuple[str, ...] = (),
    error: str = "",
    generation: int = 0,
    failures: FailureCount | None = None,
    is_saved: bool = False,
    event: str = "",
    is_event: bool = True,
    outlook: str = "",
    planning_since: float = 0.0,
    leased: dict[str, tuple[bytes, int]] | None = None,
    shortages: tuple[DeviceShortage, ...] | None = None,
    cuts: tuple[LinkCuts, ...] = (),
    unsaved: int | None = None,
) -> Transaction:
    """Return the phase record, the event, and the job's other keys, on condition that no key that was read has changed.

    plan: comes into force. is_saved: the checkpoint then has everything. shortages: instead of all that are known.
    unsaved: instead of what is known; None: that.
    """
    job, before = situation.job, situation.job.phase
    puts = (puts or {}) | ({} if plan is None else {"plan": encode(plan)})
    number = generation or before.generation
    record = replace(
        _past(job, puts, deletes, is_saved=is_saved),
        phase=to,
        reason=reason,
        error=error,
        generation=number,
        request=job.desired.request,
        num_events=before.num_events + is_event,
        failures=before.failures if failures is None else failures,
        furthest=situation.furthest if "plan" in deletes else before.furthest,
        outlook=outlook,
        planning_since=planning_since,
        since=situation.written_at if to is not before.phase else before.since,
        shortages=situation.shortages if shortages is None else shortages,
        unsaved=-1 if is_saved else before.unsaved if unsaved is None else unsaved,
    )
    written = {Keys.of(job.name, leaf): value for leaf, value in (puts | {"phase": encode(record)}).items()}
    if is_event:
        written |= _events(situation, to, event or reason, number, plan, cuts)
    return Transaction(
        job=job.name,
        reason=f"{before.phase} → {to}: {event or reason}",
        compare={key: situation.view.revision_of(key) for key in (Keys.of(job.name, leaf) for leaf in READ_LEAVES)},
        puts=written,
        deletes=(
            *(key for key in (Keys.of(job.name, leaf) for leaf in deletes) if situation.view.revision_of(key)),
            *_old_workers(situation, puts),
            *(_old_events(job) if is_event else ()),
        ),
        leased=leased or {},
    )


def _events(
    situation: JobSituation, to: Phase, text: str, generation: int, plan: PlanRecord | None, cuts: tuple[LinkCuts, ...]
) -> dict[str, bytes]:
    """Return the next event; of a plan with many stages, one long past, without its stages."""
    name, next_number = situation.job.name, situation.job.phase.num_events
    record = EventRecord(
        at=situation.written_at,
        text=sentence(text),
        generation=situation.job.plan.generation if cuts and situation.job.plan else generation,
        is_failure=to is Phase.RECOVERING,
        plan=plan.outline(situation.spec.layers) if plan is not None else None,
        goodput_s=situation.job.told_s,
        batch=situation.job.newest_batch,
        cuts=cuts,
    )
    found = {Keys.event(name, next_number): encode(record)}
    past = situation.job.events.get(next_number - MAX_OUTLINES)
    if past is not None and past.plan is not None and len(past.plan.stages) > FEW_STAGES:
        thin = replace(past, plan=replace(past.plan, stages=()))
        found[Keys.event(name, next_number - MAX_OUTLINES)] = encode(thin)
    return found


def _old_workers(situation: JobSituation, puts: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the records of workers about earlier plans, when another comes into force: they are no longer needed."""
    job = situation.job
    if "plan" not in puts or job.next is None:
        return ()
    oldest = job.plan.generation if job.plan is not None else job.next.generation
    old = sorted({generation for generation, _ in job.workers if generation < oldest})
    return tuple(Keys.workers(job.name, generation) for generation in old[:MAX_SWEPT])


def _old_events(job: JobView) -> tuple[str, ...]:
    """Return the events that make room for one more."""
    oldest = job.phase.num_events + 1 - MAX_EVENTS
    return tuple(Keys.event(job.name, number) for number in sorted(job.events) if number < oldest)[:MAX_TRIMMED]


def offer(
    situation: JobSituation,
    to: Phase,
    plan: ClusterPlan,
    *,
    reason: str,
    origin: Origin,
    promised: float = 0.0,
    event: str = "",
    is_event: bool = True,
    error: str = "",
    deletes: tuple[str, ...] = (),
    failures: FailureCount | None = None,
    leased: dict[str, tuple[bytes, int]] | None = None,
) -> Transaction:
    """Write `next`. It gives devices away, and so compares and writes `placement` too."""
    record = PlanRecord(
        generation=situation.generation,
        timeline=origin.lineage.timeline,
        ancestry=origin.lineage.ancestry,
        boundary=origin.boundary,
        source=origin.source,
        source_timeline=origin.source_timeline,
        furthest=situation.furthest,
        workers=plan.workers,
        predicted_batch_seconds=plan.predicted_batch_seconds,
        promised=promised,
        reason=reason,
        is_exact=plan.is_exact,
        exact_reason=plan.exact_reason,
        arithmetic_classes=plan.arithmetic_classes,
        codecs=plan.codecs,
        was_rounded=plan.was_rounded,
    )
    moved = move(
        situation,
        to,
        reason,
        puts={"next": encode(record)},
        deletes=deletes,
        generation=record.generation,
        error=error,
        event=event,
        is_event=is_event,
        failures=failures,
        leased=leased,
    )
    # Two decisions from one stale view would both compare this key, and only one of them can succeed.
    placement = PlacementRecord(job=situation.job.name, generation=record.generation)
    return Transaction(
        job=moved.job,
        reason=moved.reason,
        compare=moved.compare | {Keys.PLACEMENT: situation.view.revision_of(Keys.PLACEMENT)},
        puts=moved.puts | {Keys.PLACEMENT: encode(placement)},
        deletes=moved.deletes,
        leased=moved.leased,
    )


def held_against_nodes(situation: JobSituation, losses: tuple[LostWorker, ...]) -> dict[str, tuple[bytes, int]]:
    """Return one failure for every node that was lost, or whose worker died or did not answer; not for a broken link.

    A node that two jobs have lost failed once.
    """
    leased = {}
    for name, charge in situation.lost.charges(losses).items():
        number = max(situation.view.failures.get(name, {}), default=-1) + 1
        leased[Keys.failure(name, number)] = encode(charge), QUARANTINE_S
    return leased


MAX_OPERATIONS: Final = 128
"""Maximum number of changes, and of comparisons, of one transaction: etcd's `--max-txn-ops`."""


def parts(decided: Transaction) -> tuple[Transaction, ...]:
    """Return the decision, then its keys under leases. The shell compares its own key in each part."""
    num_changes = len(decided.puts) + len(decided.deletes)
    assert num_changes <= MAX_OPERATIONS, "a decision changes a limited number of keys: see MAX_SWEPT and MAX_TRIMMED"
    return replace(decided, leased={}), *_notes(decided)


def _notes(decided: Transaction) -> Iterator[Transaction]:
    leased = iter(decided.leased.items())
    while batch := dict(islice(leased, MAX_OPERATIONS)):
        yield Transaction(job=decided.job, reason=decided.reason, leased=batch)
