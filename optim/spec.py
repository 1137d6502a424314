"""`[optim]` of a job: the optimizer of each group of parameters, and the schedule of the rate. No torch here."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from headway.stages.plugin_names import PluginError, Settings

DECAY_SHARE = 5
"""Warm-up–stable–decay falls over the last ⌈B / DECAY_SHARE⌉ updates."""

Kind = Literal["constant", "cosine", "wsd"]
AfterEnd = Literal["", "floor", "warm_up_again"]

AdjustLr = Literal["original", "match_rms_adamw"]
Coefficients = Literal["quintic", "polar_express"]

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

Beta = Annotated[float, (0, 0.999, "a mean of more than a thousand updates is of no use")]

Undecayed = Literal["embeddings", "norms", "biases"]
"""`embeddings`: the two matrices of the vocabulary, in the first layer and in the last."""


Shape = tuple[int, ...]
SIDES: Final = ("rows", "cols")


def _nothing(_shape: Shape, _group: "GroupSpec") -> dict[str, Shape]:
    return {}


def _row_means(shape: Shape, _group: "GroupSpec") -> dict[str, Shape]:
    return {"row_mean_sq": (shape[0], 1)}


def _bases(shape: Shape, group: "GroupSpec") -> dict[str, Shape]:
    sides = [(name, size) for name, size in zip(SIDES, shape, strict=True) if size <= group.max_precondition_dim]
    return {f"{what}_{name}": (size, size) for what in ("gram", "basis") for name, size in sides}


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """What others have to know of an optimizer: a class, made with parameters, lr, weight_decay and its settings."""

    path: str
    """Import path of a `torch.optim.Optimizer` that steps each parameter alone, as docs/plugins.md describes."""
    settings: frozenset[str]
    """Of GroupSpec, beside those that all use; others are refused when a job is read."""
    slots: tuple[str, ...]
    """Tensors of its parameter's shape that it keeps once update 0 was applied: first the running mean, whose dtype is
    a setting.
    """
    step_tensors: int
    """Tensors of the stepped one's size, in float32, that a step takes for a moment."""
    counts_steps: bool = False
    """Whether it keeps a step count too. It is the update's index, which a boundary knows anyway."""
    takes_matrices_only: bool = False
    newton_schulz: float = 0.0
    """Share of its updates that orthogonalise. At 1 it is a `Muon`, whose results replicas may share."""
    more: Callable[[Shape, "GroupSpec"], dict[str, Shape]] = _nothing
    """Its float32 tensors of other shapes, for a parameter of one."""
    step_more: int = 0
    """Tensors of the largest of those that a step takes at another moment."""

    @property
    def is_muon(self) -> bool:
        """Return whether every update orthogonalises."""
        return self.newton_schulz == 1.0


