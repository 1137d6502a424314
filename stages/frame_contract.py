"""Which frames a job's links carry: per kind, the tensors' types and shapes, and from these every bound on memory.

Both ends derive the same contract from the job, so nothing that a peer says decides how much memory is taken for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from headway.stages.link import FrameKind
from headway.stages.spec import ModelSpec, TrainSpec, layer_names

DOWNSTREAM_KINDS = frozenset({FrameKind.ACTIVATION, FrameKind.NORM_TOTAL})
UPSTREAM_KINDS = frozenset({FrameKind.GRADIENT, FrameKind.NORM_SQUARES})

ALIGNMENT_BYTES = 64
"""Every tensor of a payload begins at a multiple of this; the gap is zeros."""


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The type and shape that a tensor must have; with `may_be_shorter`, its first dimension at most."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    may_be_shorter: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the largest tensor of this form."""
        return prod(self.shape) * self.dtype.itemsize

    def fits(self, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        """Whether a tensor of this type and shape is allowed."""
        if dtype != self.dtype or len(shape) != len(self.shape):
            return False
        if self.may_be_shorter:
            return 0 <= shape[0] <= self.shape[0] and tuple(shape[1:]) == self.shape[1:]
        return tuple(shape) == self.shape


@dataclass(frozen=True, slots=True)
class FrameContract:
    """The forms of each kind's tensors, and how many of the largest frames one side may have unacknowledged."""

    forms: Mapping[FrameKind, tuple[TensorForm, ...]]
    max_unacknowledged_frames: int

    @classmethod
    def of(cls, model: ModelSpec, train: TrainSpec) -> "FrameContract":
        """What a job's stages say to each other. No schedule has more than 2m microbatches in flight on a stage."""
        tokens = (train.microbatch_size, train.sequence_length)
        hidden = TensorForm(getattr(torch, train.dtype), (*tokens, model.hidden_size))
        return cls(
            forms={
                FrameKind.ACTIVATION: (hidden, TensorForm(torch.int64, tokens)),
                FrameKind.GRADIENT: (hidden,),
                FrameKind.NORM_SQUARES: (TensorForm(torch.float64, (len(layer_names(model)),), may_be_shorter=True),),
                FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
            },
            max_unacknowledged_frames=2 * train.microbatches + 4,
        )

    @property
    def max_frame_bytes(self) -> int:
        """Payload of the largest frame."""
        return max(sum(aligned(form.num_bytes) for form in forms) for forms in self.forms.values())

    @property
    def max_unacknowledged_bytes(self) -> int:
        """What one side may have handed over and not yet seen acknowledged."""
        return self.max_unacknowledged_frames * self.max_frame_bytes

    def violation(self, kind: FrameKind, tensors: Sequence[tuple[torch.dtype, Sequence[int]]]) -> str | None:
        """What is wrong with a frame of these tensors, or None."""
        forms = self.forms.get(kind, ())
        if len(tensors) != len(forms):
            return f"{kind.name} with {len(tensors)} tensors instead of {len(forms)}"
        for position, (form, (dtype, shape)) in enumerate(zip(forms, tensors, strict=True)):
            if not form.fits(dtype, shape):
                return (
                    f"{kind.name} tensor {position} is {dtype} {list(shape)} instead of {form.dtype} {list(form.shape)}"
                )
        return None
