"""The actions of the coordinator's table: each returns the transaction that takes a job to its next phase. Pure.

Every transaction compares every record that was read of the job, and writes the phase, an event and the plan's
records together. The first line of an action's docstring is its text in docs/coordinator.md.
"""

from dataclasses import replace

from headway.daemon.base.terminal import counted
from headway.daemon.blobs.checkpoint_names import boundary_url, file_name, part_name, parts_url
from headway.daemon.cluster.format import encode, to_builtins
from headway.daemon.cluster.lineage import own_parts, sealed, with_next_part
from headway.daemon.cluster.measurements import LinkCuts
from headway.daemon.cluster.records import (
    CheckpointRecord,
    FailureCount,
    Phase,
    PlanRecord,
    Save,
    StateFile,
    StopRecord,
)
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.decide.boundaries import Origin, due_checkpoint, lead_of, parts_of, refusals, unsaved
from headway.daemon.decide.commands import (
    Command,
    CopyPart,
    DeleteCheckpoints,
    SetAside,
    Transaction,
    WriteManifest,
    held_against_nodes,
    move,
    offer,
)
from headway.daemon.decide.conditions import outlook_text, planning_since, recovery_is_possible
from headway.daemon.decide.failures import link_news, repetition
from headway.daemon.decide.job_view import Place
from headway.daemon.decide.sentences import (
    at_the_end,
    early_end_text,
    link_sentence,
    shape_and_nodes,
    waits_for,
    what_was_lost,
    where_it_goes,
    why_changed,
)
from headway.daemon.decide.situation import JobSituation
from headway.daemon.plan.cluster_plan import sentence
from headway.daemon.plan.planner import ClusterPlan


def retire(situation: JobSituation, to: Phase) -> Command:
    """delete `plan`, `next` and `stop` if present"""
    return move(situation, to, "as requested", event=sentence(to.value), deletes=("plan", "next", "stop"))


def requeue(situation: JobSituation, to: Phase) -> Command:
    """the phase only; the failure count returns to 0, and shortages of memory are forgotten"""
    origin = situation.origin
    start = f"batch {origin.boundary}" if origin.source != "initial" else "the beginning"
    return move(situation, to, f"resume requested: continues from {start}", failures=FailureCount(), shortages=())


def explain_wait(situation: JobSituation, to: Phase) -> Command:
    """the reason only, without an event"""
    return move(situation, to, situation.why, is_event=False, error=situation.job.phase.error)


def explain_outlook(situation: JobSituation, to: Phase) -> Command:
    """why no better plan is taken, without an event"""
    before = situation.job.phase
    return move(situation, to, before.reason, is_event=False, error=before.error, outlook=outlook_text(situation))


def tell_of_links(situation: JobSituation, to: Phase) -> Command:
    """an event about links of the plan"""
    news = link_news(situation.job)
    return _telling(situation, to, link_sentence(situation, news), cuts=news)


def tell_of_checkpoints(situation: JobSituation, to: Phase) -> Command:
    """an event: checkpoints cannot be written, or are again"""
    event = "; ".join(refusals(situation.job)) or "Checkpoints are written again"
    return _telling(situation, to, event, unsaved=unsaved(situation.job))


def _telling(
    situation: JobSituation, to: Phase, event: str, *, cuts: tuple[LinkCuts, ...] = (), unsaved: int | None = None
) -> Command:
    """Return an event that leaves the phase as it is."""
    before = situation.job.phase
    return move(
        situation,
        to,
        before.reason,
        error=before.error,
        outlook=before.outlook,
        planning_since=before.planning_since,
        event=event,
        cuts=cuts,
        unsaved=unsaved,
    )


def explain_planning(situation: JobSituation, to: Phase) -> Command:
    """when planning began, without an event"""
    before, since = situation.job.phase, planning_since(situation)
    return move(
        situation,
        to,
        before.reason,
        is_event=False,
        error=before.error,
        outlook=before.outlook,
        planning_since=since,
    )


