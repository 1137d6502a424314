"""Reads a start: the context of the stage, and which neighbour holds which groups. It opens nothing."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.update_shares import update_shares
from headway.daemon.records.records import PlanRecord
from headway.daemon.workers.goal import Neighbour, Start
from headway.daemon.workers.liveness import FIRST_OPERATION_BATCHES
from headway.stages.ids import Boundary, Generation, LayerName, StageIndex, Timeline
from headway.stages.spec import RECOMPUTES
from headway.stages.stage.context import PATIENCE_S, StageContext


def start_context(start: Start, spec: JobSpec, device: torch.device) -> StageContext:
    """Return the context of the run that begins."""
    plan, part = start.plan, start.plan.workers[start.position]
    stage = plan.stage_index(start.position)
    siblings = plan.replicas[stage]
    replicas = tuple(plan.workers[k].groups for k in siblings) if len(siblings) > 1 else ()
    return StageContext(
        model=spec.model,
        train=for_part(spec, plan, start.position).train,
        seed=spec.job.seed,
        job=spec.job.name,
        generation=Generation(plan.generation),
        timeline=Timeline(plan.timeline),
        stage_index=StageIndex(stage),
        num_stages=plan.num_stages,
        layers=tuple(LayerName(layer) for layer in part.layers),
        depth=part.depth,
        boundary=Boundary(plan.boundary),
        device=device,
        replica_groups=replicas,
        replica_index=siblings.index(start.position) if replicas else 0,
        update_shares=update_shares(spec, part.layers, len(replicas)) if part.shares_update else None,
        group_by_group=all(len(workers) == 1 for workers in plan.replicas),
        upstream_codec=plan.codec(stage),
        downstream_codec=plan.codec(stage + 1),
        patience_s=PATIENCE_S + FIRST_OPERATION_BATCHES * plan.predicted_batch_seconds,
        stops_at_non_finite=spec.fault.non_finite == "stop",
    )


def for_part(spec: JobSpec, plan: PlanRecord, position: int) -> JobSpec:
    """Return the job with what its plan has chosen for a worker."""
    chosen = plan.workers[position].recompute or spec.train.recompute
    recompute = next((each for each in RECOMPUTES if each == chosen), spec.train.recomputes[0])
    return replace(spec, train=replace(spec.train, recompute=recompute))


def groups_of(plan: PlanRecord, position: int, spec: JobSpec) -> tuple[int, ...]:
    """Return the reduction groups that a worker holds."""
    return plan.workers[position].groups or tuple(range(spec.train.reduction_groups))


def by_group(peers: Iterable[Neighbour], start: Start, spec: JobSpec) -> dict[int, Neighbour]:
    """Return, for each of the worker's groups, the neighbour that holds it."""
    own = groups_of(start.plan, start.position, spec)
    return {group: peer for peer in peers for group in groups_of(start.plan, peer.position, spec) if group in own}


def name_of(plan: PlanRecord, position: int) -> str:
    """Return a readable name: the stage, and the position in the plan if the stage has several workers."""
    stage = f"stage {plan.stage_index(position)}"
    return f"{stage} worker {position}" if plan.workers[position].groups else stage
