"""What keeps a job from running well on cards although it has a plan: sentences for people. Pure."""

from collections.abc import Collection, Iterable
from typing import Final

from headway.daemon.base.terminal import counted
from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.jobs.device_defaults import why_float32
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.devices import FIXED_BYTES, GIB
from headway.daemon.plan.layer_costs import CUDA_FLOPS, GIGA

FEW_TOKENS: Final = 2048
"""Below this a card adds up gradients for longer than a sixth of its products."""
SUM_BYTES: Final = 10
"""What adding one parameter's gradient in bfloat16 to its sum reads and writes."""


def hints(
    spec: JobSpec, nodes: Iterable[NodeRecord], used: Collection[tuple[str, int]], *, named: Collection[str] | None
) -> tuple[str, ...]:
    """Return the hints for a plan. used: its (node, device). named: as for `for_devices`."""
    places = [(node.name, device) for node in nodes for device in node.devices if device.kind == "cuda"]
    of_plan = [(name, device) for name, device in places if (name, device.index) in used]
    why = why_float32(spec, [device for _, device in places], named=named)
    found = (f"{why[0].upper()}{why[1:]}." if why else "", _few_tokens(spec, [device for _, device in of_plan]))
    return tuple(filter(None, (*found, _small_reserve(of_plan))))


def _few_tokens(spec: JobSpec, cards: Iterable[Device]) -> str:
    """Return what part of its products' time a card adds up gradients for; empty: microbatches are large enough."""
    train = spec.train
    tokens = train.microbatch_size * train.sequence_length
    if tokens >= FEW_TOKENS or spec.model.has_adapter:
        return ""
    known = [card for card in cards if card.memory_gb_s]
    shares = [
        SUM_BYTES / (card.memory_gb_s * GIGA) * CUDA_FLOPS[train.dtype] * card.speed_of(train.dtype) / (6 * tokens)
        for card in known
    ]
    if not shares:
        return ""
    return (
        f"A microbatch has {counted(tokens, 'token')}: a card adds up its gradients for {max(shares):.0%} of the time "
        f"of its products. From {FEW_TOKENS:,} tokens on it would be {max(shares) * tokens / FEW_TOKENS:.0%} or less: "
        "raise microbatch_size, and lower microbatches."
    )


def _small_reserve(cards: Iterable[tuple[str, Device]]) -> str:
    """Return which nodes leave less than a CUDA context and the libraries take; empty: none."""
    short = sorted({name for name, card in cards if card.memory_bytes and card.reserve_bytes < FIXED_BYTES})
    if not short:
        return ""
    return (
        f"The reserve of {' and '.join(short)} is below {FIXED_BYTES / GIB:g} GiB a card, which a CUDA context, work "
        "space and NCCL take: a worker may run out of memory although its plan fits."
    )
