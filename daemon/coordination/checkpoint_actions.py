"""The actions of the coordinator's table that make a checkpoint exist, and delete old ones. Pure."""

from dataclasses import replace

from headway.daemon.coordination.commands import (
    Command,
    CopyPart,
    DeleteCheckpoints,
    SetAside,
    Transaction,
    WriteManifest,
)
from headway.daemon.coordination.conditions import damage_found
from headway.daemon.coordination.sentences import early_end_text
from headway.daemon.coordination.transactions import move
from headway.daemon.records.format import encode, to_builtins
from headway.daemon.records.journal_part import own_parts, with_next_part
from headway.daemon.records.manifest import sealed
from headway.daemon.records.records import CheckpointRecord, Phase, PlanRecord, StateFile
from headway.daemon.situation.boundaries import due_checkpoint, lead_of, parts_of
from headway.daemon.situation.situation import JobSituation
from headway.daemon.storage.checkpoint_names import boundary_url, file_name, part_name, parts_url
from headway.daemon.storage.state_key import JOURNAL
from headway.daemon.view.job_view import Place


def write_checkpoint(situation: JobSituation, to: Phase) -> Command:
    """manifest, then `checkpoint`; delete `plan` and `stop`"""
    plan, stop = situation.job.plan, situation.job.stop
    assert plan is not None
    assert stop is not None
    assert stop.boundary is not None
    checkpoint = _checkpoint(situation, plan, (plan.timeline, stop.boundary))
    early = early_end_text(situation)
    texts = {
        Phase.FINISHED: early or f"Finished: {stop.boundary} batches, the last checkpoint is written",
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
    """manifest, then `checkpoint`"""
    plan, due = situation.job.plan, due_checkpoint(situation.job)
    assert plan is not None
    assert due is not None
    checkpoint = _checkpoint(situation, plan, due)
    then = move(
        situation,
        to,
        situation.job.phase.reason,
        event=f"The checkpoint before batch {due[1]} is written",
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
    reason = damage_found(situation)

    def then(older: CheckpointRecord | None) -> Transaction:
        what = f"The checkpoint before batch {checkpoint.boundary} is damaged ({reason})"
        if older is None:
            why = f"{what}, and no older one is kept; submit the job anew, or `submit --from` another one"
            deletes = ("plan", "next", "stop")
            return move(situation, Phase.FAILED, why, deletes=deletes, error=reason, event=f"Failed: {why}")
        again = max(situation.furthest, checkpoint.boundary) - older.boundary
        text = f"{what}. It is set aside; the one before batch {older.boundary} is taken: {again} batches again"
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
