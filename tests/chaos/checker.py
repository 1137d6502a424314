"""Checks the rules that every run must keep, over its whole history. Pure.

A batch belongs to the last generation whose plan began at or before it: earlier generations' work on it was rolled
back.
So the final weights are the work of those generations alone, and each piece of it must be there exactly once.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Final

from headway.daemon.cluster.lineage import Lineage
from headway.daemon.jobs.job import JobSpec
from headway.stages.spec import TrainSpec


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of all workers of a plan, by position."""

    stage_of: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]
    """Positions of the workers, by stage."""
    microbatches: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        layers: Sequence[tuple[str, ...]],
        groups: Sequence[tuple[int, ...]],
        *,
        num_microbatches: int,
        num_groups: int,
    ) -> "Shares":
        """Return the shares. layers, groups: by worker. Neighbours with equal layers are replicas; no groups: all of
        them.
        """
        stage_of: list[int] = []
        for worker, own in enumerate(layers):
            is_replica = worker > 0 and own == layers[worker - 1]
            stage_of.append(stage_of[-1] + (not is_replica) if stage_of else 0)
        num_stages = stage_of[-1] + 1 if stage_of else 0
        replicas = tuple(
            tuple(worker for worker, stage in enumerate(stage_of) if stage == index) for index in range(num_stages)
        )
        held = [(groups[worker] if worker < len(groups) else ()) or range(num_groups) for worker in range(len(layers))]
        microbatches = tuple(tuple(i for i in range(num_microbatches) if i % num_groups in own) for own in held)
        return cls(tuple(stage_of), replicas, microbatches)

    def siblings(self, worker: int) -> tuple[int, ...]:
        """Return the other replicas of a worker's stage."""
        return tuple(other for other in self.replicas[self.stage_of[worker]] if other != worker)

    def worker_of(self, stage: int, microbatch: int) -> int | None:
        """Return the worker that computes a microbatch on a stage; None: no worker does, or the stage does
        not exist.
        """
        workers = self.replicas[stage] if 0 <= stage < len(self.replicas) else ()
        return next((worker for worker in workers if microbatch in self.microbatches[worker]), None)

    def name(self, worker: int) -> str:
        """Return `stage 1`, or `stage 1 (replica 2 of 2)`."""
        if not 0 <= worker < len(self.stage_of):
            return f"worker {worker}"
        beside = self.replicas[self.stage_of[worker]]
        note = f" (replica {beside.index(worker) + 1} of {len(beside)})" if len(beside) > 1 else ""
        return f"stage {self.stage_of[worker]}{note}"