def offer_first_plan(situation: JobSituation, to: Phase) -> Command:
    """`next`, without an event"""
    plan = situation.plans.best
    assert isinstance(plan, ClusterPlan)
    reason = shape_and_nodes(plan.workers)
    if plan.predicted_batch_seconds > 0:
        reason += f", predicted {plan.predicted_batch_seconds:.2g} s a batch"
    if first := situation.spec.train.sync_batches:
        reason += f"; the first {first} have no delay"
    return offer(situation, to, plan, reason=reason, origin=situation.origin, is_event=False)


def offer_change(situation: JobSituation, to: Phase) -> Command:
    """`next`, without an event"""
    plan, before = situation.plans.best, situation.job.plan
    assert isinstance(plan, ClusterPlan)
    assert before is not None
    same_timeline = Origin(source="nodes", boundary=0, source_timeline=before.timeline, lineage=before.lineage)
    outlook = situation.plans.outlook
    promised = outlook.factor if outlook is not None and not situation.current.draining else 0.0
    reason = why_changed(situation, before, plan)
    return offer(situation, to, plan, reason=reason, origin=same_timeline, promised=promised, is_event=False)


def recover(situation: JobSituation, to: Phase) -> Command:
    """delete `stop`; `next` on the surviving nodes if a plan exists, else delete `next`; count losses"""
    cause, plan = what_was_lost(situation) or situation.why, situation.plans.recovery
    error = situation.lost.first_error or situation.job.phase.error
    leased = held_against_nodes(situation, situation.lost.found)
    failures = situation.lost.failures
    again = repetition(replace(failures, cause="") if situation.lost.deaths else failures)
    if situation.lost.deaths:
        failures = replace(failures, cause=cause)
    if isinstance(plan, ClusterPlan) and recovery_is_possible(situation):
        reason = f"{cause}; {where_it_goes(situation, plan)}{again}"
        return offer(
            situation,
            to,
            plan,
            reason=reason,
            event=sentence(reason),
            origin=situation.origin,
            error=error,
            deletes=("stop",),
            failures=failures,
            leased=leased,
        )
    wait = waits_for(situation)
    return move(
        situation,
        to,
        wait,
        event=sentence(f"{cause}; {wait}{again}"),
        error=error,
        deletes=("next", "stop"),
        generation=max(situation.job.phase.generation, situation.known_generation),
        failures=failures,
        leased=leased,
    )


def enforce_first(situation: JobSituation, to: Phase) -> Command:
    """`plan` ← `next`"""
    plan = situation.job.next
    assert plan is not None
    again = situation.job.phase.phase is Phase.RECOVERING
    on = shape_and_nodes(plan.workers)
    text = (
        f"Training again since batch {plan.boundary}: {on}{repetition(situation.job.phase.failures)}"
        if again
        else (f"Training since batch {plan.boundary}: {plan.reason}")
    )
    return move(situation, to, text, plan=plan, deletes=("next", "stop"))


def enforce_change(situation: JobSituation, to: Phase) -> Command:
    """`plan` ← `next`, from the stop boundary on; delete `next` and `stop`"""
    successor, stop = situation.job.next, situation.job.stop
    assert successor is not None
    assert stop is not None
    assert stop.boundary is not None
    plan = replace(successor, boundary=stop.boundary, furthest=max(successor.furthest, situation.furthest))
    num_moved = len(situation.moving) - 1
    text = f"{successor.reason}; since batch {stop.boundary}, {counted(num_moved, 'layer')} moved"
    return move(situation, to, text, plan=plan, deletes=("next", "stop"))


def drop_next(situation: JobSituation, to: Phase) -> Command:
    """delete `next`"""
    told = situation.job.next.reason if situation.job.next is not None else ""
    reason = f"The next plan is dropped ({told}): {situation.why}"
    if situation.job.phase.phase is not Phase.PREPARING:
        return move(situation, to, reason, deletes=("next",))
    leased = held_against_nodes(
        situation, tuple(loss for loss in situation.lost.found if loss.failure is not None or loss.is_late)
    )
    generation = max(situation.job.phase.generation, situation.known_generation)
    failures = situation.lost.failures
    return move(
        situation,
        to,
        reason,
        deletes=("next",),
        generation=generation,
        failures=failures,
        leased=leased,
    )


