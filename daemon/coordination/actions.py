"""The actions of the coordinator's table: each makes the transaction that takes a job to its next phase. Pure.

Every transaction compares all that was read of the job, and writes the phase, a sentence among the events, and the
plan's records together. The first line of an action's docstring is its text in docs/coordinator.md.
"""

from typing import Any, Final

from headway.daemon.coordination.case import JOURNAL, Case
from headway.daemon.coordination.commands import Command, Transaction, WriteManifest
from headway.daemon.coordination.conditions import waits_for
from headway.daemon.planning.planner import ClusterPlan, PlanRefused
from headway.daemon.records import (
    CheckpointFile,
    CheckpointRecord,
    Desired,
    EventRecord,
    Keys,
    Phase,
    PhaseRecord,
    PlacementRecord,
    PlanRecord,
    Save,
    StateRecord,
    StopRecord,
    WorkerState,
    encode,
    to_builtins,
)
from headway.daemon.storage.checkpoint_names import boundary_url

MANIFEST_FORMAT: Final = 1
READ_LEAVES: Final = ("spec", "desired", "phase", "plan", "next", "stop", "checkpoint")
"""What a decision about a job rests on; each is compared."""


def retire(case: Case, to: Phase) -> Command:
    """delete what is there of `plan`, `next`, `stop`"""
    cancelled = to is Phase.CANCELLED
    lost = case.job.phase.rolls_back or (cancelled and case.job.plan is not None)
    return _move(case, to, "cancelled" if cancelled else "paused", deletes=("plan", "next", "stop"), rolls_back=lost)


def requeue(case: Case, to: Phase) -> Command:
    """nothing more"""
    start = f"batch {case.job.checkpoint.boundary}" if case.job.checkpoint is not None else "the beginning"
    return _move(case, to, f"wanted again: will go on from {start}")


def explain_wait(case: Case, to: Phase) -> Command:
    """the reason alone, no event"""
    return _move(case, to, waits_for(case), is_event=False)


def offer_first_plan(case: Case, to: Phase) -> Command:
    """`next`"""
    plan, checkpoint, phase = case.best_plan, case.job.checkpoint, case.job.phase
    assert isinstance(plan, ClusterPlan)
    timeline, ancestry = case.generation, tuple[tuple[int, int], ...]()
    if checkpoint is None:
        origin = dict[str, Any](source="initial", boundary=0)
    else:
        if phase.rolls_back:
            ancestry = (*checkpoint.ancestry, (checkpoint.timeline, checkpoint.boundary))
        else:
            timeline, ancestry = checkpoint.timeline, checkpoint.ancestry
        origin = dict[str, Any](source="checkpoint", boundary=checkpoint.boundary)
    reason = f"{_stages(len(plan.stages))} on {_and([stage.node for stage in plan.stages])}"
    if plan.predicted_batch_seconds > 0:
        reason += f", predicted {plan.predicted_batch_seconds:.2g} s a batch"
    return _offer(case, to, plan, reason=reason, timeline=timeline, ancestry=ancestry, **origin)


def offer_change(case: Case, to: Phase) -> Command:
    """`next`"""
    plan, before = case.best_plan, case.job.plan
    assert isinstance(plan, ClusterPlan)
    assert before is not None
    return _offer(
        case,
        to,
        plan,
        reason=_why_changed(case, before, plan),
        timeline=before.timeline,
        ancestry=before.ancestry,
        source="nodes",
        boundary=0,
    )


def enforce_first(case: Case, to: Phase) -> Command:
    """`plan` ← `next`"""
    plan = case.job.next
    assert plan is not None
    text = f"Trains from batch {plan.boundary} on: {plan.reason}"
    return _move(case, to, text, puts={"plan": encode(plan)}, deletes=("next", "stop"), rolls_back=False)