MOST_VERSIONS: Final = 2
MOST_SENTENCES: Final = 5
"""Maximum number of sentences per rule; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSeen:
    """A plan that was in force."""

    generation: int
    timeline: int
    boundary: int
    ancestry: tuple[tuple[int, int], ...] = ()
    source: str = "initial"
    source_timeline: int = 0
    stages: tuple[tuple[str, ...], ...] = ()
    """Layers by worker: neighbours with equal layers are replicas of one stage."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Reduction groups by worker; none: all."""

    def shares(self, train: TrainSpec) -> Shares:
        """Return each worker's share of a batch."""
        num_groups = train.reduction_groups
        return Shares.of(self.stages, self.groups, num_microbatches=train.microbatches, num_groups=num_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a worker: a line of its history."""

    generation: int
    worker: int
    """Position among the plan's workers."""
    op: str
    """`forward`, `backward` or `update`."""
    batch: int
    microbatch: int | None
    version: int
    versions_live: int
    started: float
    """Start in monotonic seconds."""
    process: str = ""
    """Process that ran it; empty: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A layer that a worker loaded when its generation began."""

    generation: int
    layer: str
    boundary: int
    source: str
    """`live`, `initial` or `path`."""
    source_timeline: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSeen:
    """An injected fault, in monotonic seconds."""

    text: str
    at: float
    until: float
    """End of the fault, if it has one: a paused process continues, a killed one stays dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The resources of a process, or of a node's store, at one moment."""

    at: float
    subject: str
    """Name of the subject, for instance `daemon node-1 (pid 7)`."""
    amounts: Mapping[str, int]
    """Amounts by kind: `fds`, `threads`, `rss_bytes`, `files`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of a good run."""

    recovery_s: float = 60.0
    """Maximum time from the end of a fault to the next update."""
    amounts: Mapping[str, int] = field(
        default_factory=lambda: {"fds": 512, "threads": 256, "rss_bytes": 4 << 30, "files": 2000}
    )
    growth: Mapping[str, int] = field(default_factory=lambda: {"fds": 64, "threads": 32, "rss_bytes": 256 << 20})
    """Maximum growth from the maximum of a subject's first half of samples to the minimum of its last quarter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The whole history of one job's run."""

    plans: Sequence[PlanSeen]
    operations: Sequence[Operation]
    loads: Sequence[Load] = ()
    faults: Sequence[FaultSeen] = ()
    samples: Sequence[Sample] = ()
    is_finished: bool = False
    """True if the job finished; otherwise only batches before the last plan's boundary are final."""
    end: int | None = None
    """Boundary at which it finished, if that is known; None: after all of its batches."""
    ended_at: float | None = None
    """Monotonic time at which the job ended; None: it still runs, or its end is unknown."""
    num_torn: int = 0
    """Number of last lines that are incomplete because their writer was killed."""


def check(history: History, spec: JobSpec, bounds: Bounds | None = None) -> tuple[str, ...]:
    """Return a sentence for every broken rule; empty: all rules hold."""
    bounds = bounds or Bounds()
    found: list[str] = []
    for rule in RULES:
        sentences = rule(history, spec.train, bounds)
        found += islice(sentences, MOST_SENTENCES)
        if more := sum(1 for _ in sentences):
            found.append(f"… and {more} more of this kind")
    return tuple(found)


def owners(plans: Iterable[PlanSeen], num_batches: int) -> list[PlanSeen | None]:
    """Return, for each batch, the plan whose work on it is part of the final weights."""
    latest_first = sorted(plans, key=lambda plan: -plan.generation)
    return [next((plan for plan in latest_first if plan.boundary <= batch), None) for batch in range(num_batches)]


# --- Rules: each yields a sentence for every breach -------------------------------------------------------------------


def _plans_are_known(history: History, train: TrainSpec, _bounds: Bounds) -> Iterator[str]:
    plans, shares = _by_generation(history), _shares(history, train)
    for (generation, worker), num in sorted(Counter((o.generation, o.worker) for o in history.operations).items()):
        if generation not in plans:
            yield f"generation {generation}: {num} operations of worker {worker}, but no such plan was ever in force"
        elif worker >= len(plans[generation].stages):
            yield f"generation {generation}: {num} operations of worker {worker}, which the plan does not have"
    for operation in history.operations:
        plan = plans.get(operation.generation)
        if plan is not None and operation.batch < plan.boundary:
            yield f"{_name(operation, shares)}: its plan began at boundary {plan.boundary}, after this batch"


def _rollbacks_stay_in_the_past(history: History, _train: TrainSpec, _bounds: Bounds) -> Iterator[str]:
    before: PlanSeen | None = None
    for plan in sorted(history.plans, key=lambda plan: plan.generation):
        if before is not None and plan.timeline != before.timeline:
            if plan.timeline <= before.timeline:
                yield f"generation {plan.generation}: went back to timeline {plan.timeline} from {before.timeline}"
            if plan.source == "nodes":
                past = Lineage(timeline=before.timeline, ancestry=before.ancestry)
                origin = (plan.source_timeline, plan.boundary)
                if not past.has(*origin):
                    yield (
                        f"generation {plan.generation}: loaded boundary {origin[1]} of timeline {origin[0]}, "
                        f"which is not in the past of timeline {before.timeline}"
                    )
                if not plan.ancestry or plan.ancestry[-1] != origin:
                    yield (
                        f"generation {plan.generation}: loaded boundary {origin[1]} of timeline {origin[0]}, "
                        f"but its ancestry ends with {plan.ancestry[-1:] or 'nothing'}"
                    )
        before = plan


def _boundaries_are_of_one_timeline(history: History, _train: TrainSpec, _bounds: Bounds) -> Iterator[str]:
    plans = _by_generation(history)
    for load in history.loads:
        plan = plans.get(load.generation)
        if plan is None or load.source == "initial":
            continue
        name = f"generation {load.generation}, {load.layer}"
        if load.boundary != plan.boundary:
            yield f"{name}: loaded at boundary {load.boundary}, its plan begins at {plan.boundary}"
        expected = 0 if plan.source == "initial" else plan.source_timeline
        if load.source == "path" and load.source_timeline != expected:
            yield f"{name}: loaded of timeline {load.source_timeline}, its plan's source is {plan.source_timeline}"
        if load.source == "live" and plan.source_timeline != plan.timeline:
            yield f"{name}: continued with live layers, though its plan rolled back to timeline {plan.source_timeline}"


def _versions_are_made_once(history: History, _train: TrainSpec, _bounds: Bounds) -> Iterator[str]:
    """On a timeline, one generation makes each version, once in each replica of the stage."""
    plans = _by_generation(history)
    made: defaultdict[tuple[int, str, int], Counter[tuple[int, int]]] = defaultdict(Counter)
    for operation in history.operations:
        plan = plans.get(operation.generation)
        if operation.op == "update" and plan is not None and operation.worker < len(plan.stages):
            for layer in plan.stages[operation.worker]:
                made[plan.timeline, layer, operation.batch + 1][operation.generation, operation.worker] += 1
    for (timeline, layer, version), makers in sorted(made.items()):
        times = {generation: 0 for generation, _ in sorted(makers)}
        for (generation, _), num in makers.items():
            times[generation] = max(times[generation], num)
        if (total := sum(times.values())) > 1:
            told = " and ".join(str(generation) for generation, num in times.items() for _ in range(num))
            yield f"{layer}: version {version} was made {total} times on timeline {timeline}, by {told}"


def _versions_are_late_by_the_delay(history: History, train: TrainSpec, _bounds: Bounds) -> Iterator[str]:
    """But held-out text after the last update is computed on what that has made."""
    shares = _shares(history, train)
    end = _num_final(history, train) if train.eval_every else -1
    for operation in history.operations:
        is_newest = operation.op == "update" or (operation.op == "forward" and operation.batch == end)
        wanted = operation.batch if is_newest else train.weight_version(operation.batch)
        if operation.version != wanted:
            yield f"{_name(operation, shares)}: read version {operation.version}, not {wanted} (delay {train.delay})"


def _both_ways_on_one_version(history: History, train: TrainSpec, _bounds: Bounds) -> Iterator[str]:
    """A forward and its backward use the same version on the same worker."""
    shares = _shares(history, train)
    forwards = {
        (o.generation, o.worker, o.batch, o.microbatch): o.version for o in history.operations if o.op == "forward"
    }
    for operation in history.operations:
        if operation.op != "backward":
            continue
        key = (operation.generation, operation.worker, operation.batch, operation.microbatch)
        if key not in forwards:
            yield f"{_name(operation, shares)}: there was no forward of it in this generation"
        elif forwards[key] != operation.version:
            yield f"{_name(operation, shares)}: on version {operation.version}, its forward on version {forwards[key]}"


def _everything_counts_once(history: History, train: TrainSpec, _bounds: Bounds) -> Iterator[str]:
    """Each microbatch counts once on each stage, by the replica that holds its group, and each update by each
    replica.

    A generation's last update may lack replicas. The boundary after it is whole once one of them has written it, and
    the others may end before they get there.
    """
    shares = _shares(history, train)
    done = Counter((o.generation, o.worker, o.op, o.batch, o.microbatch) for o in history.operations)
    first = min(history.plans, key=lambda plan: plan.generation, default=None)
    begins_at = first.boundary if first is not None and first.source == "checkpoint" else 0
    owned = owners(history.plans, _num_final(history, train))
    for batch, plan in enumerate(owned):
        if plan is None:
            if batch >= begins_at:
                yield f"batch {batch}: no plan ever computed it"
            continue
        share = shares[plan.generation]
        is_last = batch + 1 < len(owned) and owned[batch + 1] is not plan
        for worker in range(len(plan.stages)):
            wanted: list[tuple[str, int | None, int]] = [("update", None, 1)]
            wanted += [
                (op, i, int(i in share.microbatches[worker]))
                for op in ("forward", "backward")
                for i in range(train.microbatches)
            ]
            for op, microbatch, times in wanted:
                num = done[plan.generation, worker, op, batch, microbatch]
                if op == "update" and is_last and not num:
                    num = max(
                        done[plan.generation, other, op, batch, None] for other in (worker, *share.siblings(worker))
                    )
                if num != times:
                    what = f"{op} of batch {batch}" + (f", microbatch {microbatch}" if microbatch is not None else "")
                    no_business = "" if times else ", though another replica has its group"
                    yield (
                        f"{share.name(worker)}, {what}: counts {num} times in the final weights, which have it from "
                        f"generation {plan.generation}{no_business}"
                    )


def _nothing_crosses_generations(history: History, train: TrainSpec, _bounds: Bounds) -> Iterator[str]:
    """A stage's inputs come from its neighbour in the same generation; no process returns to an older generation."""
    shares = _shares(history, train)
    started = _started(history)
    for operation in _final_operations(history, train):
        share, microbatch = shares[operation.generation], operation.microbatch
        if microbatch is None or operation.worker >= len(share.stage_of):
            continue
        neighbour = share.worker_of(
            share.stage_of[operation.worker] + (-1 if operation.op == "forward" else 1), microbatch
        )
        if neighbour is None:
            continue
        key = (operation.generation, neighbour, operation.op, operation.batch, microbatch)
        if started.get(key, inf) > operation.started:
            yield (
                f"{_name(operation, shares)}: ran before {share.name(neighbour)} of its own generation could have sent "
                "its input"
            )
    newest: dict[str, int] = {}
    for operation in sorted(history.operations, key=lambda o: o.started):
        if operation.process and operation.generation < newest.setdefault(operation.process, operation.generation):
            yield (
                f"{_name(operation, shares)}: {operation.process} had begun generation {newest[operation.process]} by "
                "then"
            )
        elif operation.process:
            newest[operation.process] = operation.generation


def _updates_wait_for_all_replicas(history: History, train: TrainSpec, _bounds: Bounds) -> Iterator[str]:
    """An update adds the sums of all reduction groups, so it begins after the last backward of every other replica."""
    shares = _shares(history, train)
    started = _started(history)
    for operation in _final_operations(history, train):
        share = shares[operation.generation]
        if operation.op != "update" or operation.worker >= len(share.stage_of):
            continue
        for sibling in share.siblings(operation.worker):
            keys = (
                (operation.generation, sibling, "backward", operation.batch, i) for i in share.microbatches[sibling]
            )
            if any(started.get(key, inf) > operation.started for key in keys):
                yield f"{_name(operation, shares)}: ran before {share.name(sibling)} could have sent its sums"


def _progress_resumes(history: History, _train: TrainSpec, bounds: Bounds) -> Iterator[str]:
    """After every fault, an update or the job's end follows within the bound; a second fault restarts the time."""
    moments = sorted(o.started for o in history.operations if o.op == "update")
    if history.ended_at is not None:
        moments.append(history.ended_at)
    for fault in history.faults:
        next_at = next((moment for moment in moments if moment > fault.until), None)
        if next_at is None:
            yield f"{fault.text}: no operation followed it"
            continue
        last = max(other.until for other in history.faults if other.at <= next_at)
        if last == fault.until and next_at - last > bounds.recovery_s:
            yield f"{fault.text}: {next_at - last:.1f} s passed until the next update, more than {bounds.recovery_s:g}"


def _versions_are_two_at_most(history: History, train: TrainSpec, _bounds: Bounds) -> Iterator[str]:
    shares = _shares(history, train)
    for operation in history.operations:
        if not 1 <= operation.versions_live <= MOST_VERSIONS:
            yield f"{_name(operation, shares)}: {operation.versions_live} weight versions were alive, not 1 or 2"


def _amounts_are_bounded(history: History, _train: TrainSpec, bounds: Bounds) -> Iterator[str]:
    series: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for sample in sorted(history.samples, key=lambda sample: sample.at):
        for what, amount in sample.amounts.items():
            series[sample.subject, what].append(amount)
    for (subject, what), amounts in sorted(series.items()):
        if max(amounts) > bounds.amounts.get(what, max(amounts)):
            yield f"{subject}: {max(amounts)} {what}, more than {bounds.amounts[what]}"
        quarter = len(amounts) // 4
        if quarter and what in bounds.growth:
            grown = min(amounts[-quarter:]) - max(amounts[: len(amounts) // 2])
            if grown > bounds.growth[what]:
                yield f"{subject}: {what} grew by {grown} and stayed there, more than {bounds.growth[what]}"


RULES: Final[tuple[Callable[[History, TrainSpec, Bounds], Iterator[str]], ...]] = (
    _plans_are_known,
    _rollbacks_stay_in_the_past,
    _boundaries_are_of_one_timeline,
    _versions_are_made_once,
    _versions_are_late_by_the_delay,
    _both_ways_on_one_version,
    _everything_counts_once,
    _nothing_crosses_generations,
    _updates_wait_for_all_replicas,
    _progress_resumes,
    _versions_are_two_at_most,
    _amounts_are_bounded,
)


def _by_generation(history: History) -> dict[int, PlanSeen]:
    return {plan.generation: plan for plan in history.plans}


def _shares(history: History, train: TrainSpec) -> dict[int, Shares]:
    """Return the shares by generation."""
    return {plan.generation: plan.shares(train) for plan in history.plans}


def _started(history: History) -> dict[tuple[int, int, str, int, int | None], float]:
    """Return when an operation of (generation, worker, op, batch, microbatch) began."""
    return {(o.generation, o.worker, o.op, o.batch, o.microbatch): o.started for o in history.operations}


def _final_operations(history: History, train: TrainSpec) -> Iterator[Operation]:
    """Yield the operations whose result is part of the final weights."""
    final = owners(history.plans, _num_final(history, train))
    for operation in history.operations:
        plan = final[operation.batch] if operation.batch < len(final) else None
        if plan is not None and plan.generation == operation.generation:
            yield operation


def _num_final(history: History, train: TrainSpec) -> int:
    """Return how many batches no failure can roll back."""
    if history.is_finished:
        return train.batches if history.end is None else history.end
    return max(history.plans, key=lambda plan: plan.generation).boundary if history.plans else 0


def _name(operation: Operation, shares: Mapping[int, Shares]) -> str:
    share = shares.get(operation.generation)
    who = share.name(operation.worker) if share is not None else f"worker {operation.worker}"
    microbatch = f", microbatch {operation.microbatch}" if operation.microbatch is not None else ""
    return f"generation {operation.generation}, {who}, {operation.op} of batch {operation.batch}{microbatch}"