def stop_for_moves(situation: JobSituation, to: Phase) -> Command:
    """`stop` {moves}"""
    assert situation.job.plan is not None
    stop = StopRecord(generation=situation.job.plan.generation, save=Save.MOVES)
    text = "All workers of the new plan are ready: the old plan's workers stop at a boundary"
    return move(situation, to, text, puts={"stop": encode(stop)}, is_event=False)


def stop_for_checkpoint(situation: JobSituation, to: Phase) -> Command:
    """`stop` {checkpoint}; delete `next`"""
    plan, before = situation.job.plan, situation.job.stop
    assert plan is not None
    boundary = before.boundary if before is not None else None
    end = situation.end
    if boundary is None and situation.current.stopped_at(end):
        boundary = end
    stop = StopRecord(generation=plan.generation, save=Save.CHECKPOINT, boundary=boundary)
    then, why = "stops at a boundary and writes a checkpoint", situation.why
    if boundary == end:
        then, why = "the last checkpoint is still to be written", at_the_end(situation)
    text = f"{sentence(why)}: {then}"
    # At the end the next event, that the job has finished, says the same.
    return move(situation, to, text, puts={"stop": encode(stop)}, deletes=("next",), is_event=boundary != end)


def fail(situation: JobSituation, to: Phase) -> Command:
    """delete `plan`, `next` and `stop` if present; nodes keep their state files"""
    return move(
        situation,
        to,
        situation.why,
        error=situation.lost.first_error,
        deletes=("plan", "next", "stop"),
        event=f"Failed: {situation.why}",
        failures=situation.lost.failures,
        leased=held_against_nodes(situation, situation.lost.found),
    )


def write_checkpoint(situation: JobSituation, to: Phase) -> Command:
    """manifest, then `checkpoint`; delete `plan` and `stop`"""
    plan, stop = situation.job.plan, situation.job.stop
    assert plan is not None
    assert stop is not None
    assert stop.boundary is not None
    checkpoint = _checkpoint(situation, plan, (plan.timeline, stop.boundary))
    early = sentence(early_end_text(situation))
    texts = {
        Phase.FINISHED: early or f"Finished: {counted(stop.boundary, 'batch')}, the last checkpoint is written",
        Phase.PAUSED: f"Paused before batch {stop.boundary}: a checkpoint is written",
        Phase.QUEUED: f"Saved before batch {stop.boundary}: continues when enough nodes are available",
    }
    then = move(
        situation,
        to,
        texts[to],
        puts={"checkpoint": encode(checkpoint)},
        deletes=("plan", "next", "stop"),
        is_saved=True,
    )
    return _manifest(situation, plan, checkpoint, then)


def write_periodic_checkpoint(situation: JobSituation, to: Phase) -> Command:
    """manifest, then `checkpoint`, without an event"""
    plan, due = situation.job.plan, due_checkpoint(situation.job)
    assert plan is not None
    assert due is not None
    checkpoint = _checkpoint(situation, plan, due)
    then = move(
        situation,
        to,
        situation.job.phase.reason,
        is_event=False,
        puts={"checkpoint": encode(checkpoint)},
    )
    return _manifest(situation, plan, checkpoint, then)


def delete_checkpoints(situation: JobSituation, to: Phase) -> Command:
    """delete folders of old checkpoints, then remove them from `checkpoint`"""
    checkpoint = situation.job.checkpoint
    assert checkpoint is not None
    then = move(
        situation,
        to,
        situation.job.phase.reason,
        puts={"checkpoint": encode(replace(checkpoint, dropped=()))},
        is_event=False,
        error=situation.job.phase.error,
    )
    return DeleteCheckpoints(job=situation.job.name, urls=checkpoint.dropped, then=then)


