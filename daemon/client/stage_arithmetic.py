"""Shows the arithmetic of a plan: what each worker's memory and seconds consist of. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headway.daemon.cluster.records import Device
from headway.daemon.plan.cluster_plan import StageEstimate
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.layer_costs import document_bytes, kind_of_layer
from headway.daemon.plan.stage_costs import StageCosts

GIB: Final = 1 << 30
GIGA: Final = 1e9
TERA: Final = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryArithmetic:
    """The parts of a worker's memory on its device, in bytes. Their sum is what the plan counts."""

    num_parameters: int
    weights: int
    """fp32 masters; 0: the versions are fp32 themselves."""
    versions: int
    """The weights as the forward sees them, in two versions."""
    optimizer: int
    """Momentum, second moments, Error Feedback."""
    gradients: int
    """Sums of each reduction group, sets that wait for their update, and buffers to reduce them with others."""
    activations: int
    """What layers keep of the microbatches in flight, except for the loss."""
    loss: int
    """What the loss keeps of them, and what its backward has for a moment."""
    recomputed: int
    """One block's graph, when it is computed again."""
    update: int
    """What the update of one matrix, or of one layer's other parameters, takes above the most of a backward."""
    shares: int
    """Results of Newton–Schulz that replicas have sent each other; 0: each does its whole update."""
    feedback: int
    """Remainders of coded links, which the next frame carries."""
    beyond: int
    """What the plan counts above these parts, because peaks were measured above them."""
    reserve: int
    """Memory of the device that no plan fills."""
    usable: int
    """Memory of the device without the reserve; 0: not limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsArithmetic:
    """The parts of a worker's seconds of a batch."""

    flops: float
    """Operations of a microbatch, forward and backward."""
    flops_per_s: float
    """The device's rate for them, as planned: its speed, or the measured times."""
    microbatch_s: float
    num_microbatches: int
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageArithmetic:
    """The arithmetic of one worker of a plan."""

    memory: MemoryArithmetic
    seconds: SecondsArithmetic


def stage_arithmetic(
    costs: StageCosts, estimate: StageEstimate, slot: DeviceSlot, num_replicas: int
) -> StageArithmetic:
    """Return the arithmetic of a worker. num_replicas: workers of its stage."""
    return StageArithmetic(
        memory=_memory(costs, estimate, slot.device, num_replicas),
        seconds=_seconds(costs, estimate, slot, num_replicas),
    )