def enforce_change(case: Case, to: Phase) -> Command:
    """`plan` ← `next` at b; delete `next`, `stop`"""
    before, successor, stop = case.job.plan, case.job.next, case.job.stop
    assert before is not None
    assert successor is not None
    assert stop is not None
    assert stop.boundary is not None
    plan = _at(successor, stop.boundary)
    num_moved = len(case.moving()) - 1
    text = f"{successor.reason}; from batch {stop.boundary} on, {num_moved} layer{'s' * (num_moved != 1)} moved"
    return _move(case, to, text, puts={"plan": encode(plan)}, deletes=("next", "stop"))


def drop_next(case: Case, to: Phase) -> Command:
    """delete `next`"""
    return _move(case, to, _why_dropped(case), deletes=("next",))


def stop_for_moves(case: Case, to: Phase) -> Command:
    """`stop` {moves}"""
    assert case.job.plan is not None
    stop = StopRecord(generation=case.job.plan.generation, save=Save.MOVES)
    text = "All workers of the new plan are ready: the old plan's stop at a boundary"
    return _move(case, to, text, puts={"stop": encode(stop)}, is_event=False)


def stop_for_checkpoint(case: Case, to: Phase) -> Command:
    """`stop` {checkpoint}, delete `next`"""
    plan, before = case.job.plan, case.job.stop
    assert plan is not None
    boundary = before.boundary if before is not None else None
    end = case.spec.train.batches
    if boundary is None and case.stopped_at(plan, end):
        boundary = end
    stop = StopRecord(generation=plan.generation, save=Save.CHECKPOINT, boundary=boundary)
    return _move(case, to, _why_stopped(case, boundary), puts={"stop": encode(stop)}, deletes=("next",))


def write_checkpoint(case: Case, to: Phase) -> Command:
    """manifest, then `checkpoint`; delete `plan`, `stop`"""
    plan, stop = case.job.plan, case.job.stop
    assert plan is not None
    assert stop is not None
    assert stop.boundary is not None
    files = {}
    for layer in (*case.spec.layers, JOURNAL):
        record = _durable(case, plan, stop.boundary, layer)
        files[layer] = CheckpointFile(size_bytes=record.size_bytes, sha256=record.sha256)
    directory, name = case.spec.fault.checkpoint_dir, case.job.name
    checkpoint = CheckpointRecord(
        timeline=plan.timeline,
        boundary=stop.boundary,
        url=boundary_url(directory, name, timeline=plan.timeline, boundary=stop.boundary),
        files=files,
        ancestry=plan.ancestry,
        arithmetic_classes=plan.arithmetic_classes,
    )
    manifest = {
        "format": MANIFEST_FORMAT,
        "job": name,
        "generation": plan.generation,
        "spec": to_builtins(case.spec),
        **to_builtins(checkpoint),
    }
    texts = {
        Phase.FINISHED: f"Finished: {stop.boundary} batches, the last checkpoint is written",
        Phase.PAUSED: f"Paused before batch {stop.boundary}: a checkpoint is written",
        Phase.QUEUED: f"Saved before batch {stop.boundary}: goes on when nodes allow",
    }
    then = _move(
        case,
        to,
        texts[to],
        puts={"checkpoint": encode(checkpoint)},
        deletes=("plan", "next", "stop"),
        rolls_back=False,
    )
    return WriteManifest(job=name, url=checkpoint.url, manifest=encode(manifest), then=then)


def fail(case: Case, to: Phase) -> Command:
    """delete what is there of `plan`, `next`, `stop`"""
    reason, error = _why_failed(case)
    lost = case.job.phase.rolls_back or case.job.plan is not None
    return _move(
        case, to, reason, error=error, deletes=("plan", "next", "stop"), rolls_back=lost, event=f"Failed: {reason}"
    )


# --- Transactions ---------------------------------------------------------------------------------------------------


