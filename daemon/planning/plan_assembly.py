"""Makes a plan from a cut: shares of the replicas, depth of every worker, and all figures about them. Pure."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from headway.daemon.costs.devices import DeviceSlot, natural
from headway.daemon.costs.replica_shares import interleaved
from headway.daemon.costs.stage_costs import StageCosts
from headway.daemon.planning.cluster_plan import ClusterPlan, StageEstimate
from headway.daemon.planning.pipeline_cut import Cut
from headway.daemon.planning.predicted_time import PlacedStage, PredictedTime, Worker
from headway.daemon.records.records import WorkerPart
from headway.stages.links.codec import Codec, is_rounding
from headway.stages.spec import TrainSpec


def assemble(
    costs: StageCosts, cut: Cut, slots: Sequence[DeviceSlot], history: tuple[str, ...], *, was_rounded: bool = False
) -> ClusterPlan:
    """Return the plan of a cut. seats: all usable devices. history: arithmetic classes on which the job has run.

    was_rounded: whether the job has run over a lossy wire.
    """
    placed = place(costs, cut)
    times = PredictedTime(costs, placed)
    depths = depths_within_memory(costs, placed, times)
    estimates = tuple(
        _estimate(costs, placed, times, depths, index, position)
        for index, stage in enumerate(placed)
        for position in range(len(stage.workers))
    )
    order = [slot for run in cut.runs for slot in run]
    distance = times.distance(depths)
    classes = tuple(sorted({*history, *(slot.arithmetic_class for slot in order)}))
    used = {slot.node for slot in order}
    codecs = [costs.cuts.codec(upper.slots, lower.slots) for upper, lower in pairwise(placed)]
    rounding = _rounding_reason(costs.spec.train.wire_between, codecs, was_rounded=was_rounded)
    return ClusterPlan(
        workers=tuple(estimate.stage for estimate in estimates),
        predicted_batch_seconds=distance.batch_s,
        estimates=estimates,
        connections=times.connections(),
        distance=distance,
        schedule=costs.spec.train.schedule,
        reductions=times.reductions(),
        tie=times.tie(),
        spares=tuple(sorted({slot.node for slot in slots} - used, key=natural)),
        is_exact=len(classes) == 1 and not rounding,
        exact_reason=_exact_reason(costs.spec.train, order, classes, rounding, num_cuts=len(codecs)),
        arithmetic_classes=classes,
        codecs=tuple(codec.name.lower() for codec in codecs) if any(codecs) else (),
        was_rounded=bool(rounding),
    )


def place(costs: StageCosts, cut: Cut) -> tuple[PlacedStage, ...]:
    """Return the stages of a cut, with what each computes again, and the groups of every worker."""
    placed = []
    for index, (run, (first, end)) in enumerate(zip(cut.runs, cut.spans, strict=True)):
        num_stages = len(cut.runs) - index
        recompute = costs.recompute(run, (first, end), num_stages)
        shares = costs.shares(run, (first, end), num_stages, recompute)
        placed.append(
            PlacedStage(
                span=(first, end),
                workers=tuple(
                    Worker(slot=slot, groups=groups)
                    for slot, groups in zip(run, interleaved(shares, costs.num_microbatches), strict=True)
                ),
                recompute=recompute,
                shares_update=costs.shares_update(run, (first, end), num_stages, recompute),
            )
        )
    return tuple(placed)


def depths_within_memory(costs: StageCosts, placed: Sequence[PlacedStage], times: PredictedTime) -> list[int]:
    """Return each stage's depth: what the schedule needs with the distance below, and slack, as far as memory
    allows.
    """
    depths = []
    for index, stage in enumerate(placed):
        least = costs.memory.least_depth(len(placed) - index)
        depth = times.depth(index)
        if depth > least and not _all_fit(costs, stage, depth):
            between = range(least + 1, depth)
            depth = least + bisect_left(between, True, key=lambda depth: not _all_fit(costs, stage, depth))
        depths.append(depth)
    return depths


def _all_fit(costs: StageCosts, stage: PlacedStage, depth: int) -> bool:
    return all(_fits(costs, stage, worker, depth) for worker in stage.workers)


def _fits(costs: StageCosts, stage: PlacedStage, worker: Worker, depth: int) -> bool:
    limit = worker.slot.room_bytes
    return not limit or _device_bytes(costs, stage, worker, depth) <= limit


def _device_bytes(costs: StageCosts, stage: PlacedStage, worker: Worker, depth: int) -> int:
    return costs.memory.device_bytes(
        costs.slices.slice_number(stage.span, stage.recompute),
        depth,
        worker.groups,
        len(stage.workers),
        is_shared=stage.shares_update,
    )


def _estimate(
    costs: StageCosts,
    placed: Sequence[PlacedStage],
    times: PredictedTime,
    depths: Sequence[int],
    index: int,
    position: int,
) -> StageEstimate:
    stage, worker = placed[index], placed[index].workers[position]
    device_bytes = _device_bytes(costs, stage, worker, depths[index])
    is_alone = len(stage.workers) == 1
    return StageEstimate(
        stage=WorkerPart(
            node=worker.slot.node,
            node_incarnation=worker.slot.incarnation,
            device_index=worker.slot.device.index,
            layers=costs.slices.names[stage.span[0] : stage.span[1]],
            depth=costs.memory.depth_of(depths[index], costs.memory.num_held(worker.groups)),
            groups=() if is_alone else worker.groups,
            device_bytes=device_bytes,
            recompute=stage.recompute if costs.spec.train.recompute == "auto" else "",
            shares_update=stage.shares_update,
        ),
        batch_seconds=times.worker_seconds[index][position],
        device_bytes=round(device_bytes * worker.slot.demand),
        device_limit_bytes=worker.slot.limit_bytes,
        demand=worker.slot.demand,
        host_bytes=int(costs.memory.host_bytes(worker.slot)[costs.slices.slice_of[stage.span]]),
        host_limit_bytes=worker.slot.host_memory_bytes,
        stage_index=index,
        share=times.num_microbatches(worker.groups) / costs.num_microbatches,
    )


def _rounding_reason(where: str, codecs: Sequence[Codec], *, was_rounded: bool) -> str:
    """Return why the bits depend on the cuts; empty: they do not."""
    coded = [index for index, codec in enumerate(codecs) if codec]
    if not coded:
        return "wire compression has rounded frames of an earlier plan" if was_rounded else ""
    name, number = codecs[coded[0]].name.lower(), len(coded)
    at = "stages " + " and ".join(f"{index} → {index + 1}" for index in coded) if number < 4 else f"{number} cuts"
    between = " between sites" if where == "sites" else ""
    return f"{name} wire compression rounds the frames of the links{between} ({at}): the bits depend on the cuts"


def _exact_reason(
    train: TrainSpec, order: Sequence[DeviceSlot], classes: tuple[str, ...], rounding: str, *, num_cuts: int
) -> str:
    """Return a sentence; for an inexact job, only the reasons against exactness."""
    of_classes = _reason_of_classes(order, classes)
    if rounding:
        return rounding if len(classes) == 1 else f"{rounding}; and {of_classes}"
    if is_rounding(train):
        why = "no cut lies between sites" if num_cuts else "the plan has one stage, and so no cut"
        return f'{of_classes}, and wire = "{train.wire}" codes no link of this plan: {why}'
    return of_classes


def _reason_of_classes(order: Sequence[DeviceSlot], classes: tuple[str, ...]) -> str:
    if len(classes) == 1:
        return f"all workers have one arithmetic class ({classes[0]})"
    here = sorted({slot.arithmetic_class for slot in order})
    if len(here) > 1:
        examples = (next(slot for slot in order if slot.arithmetic_class == name) for name in here)
        return "the workers are of several arithmetic classes: " + ", ".join(
            f"{_name(slot)} has {slot.arithmetic_class}" for slot in examples
        )
    return f"the job has run on several arithmetic classes: {', '.join(classes)}"


def _name(slot: DeviceSlot) -> str:
    return slot.node if slot.is_only_one else f"{slot.node}:{slot.device.index}"