def set_aside(situation: JobSituation, to: Phase) -> Command:
    """mark the damaged folder, then `checkpoint` ← the newest older one; delete `next`. Without one the job fails"""
    checkpoint = situation.job.checkpoint
    assert checkpoint is not None
    reason = situation.why

    def then(older: CheckpointRecord | None) -> Transaction:
        what = f"The checkpoint before batch {checkpoint.boundary} is damaged ({reason})"
        if older is None:
            why = f"{what}, and no older one is kept; submit the job anew, or `submit --from` another one"
            deletes = ("plan", "next", "stop")
            return move(situation, Phase.FAILED, why, deletes=deletes, error=reason, event=f"Failed: {why}")
        again = max(situation.furthest, checkpoint.boundary) - older.boundary
        text = (
            f"{what}. It is set aside; the one before batch {older.boundary} is taken: {counted(again, 'batch')} again"
        )
        left = checkpoint.earlier[checkpoint.earlier.index(older.url) + 1 :]
        record = replace(older, earlier=left, dropped=checkpoint.dropped)
        return move(situation, to, text, puts={"checkpoint": encode(record)}, deletes=("next",))

    return SetAside(job=situation.job.name, url=checkpoint.url, reason=reason, older=checkpoint.earlier, then=then)


def _checkpoint(situation: JobSituation, plan: PlanRecord, place: Place) -> CheckpointRecord:
    job, fault = situation.job, situation.spec.fault
    files = {}
    for part in parts_of(job):
        file = _durable(situation, plan, place, part)
        files[part] = file.digest
    uid = job.submission.uid if job.submission is not None else ""
    url = boundary_url(fault.checkpoint_dir, job.name, timeline=place[0], boundary=place[1], uid=uid)
    before = job.checkpoint
    older = before.earlier if before is not None else ()
    if before is not None and not before.origin_job:
        older = (before.url, *older)
    older = tuple(other for other in older if other != url)
    num_kept = max(fault.checkpoints_kept, 1) - 1
    lineage = plan.lineage.up_to(place[0])
    closed = before.journal_parts if before is not None else ()
    dropped = (*older[num_kept:], *(before.dropped if before is not None else ()))
    return CheckpointRecord(
        timeline=place[0],
        boundary=place[1],
        url=url,
        files=files,
        ancestry=lineage.ancestry,
        arithmetic_classes=plan.arithmetic_classes,
        was_rounded=plan.was_rounded,
        earlier=older[:num_kept],
        dropped=tuple(dict.fromkeys(other for other in dropped if other != url)),
        journal_parts=with_next_part(
            own_parts(closed, lineage),
            files[JOURNAL],
            timeline=place[0],
            boundary=place[1],
        ),
        written_at=situation.written_at,
    )


def parts_to_copy(before: CheckpointRecord | None, checkpoint: CheckpointRecord) -> tuple[CopyPart, ...]:
    """Return the copies that bring a checkpoint's parts to its job's folder: its own part, and inherited ones once."""
    target = parts_url(checkpoint.url)
    copies = []
    for part in checkpoint.journal_parts:
        name = part_name(*part.place)
        if part.place == (checkpoint.timeline, checkpoint.boundary):
            copies.append(CopyPart(source=f"{checkpoint.url}/{file_name(JOURNAL)}", target=f"{target}/{name}"))
        elif before is not None and before.origin_job:
            source = f"{parts_url(before.url)}/{name}"
            copies.append(CopyPart(source=source, target=f"{target}/{name}", is_inherited=True))
    return tuple(copies)


def _manifest(
    situation: JobSituation, plan: PlanRecord, checkpoint: CheckpointRecord, then: Transaction
) -> WriteManifest:
    """Return the checkpoint's own description, without the other checkpoints."""
    manifest = {
        "job": situation.job.name,
        "generation": plan.generation,
        "spec": to_builtins(situation.spec),
        **to_builtins(replace(checkpoint, earlier=(), dropped=())),
    }
    return WriteManifest(
        job=situation.job.name,
        url=checkpoint.url,
        manifest=sealed(manifest),
        then=then,
        parts=parts_to_copy(situation.job.checkpoint, checkpoint),
    )


def _durable(situation: JobSituation, plan: PlanRecord, place: Place, part: str) -> StateFile:
    """Return the durable file of a part, preferring the file of the node that leads its stage."""
    owner = lead_of(plan, part).node
    durable = {node: file for node, file in situation.job.holders(*place, part).items() if file.is_durable}
    return durable.get(owner) or durable[min(durable)]