def _move(
    case: Case,
    to: Phase,
    reason: str,
    *,
    puts: dict[str, bytes] | None = None,
    deletes: tuple[str, ...] = (),
    error: str = "",
    generation: int = 0,
    rolls_back: bool | None = None,
    event: str = "",
    is_event: bool = True,
) -> Transaction:
    """The phase record, the event, and the job's other keys, on the condition that nothing that was read has moved."""
    job, before = case.job, case.job.phase
    record = PhaseRecord(
        phase=to,
        reason=reason,
        error=error,
        generation=generation or before.generation,
        request=job.desired.request,
        num_events=before.num_events + is_event,
        rolls_back=before.rolls_back if rolls_back is None else rolls_back,
        since=case.written_at if to is not before.phase else before.since,
    )
    written = {Keys.of(job.name, leaf): value for leaf, value in (puts or {}).items()}
    written[Keys.of(job.name, "phase")] = encode(record)
    if is_event:
        number = record.generation
        text = EventRecord(at=case.written_at, text=event or reason[:1].upper() + reason[1:], generation=number)
        written[Keys.event(job.name, before.num_events)] = encode(text)
    there = (Keys.of(job.name, leaf) for leaf in deletes)
    return Transaction(
        job=job.name,
        reason=f"{before.phase} → {to}: {reason}",
        compare={key: case.view.revision_of(key) for key in (Keys.of(job.name, leaf) for leaf in READ_LEAVES)},
        puts=written,
        deletes=tuple(key for key in there if case.view.revision_of(key)),
    )


def _offer(
    case: Case,
    to: Phase,
    plan: ClusterPlan,
    *,
    reason: str,
    timeline: int,
    ancestry: tuple[tuple[int, int], ...],
    source: str,
    boundary: int,
) -> Transaction:
    """Gives devices away, and so compares and writes `placement` too."""
    record = PlanRecord(
        generation=case.generation,
        timeline=timeline,
        ancestry=ancestry,
        boundary=boundary,
        source=source,
        stages=plan.stages,
        predicted_batch_seconds=plan.predicted_batch_seconds,
        reason=reason,
        is_exact=plan.is_exact,
        exact_reason=plan.exact_reason,
        arithmetic_classes=plan.arithmetic_classes,
    )
    move = _move(case, to, reason, puts={"next": encode(record)}, generation=record.generation)
    placement = PlacementRecord(job=case.job.name, generation=record.generation)
    return Transaction(
        job=move.job,
        reason=move.reason,
        compare=move.compare | {Keys.PLACEMENT: case.view.revision_of(Keys.PLACEMENT)},
        puts=move.puts | {Keys.PLACEMENT: encode(placement)},
        deletes=move.deletes,
    )


def _at(plan: PlanRecord, boundary: int) -> PlanRecord:
    fields = {name: getattr(plan, name) for name in PlanRecord.__dataclass_fields__}
    return PlanRecord(**(fields | {"boundary": boundary}))


def _durable(case: Case, plan: PlanRecord, boundary: int, layer: str) -> StateRecord:
    """The durable file of a layer: of the node that the plan names, if it has one."""
    holders = case.job.holders(plan.timeline, boundary, layer)
    owner = plan.stages[-1].node if layer == JOURNAL else plan.holder(layer).node
    durable = {node: record for node, record in holders.items() if record.is_durable}
    return durable.get(owner) or durable[min(durable)]


# --- Sentences ------------------------------------------------------------------------------------------------------


def _why_changed(case: Case, before: PlanRecord, after: ClusterPlan) -> str:
    old, new = {stage.node for stage in before.stages}, {stage.node for stage in after.stages}
    causes = []
    if draining := case.draining(before):
        causes.append(_leaving(draining))
    if joined := sorted(new - old):
        causes.append(f"Node{'s' * (len(joined) > 1)} {_and(joined)} joined")
    cause = " and ".join(causes) or "A better cut"
    shape = _stages(len(after.stages))
    if len(before.stages) != len(after.stages):
        shape += f" instead of {len(before.stages)}"
    factor = before.predicted_batch_seconds / max(after.predicted_batch_seconds, 1e-12)
    speed = f"{factor:.2g}× faster" if factor > 1.005 else f"{1 / max(factor, 1e-12):.2g}× the time of a batch"
    return f"{cause}: {shape}, predicted {speed}"


