"""Reads a Start order: the context of the stage, and which neighbour holds which groups. It opens nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.update_shares import update_shares
from headway.daemon.worker.session import OrderRefusedError
from headway.proto.control_pb2 import Peer, StageAssignment, Start
from headway.stages.ids import Boundary, Generation, LayerName, StageIndex, Timeline
from headway.stages.links.codec import Codec
from headway.stages.spec import RECOMPUTES, Recompute
from headway.stages.stage.context import PATIENCE_S, StageContext


def start_context(start: Start, spec: JobSpec, device: torch.device) -> StageContext:
    """Return the context of the run that begins. Raises OrderRefusedError if the replicas' groups do not fit
    together, or for what this version does not know.
    """
    replicas = replica_groups(start, spec.train.reduction_groups)
    return StageContext(
        model=spec.model,
        train=for_stage(spec, start.stage).train,
        seed=spec.job.seed,
        job=start.job_name,
        generation=Generation(start.generation),
        timeline=Timeline(start.timeline),
        stage_index=StageIndex(start.stage.index),
        num_stages=start.stage.num_stages,
        layers=tuple(LayerName(layer) for layer in start.stage.layers),
        depth=start.stage.depth,
        boundary=Boundary(start.boundary),
        device=device,
        replica_groups=replicas,
        replica_index=replicas.index(tuple(start.stage.groups)) if replicas else 0,
        update_shares=update_shares(spec, start.stage.layers, len(replicas)) if start.stage.shares_update else None,
        group_by_group=start.stage.group_by_group,
        upstream_codec=_codec(start.stage.upstream_codec),
        downstream_codec=_codec(start.stage.downstream_codec),
        patience_s=start.patience_s or PATIENCE_S,
        stops_at_non_finite=spec.fault.non_finite == "stop",
    )


def for_stage(spec: JobSpec, stage: StageAssignment) -> JobSpec:
    """Return the job with what its plan has chosen for a stage. Raises OrderRefusedError for an unknown choice."""
    known: dict[str, Recompute] = {"": spec.train.recomputes[0], **{name: name for name in RECOMPUTES}}
    if stage.recompute not in known:
        raise OrderRefusedError(f"stage {stage.index} cannot compute {stage.recompute!r} again")
    return replace(spec, train=replace(spec.train, recompute=known[stage.recompute]))


def _codec(number: int) -> Codec:
    try:
        return Codec(number)
    except ValueError:
        known = ", ".join(f"{codec.value} ({codec.name.lower()})" for codec in Codec)
        raise OrderRefusedError(f"no codec has number {number}; this version knows {known}") from None


def groups_of(groups: Sequence[int], num_groups: int) -> tuple[int, ...]:
    """Return the groups that a worker holds; all, if the order names none."""
    return tuple(groups) or tuple(range(num_groups))


def replica_groups(start: Start, num_groups: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of each replica of the start's stage, sorted by the first; empty if the stage has one worker.

    Raises OrderRefusedError unless exactly one replica holds each group.

    """
    own = groups_of(start.stage.groups, num_groups)
    held = sorted([own, *(groups_of(sibling.groups, num_groups) for sibling in start.siblings)])
    if sorted(group for groups in held for group in groups) != list(range(num_groups)):
        stage = start.stage.index
        raise OrderRefusedError(f"the workers of stage {stage} hold reduction groups {held} of {num_groups}")
    return tuple(held) if start.siblings else ()


def leads(start: Start) -> bool:
    """Return whether the worker leads its stage: it has group 0."""
    return not start.stage.groups or start.stage.groups[0] == 0


def by_group(peers: Iterable[Peer], own_groups: Sequence[int], num_groups: int, *, where: str) -> dict[int, Peer]:
    """Return, for each of the worker's groups, the neighbour that holds it. where: `upstream` or `downstream`, for
    errors.

    Raises OrderRefusedError when no neighbour or two neighbours hold a group.

    """
    found: dict[int, Peer] = {}
    for peer in peers:
        for group in groups_of(peer.groups, num_groups):
            if group in own_groups and found.setdefault(group, peer) is not peer:
                raise OrderRefusedError(f"two {where} workers hold reduction group {group}")
    if missing := [group for group in own_groups if group not in found]:
        raise OrderRefusedError(f"no {where} worker holds reduction groups {missing}")
    return found


def name_of(peer: Peer) -> str:
    """Return a readable name: the stage, and the position in the plan if the stage has several workers."""
    return f"stage {peer.stage} worker {peer.worker}" if peer.groups else f"stage {peer.stage}"
