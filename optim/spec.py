"""`[optim]` of a job: the optimizer of each group of parameters, and the schedule of the rate. No torch here."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

DECAY_SHARE = 5
"""Warm-up–stable–decay falls over the last ⌈B / DECAY_SHARE⌉ updates."""

Kind = Literal["constant", "cosine", "wsd"]
AfterEnd = Literal["", "floor", "warm_up_again"]

LrSchedule = Callable[[int], float]
"""Map from the update's index b to the factor of every group's rate."""


def lr_schedule(
    kind: Kind,
    *,
    num_batches: int,
    warmup_batches: int,
    floor: float = 0.0,
    schedule_batches: int = 0,
    after_end: AfterEnd = "",
) -> LrSchedule:
    """Return the factor of update b = 0 … num_batches − 1: that of one schedule, or of one and what follows its end.

    schedule_batches: length S of the schedule; 0: the whole job. after_end: from update S on, the floor, or a second
    schedule over the other updates, which begins with the warm-up. An index outside the job raises ValueError.
    """
    end = schedule_batches or num_batches
    first = _one_schedule(kind, end, warmup_batches, floor)
    again = _one_schedule(kind, num_batches - end, warmup_batches, floor)

    def factor(update_index: int) -> float:
        if not 0 <= update_index < num_batches:
            raise ValueError(f"update {update_index} is not one of a job with {num_batches} batches")
        if update_index < end:
            return first(update_index)
        return floor if after_end == "floor" else again(update_index - end)

    return factor


def _one_schedule(kind: Kind, num_batches: int, warmup_batches: int, floor: float) -> LrSchedule:
    """Return the factor of update b = 0 … B−1, B being `num_batches`.

    (b+1)/w in the first w updates; then 1 (constant), ½(1 + cos(π(b−w)/(B−w))) (cosine), or 1 and over the last
    n = ⌈B/5⌉ updates (B−b)/n (wsd). A fall f ends at the floor φ: φ + (1 − φ)·f. Warm-up has precedence.
    """
    num_decay = -(-num_batches // DECAY_SHARE)

    def factor(update_index: int) -> float:
        if update_index < warmup_batches:
            return (update_index + 1) / warmup_batches
        if kind == "cosine":
            progress = (update_index - warmup_batches) / (num_batches - warmup_batches)
            return floor + (1.0 - floor) * (0.5 * (1.0 + math.cos(math.pi * progress)))
        if kind == "wsd" and update_index >= num_batches - num_decay:
            return floor + (1.0 - floor) * ((num_batches - update_index) / num_decay)
        return 1.0

    return factor


ABOVE_0: Final = "above 0"
OVERFLOW: Final = "float32 overflows beyond it"
Factor = Annotated[float, (ABOVE_0, 1e6, OVERFLOW)]
"""The type of a number says its bounds: the least, the largest, and why it is no larger."""

Undecayed = Literal["embeddings", "norms", "biases"]
"""`embeddings`: the two matrices of the vocabulary, in the first layer and in the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One optimizer and its settings; `OPTIMIZERS` says which one uses which. Others are refused when a job is read."""

    name: Literal["muon", "adamw", "lion", "sgd"]
    lr: Annotated[float, (ABOVE_0, 1e3, OVERFLOW)] = 3e-3
    weight_decay: Annotated[float, (0, 1e3, OVERFLOW)] = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, (ABOVE_0, 1, "it would drown what it is added to")] = 1e-8
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"
    newton_schulz_steps: Annotated[int, (1, 100, "each step is three matrix products")] = 5
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the running mean of the gradients between updates; AdamW's second moment stays float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSpec:
    """`[optim]`: 2-D weights inside the blocks go to `matrices`, everything else to `rest`."""

    matrices: GroupSpec = field(default_factory=lambda: GroupSpec(name="muon"))
    rest: GroupSpec = field(default_factory=lambda: GroupSpec(name="adamw"))
    error_feedback: Annotated[float, (0, 1e3, OVERFLOW)] = 1.0
    """α of docs/numerics.md; 0 turns it off."""
    error_feedback_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the last update between updates."""
    lr_schedule: Kind = "cosine"
    warmup_batches: Annotated[int, (0, 2**31 - 1, "a boundary's number has 31 bits")] = 20
    lr_floor: Annotated[float, (0, 1, "it is a share of the rate")] = 0.0
    """Share of the rate at which cosine and wsd end."""
    schedule_batches: Annotated[int, (0, 2**31 - 1, "a boundary's number has 31 bits")] = 0
    """Batches after which cosine and wsd have ended; 0: all of the job."""
    after_end: AfterEnd = ""
    """What follows that end; empty: the job ends with its schedule."""
    router_bias_lr: Annotated[float, (ABOVE_0, 1, "a score is at most 1")] = 1e-3
    """Step of a router's bias, before the schedule's factor."""
    undecayed: tuple[Undecayed, ...] = ()
    """Kinds of parameters of `rest` that have no weight decay."""

    def rate_factors(self, num_batches: int) -> LrSchedule:
        """Return the factor of the rates in each update of a job with so many batches."""
        return lr_schedule(
            self.lr_schedule,
            num_batches=num_batches,
            warmup_batches=self.warmup_batches,
            floor=self.lr_floor,
            schedule_batches=self.schedule_batches,
            after_end=self.after_end,
        )


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """What others have to know of an optimizer that a job can name. `layer_optimizer.py` makes it."""

    settings: frozenset[str]
    """Of GroupSpec, beside those that all use; others are refused when a job is read."""
    slots: tuple[str, ...]
    """Tensors that it keeps for each parameter once update 0 was applied: first the running mean, whose dtype is a
    setting. AdamW's step count is not among them: it is the update's index, which a boundary knows anyway.
    """
    step_tensors: int
    """Tensors of the stepped one's size, in float32, that a step takes for a moment."""


OPTIMIZERS: Final[dict[str, OptimizerKind]] = {
    "muon": OptimizerKind(
        frozenset({"momentum", "nesterov", "newton_schulz_dtype", "newton_schulz_steps"}), ("momentum_buffer",), 0
    ),
    "adamw": OptimizerKind(frozenset({"betas", "eps"}), ("exp_avg", "exp_avg_sq"), 2),
    "lion": OptimizerKind(frozenset({"betas"}), ("exp_avg",), 1),
    "sgd": OptimizerKind(frozenset({"momentum", "nesterov"}), ("momentum_buffer",), 2),
}
USED_BY_ALL: Final = frozenset({"lr", "weight_decay", "momentum_dtype"})
"""Settings of GroupSpec that every optimizer uses."""