def _why_dropped(case: Case) -> str:
    job = case.job
    if job.desired.state is not Desired.RUNNING:
        return f"The new plan is dropped: {job.desired.state} is wanted"
    if failed := case.failed_worker(job.next):
        stage_index, worker = failed
        return f"The new plan is dropped: its worker of stage {stage_index} on {worker.node} failed"
    if stage := case.unusable(job.next):
        return f"The new plan is dropped: {_trouble(case, stage.node, stage.node_incarnation)}"
    if case.stopped_at(job.plan, case.spec.train.batches):
        return "The new plan is dropped: training has reached its end"
    late = _and(case.unready(job.next, WorkerState.READY))
    return f"The new plan is dropped: {late} not ready in time"


def _why_stopped(case: Case, boundary: int | None) -> str:
    job = case.job
    if boundary == case.spec.train.batches:
        return "All batches are done: the last checkpoint is being written"
    if job.desired.state is Desired.PAUSED:
        return "Pause is wanted: stops at a boundary and writes a checkpoint"
    if (stage := case.unusable(job.next)) is not None:
        return f"{_trouble(case, stage.node, stage.node_incarnation).capitalize()}: stops and writes a checkpoint"
    if (failed := case.failed_worker(job.next)) is not None:
        return f"The worker of stage {failed[0]} on {failed[1].node} failed: stops and writes a checkpoint"
    draining = case.draining(job.plan)
    return f"{_leaving(draining)} and the rest cannot go on: writes a checkpoint"


def _leaving(draining: tuple[str, ...]) -> str:
    return f"Node {draining[0]} leaves" if len(draining) == 1 else f"Nodes {_and(draining)} leave"


def _why_failed(case: Case) -> tuple[str, str]:
    """The sentence, and the worker's error if there is one."""
    job = case.job
    if job.phase.phase is Phase.QUEUED and isinstance(case.best_plan, PlanRefused):
        return case.best_plan.reason, ""
    plans = (job.plan, job.next) if job.phase.phase is not Phase.PREPARING else (job.next,)
    for plan in plans:
        if (failed := case.failed_worker(plan)) is not None:
            return f"the worker of stage {failed[0]} on node {failed[1].node} failed", failed[1].error
    if (stage := case.lost(job.plan)) is not None:
        return _trouble(case, stage.node, stage.node_incarnation), ""
    phase = job.phase.phase
    if phase is Phase.PREPARING and job.next is not None:
        return f"{_and(case.unready(job.next, WorkerState.READY))} not ready in time", ""
    if phase is Phase.RUNNING and job.plan is not None:
        started = (WorkerState.RUNNING, WorkerState.STOPPED)
        if late := case.unready(job.plan, *started):
            return f"{_and(late)} did not start in time", ""
        return f"{_and(case.unready(job.plan, WorkerState.STOPPED))} did not reach the end in time", ""
    if phase is Phase.STOPPING and job.plan is not None and job.stop is not None:
        if job.stop.boundary is None:
            return f"stage 0 on node {job.plan.stages[0].node} did not choose a stop boundary in time", ""
        if late := case.unready(job.plan, WorkerState.STOPPED):
            return f"{_and(late)} did not stop at boundary {job.stop.boundary} in time", ""
        return f"not all layers of boundary {job.stop.boundary} were written in time", ""
    return f"its records in etcd are incomplete while it is {phase}", ""


def _trouble(case: Case, name: str, incarnation: str) -> str:
    node = case.view.nodes.get(name)
    if node is None:
        return f"node {name} was lost (its lease expired)"
    if node.incarnation != incarnation:
        return f"node {name} was lost (its daemon started anew)"
    return f"node {name} drains"


def _stages(number: int) -> str:
    return f"{number} stage{'s' if number != 1 else ''}"


def _and(names: list[str] | tuple[str, ...]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