NEWTON_SCHULZ: Final = ("newton_schulz_dtype", "newton_schulz_steps", "newton_schulz_coefficients")
OPTIMIZERS: Final[dict[str, OptimizerKind]] = {
    "muon": OptimizerKind(
        "headway.optim.muon:Muon",
        frozenset({"momentum", "nesterov", "adjust_lr", *NEWTON_SCHULZ}),
        ("momentum_buffer",),
        0,
        takes_matrices_only=True,
        newton_schulz=1.0,
    ),
    "normuon": OptimizerKind(
        "headway.optim.normuon:NorMuon",
        frozenset({"momentum", "nesterov", "adjust_lr", "beta2", "eps", *NEWTON_SCHULZ}),
        ("momentum_buffer",),
        2,
        takes_matrices_only=True,
        newton_schulz=1.0,
        more=_row_means,
    ),
    "lionmuon": OptimizerKind(
        "headway.optim.lion_muon:LionMuon",
        frozenset({"betas", "sign_share", *NEWTON_SCHULZ}),
        ("exp_avg",),
        0,
        counts_steps=True,
        takes_matrices_only=True,
        newton_schulz=0.5,
    ),
    "soap": OptimizerKind(
        "headway.optim.soap:Soap",
        frozenset({"betas", "eps", "precondition_frequency", "max_precondition_dim"}),
        ("exp_avg", "exp_avg_sq"),
        3,
        counts_steps=True,
        takes_matrices_only=True,
        more=_bases,
        step_more=4,
    ),
    "adamw": OptimizerKind(
        "headway.optim.eager:EagerAdamW", frozenset({"betas", "eps"}), ("exp_avg", "exp_avg_sq"), 2, counts_steps=True
    ),
    "adan": OptimizerKind(
        "headway.optim.adan:Adan",
        frozenset({"betas", "beta3", "eps"}),
        ("exp_avg", "exp_avg_diff", "exp_avg_sq", "last_gradient"),
        3,
        counts_steps=True,
    ),
    "mars": OptimizerKind(
        "headway.optim.mars:Mars",
        frozenset({"betas", "gamma", "eps"}),
        ("exp_avg", "exp_avg_sq", "last_gradient"),
        3,
        counts_steps=True,
    ),
    "lion": OptimizerKind("headway.optim.lion:Lion", frozenset({"betas"}), ("exp_avg",), 1),
    "sgd": OptimizerKind("headway.optim.eager:EagerSGD", frozenset({"momentum", "nesterov"}), ("momentum_buffer",), 2),
}
"""The optimizers that a job can name. A job's own ones have the import path of a plug-in instead."""
USED_BY_ALL: Final = frozenset({"lr", "weight_decay", "momentum_dtype"})
"""Settings of GroupSpec that every optimizer here uses."""
USED_BY_PLUGINS: Final = frozenset({"lr", "weight_decay", "settings"})
PLUGIN_STEP_TENSORS: Final = 3
"""What is assumed of a plug-in's step."""
STEP_COUNT: Final = "step"


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor that an optimizer keeps for a parameter between two updates."""

    slot: str
    shape: tuple[int, ...]
    dtype: str
    """`int` if the slot is STEP_COUNT, and a number of Python's."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """What a plug-in's optimizer keeps for a parameter of one shape."""

    shape: tuple[int, ...]
    tensors: tuple[StateTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One optimizer and its settings; its kind says which it uses. Others are refused when a job is read."""

    name: str
    """One of `OPTIMIZERS`, or the import path of a plug-in."""
    lr: Annotated[float, (ABOVE_0, 1e3, OVERFLOW)] = 3e-3
    weight_decay: Annotated[float, (0, 1e3, OVERFLOW)] = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    betas: tuple[float, float] = (0.9, 0.95)
    beta2: Beta = 0.95
    """NorMuon's, of the mean of each row."""
    beta3: Beta = 0.99
    """Adan's third."""
    eps: Annotated[float, (ABOVE_0, 1, "it would drown what it is added to")] = 1e-8
    gamma: Annotated[float, (0, 1, "1 is the whole correction")] = 0.025
    """Strength of the correction by MARS."""
    sign_share: Annotated[float, (ABOVE_0, 1e3, OVERFLOW)] = 0.01
    """Rate of LionMuon's odd updates over that of its even ones."""
    precondition_frequency: Annotated[int, (1, 2**31 - 1, "a boundary's number has 31 bits")] = 10
    """SOAP turns its bases each so many updates."""
    max_precondition_dim: Annotated[int, (0, 2**31 - 1, "no matrix has a longer side")] = 10_000
    """SOAP has no basis for a longer side."""
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"
    newton_schulz_steps: Annotated[int, (1, 100, "each step is three matrix products")] = 5
    newton_schulz_coefficients: Coefficients = "quintic"
    """One triple for all steps, or one for each."""
    adjust_lr: AdjustLr = "original"
    """Factor of a matrix's rate by its shape. LionMuon's is its own."""
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the running mean of the gradients between updates; all other state stays float32."""
    settings: Settings = ()
    """Of a plug-in: its other keywords."""
    kept: tuple[KeptState, ...] = field(default=(), metadata={"not_in_files": True})
    """Of a plug-in: what it keeps for each shape of parameter, counted when the job is submitted."""

    @property
    def is_plugin(self) -> bool:
        """Return whether the optimizer is a job's own."""
        return self.name not in OPTIMIZERS

    @property
    def kind(self) -> OptimizerKind:
        """Return what is known of the optimizer."""
        own = OptimizerKind(self.name, frozenset(), (), PLUGIN_STEP_TENSORS)
        return OPTIMIZERS.get(self.name, own)

    def state_of(self, shape: tuple[int, ...]) -> tuple[StateTensor, ...]:
        """Return what the optimizer keeps for a parameter of a shape, once update 0 was applied.

        A shape that only its number of elements tells of, as in the counting of costs, stands for another of that size.
        Raises PluginError for one that was not counted when the job was submitted.
        """
        if self.is_plugin:
            alike = sorted(self.kept, key=lambda each: each.shape != shape)
            for each in alike:
                if math.prod(each.shape) == math.prod(shape):
                    return each.tensors
            raise PluginError(self.name, f"its state for a parameter of shape {list(shape)} was never counted")
        slots = () if self.name == "sgd" and self.momentum == 0 else self.kind.slots
        dtypes = (self.momentum_dtype, *["float32"] * len(slots))
        found = [StateTensor(slot, shape, dtype) for slot, dtype in zip(slots, dtypes, strict=False)]
        found += [StateTensor(slot, own, "float32") for slot, own in self.kind.more(shape, self).items()]
        return tuple([*found, StateTensor(STEP_COUNT, (), "float32")] if self.kind.counts_steps else found)


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
    """Where a file leaves it out, `warmup_share` decides."""
    warmup_share: Annotated[float, (0, 0.9, "the rate would hardly do anything but rise")] = 0.1
    """Share of the schedule's batches in which the rate rises."""
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