def memory_rows(arithmetics: Iterable[StageArithmetic]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return titles and rows of a table in GiB, with the sum and its limit. A column of zeros is left out."""
    memories = [each.memory for each in arithmetics]
    names = [name for name in _PARTS if any(getattr(memory, name) for memory in memories)]
    titles = ("parameters", *names, "sum", "of usable", "reserve")
    rows = [
        (
            f"{memory.num_parameters / GIGA:.3f} B",
            *(_gib(getattr(memory, name)) for name in names),
            _gib(sum(getattr(memory, name) for name in _PARTS)),
            _gib(memory.usable) if memory.usable else "enough",
            _gib(memory.reserve),
        )
        for memory in memories
    ]
    return titles, rows


def seconds_rows(arithmetics: Iterable[StageArithmetic]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return titles and rows of a table: operations over rate is a microbatch; with the update it is a batch."""
    titles = ("TFLOP a microbatch", "TFLOP/s", "s/microbatch", "microbatches", "s/update", "s/batch")
    rows: list[tuple[str, ...]] = [
        (
            f"{each.flops / TERA:.4g}",
            f"{each.flops_per_s / TERA:.4g}",
            f"{each.microbatch_s:.4g}",
            str(each.num_microbatches),
            f"{each.update_s:.3g}",
            f"{each.num_microbatches * each.microbatch_s + each.update_s:.3g}",
        )
        for each in (arithmetic.seconds for arithmetic in arithmetics)
    ]
    return titles, rows


def legend(arithmetics: Sequence[StageArithmetic]) -> list[str]:
    """Return a sentence for each part of the memory that some worker has."""
    memories = [each.memory for each in arithmetics]
    named = [name for name in _PARTS if any(getattr(memory, name) for memory in memories)]
    return [f"{name:11}  {_PARTS[name]}" for name in named]


_PARTS: Final = {
    "weights": "fp32 masters",
    "versions": "two versions of the weights in the job's dtype",
    "optimizer": "momentum, second moments, and Error Feedback's last update",
    "gradients": "fp32: sums of the reduction groups, a set that waits, buffers of replicas and ties; of a backward "
    "what its activations have not made room for",
    "activations": "what layers keep for the backward, times the depth",
    "loss": "fp32: the log-softmax, times the depth, and the gradients of a microbatch's logits, or of a chunk's",
    "recomputed": "the graph of one block while its backward runs",
    "update": "what an update takes for a moment, above the most that a backward takes",
    "shares": "results of Newton-Schulz that replicas send each other",
    "feedback": "remainders that the next frame of a coded link carries",
    "beyond": "the excess of measured peaks over these parts",
}


def _memory(costs: StageCosts, estimate: StageEstimate, device: Device, num_replicas: int) -> MemoryArithmetic:
    memory = costs.memory
    layers = costs.slices.layers_of(set(estimate.stage.layers), estimate.stage.recompute)
    groups = estimate.stage.groups or tuple(range(costs.num_groups))
    depth = estimate.stage.depth
    sums = float(memory.gradient_sets(len(groups), num_replicas)) * sum(cost.group_bytes for cost in layers)
    passing = max(layers, key=lambda cost: cost.passing_bytes)
    is_loss = kind_of_layer(passing.name) == "head"
    first = costs.slices.names.index(layers[0].name)
    number = costs.slices.slice_number((first, first + len(layers)), estimate.stage.recompute)
    ties = memory.tie_bytes(len(groups), num_replicas)
    excess = memory.reduction_excess(len(groups), num_replicas, depth)
    loss = depth * sum(cost.loss_bytes for cost in layers) + (passing.passing_bytes if is_loss else 0)
    has_blocks = any(kind_of_layer(cost.name) == "block" for cost in layers)
    documents = document_bytes(costs.spec) if has_blocks else 0
    gradients = sum(cost.gradient_bytes for cost in layers) - memory.relief_bytes[number]
    gradients += sums + excess[number] + ties[number]
    parts = {
        "weights": sum(cost.master_bytes for cost in layers),
        "versions": sum(cost.version_bytes for cost in layers),
        "optimizer": sum(cost.optimizer_bytes for cost in layers),
        "gradients": int(gradients),
        "activations": depth * (documents + sum(cost.activation_bytes - cost.loss_bytes for cost in layers)),
        "loss": loss,
        "recomputed": 0 if is_loss else passing.passing_bytes,
        "update": int(memory.update_bytes[number]),
        "shares": int(memory.shared_bytes[number]) if estimate.stage.shares_update else 0,
        "feedback": memory.feedback_bytes * len(groups),
    }
    return MemoryArithmetic(
        num_parameters=sum(cost.num_parameters for cost in layers),
        beyond=estimate.device_bytes - sum(parts.values()),
        reserve=device.reserve_bytes,
        usable=estimate.device_limit_bytes,
        **parts,
    )


def _seconds(costs: StageCosts, estimate: StageEstimate, slot: DeviceSlot, num_replicas: int) -> SecondsArithmetic:
    layers, recompute = estimate.stage.layers, estimate.stage.recompute
    first = costs.slices.names.index(layers[0])
    index = costs.slices.slice_number((first, first + len(layers)), recompute)
    each, update = costs.seconds(slot)
    if estimate.stage.shares_update:
        update = costs.shared_update_seconds(slot, num_replicas)
    flops = sum(cost.forward_flops + cost.backward_flops for cost in costs.slices.layers_of(layers, recompute))
    return SecondsArithmetic(
        flops=flops,
        flops_per_s=flops / float(each[index]),
        microbatch_s=float(each[index]),
        num_microbatches=round(estimate.share * costs.num_microbatches),
        update_s=float(update[index]),
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"
