"""Defines the frames of a job's links: per kind, the tensors' types and shapes, and from these every bound on memory.

Between neighbouring stages both directions have equal forms. Between replicas of a stage each direction has its own,
which depend on the groups and the slices of the two.

Both ends derive one contract from the job, so no message of a peer decides how much memory is taken for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from headway.stages.links.codec import Codec, num_blocks
from headway.stages.links.link import FrameKind
from headway.stages.model.decoder import trained_shapes
from headway.stages.spec import ModelSpec, TrainSpec, layer_names
from headway.stages.sums import slice_bounds
from headway.stages.update_shares import UpdateShares

DOWNSTREAM_KINDS = frozenset({FrameKind.ACTIVATION, FrameKind.EVALUATION, FrameKind.NORM_TOTAL, FrameKind.TIED_SUMS})
UPSTREAM_KINDS = frozenset({FrameKind.GRADIENT, FrameKind.NORM_SQUARES, FrameKind.TIED_SUMS, FrameKind.JOB_END})
REPLICA_KINDS = frozenset({FrameKind.SUMS, FrameKind.REDUCED, FrameKind.UPDATE_SHARE, FrameKind.LOSSES, FrameKind.STOP})
"""Kinds that only replicas of one stage exchange."""
SIBLING_KINDS = REPLICA_KINDS | {FrameKind.NORM_TOTAL, FrameKind.JOB_END}
_LEADS_KINDS = frozenset({FrameKind.NORM_SQUARES, FrameKind.NORM_TOTAL, FrameKind.JOB_END})

ALIGNMENT_BYTES = 64
"""Every tensor of a payload begins at a multiple of this; the gap is zeros."""


def aligned(num_bytes: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The type and shape that a tensor must have; with `may_be_shorter`, its first dimension is a maximum."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    may_be_shorter: bool = False

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the largest tensor of this form."""
        return prod(self.shape) * self.dtype.itemsize

    def fits(self, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this type and shape is allowed."""
        if dtype != self.dtype or len(shape) != len(self.shape):
            return False
        if self.may_be_shorter:
            return 0 <= shape[0] <= self.shape[0] and tuple(shape[1:]) == self.shape[1:]
        return tuple(shape) == self.shape


_JOB_END = TensorForm(torch.int64, (2,))


@dataclass(frozen=True, slots=True)
class FrameContract:
    """The forms of each kind's tensors, and how many of the largest frames one side may have unacknowledged."""

    forms: Mapping[FrameKind, tuple[TensorForm, ...]]
    """Forms of arriving frames."""
    max_unacknowledged_frames: int
    sent_forms: Mapping[FrameKind, tuple[TensorForm, ...]] = field(default_factory=dict)
    """Forms of sent frames, if they differ."""
    codecs: Mapping[FrameKind, Codec] = field(default_factory=dict)
    """Codecs of the coded kinds."""

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        train: TrainSpec,
        *,
        has_norms: bool = True,
        has_ties: bool = False,
        activations: Codec = Codec.NONE,
        gradients: Codec = Codec.NONE,
        cut: str = "",
    ) -> "FrameContract":
        """Return the contract between a job's stages. No schedule has more than 2m microbatches in flight on a stage.

        has_norms: only the leading replicas of two stages exchange the norm, and the job's end. has_ties: these are the
        first and the last stage of a tied embedding. activations, gradients: their codecs, which are equal on one link.
        cut: the MLP with which the lower one begins, if that is inside a block: its parameters' squares travel too.
        """
        num_squares = len(layer_names(model)) + (len(trained_shapes(cut, model)) if cut else 0)
        hidden = TensorForm(getattr(torch, train.dtype), (train.hidden_rows, train.sequence_length, model.hidden_size))
        forms = {
            FrameKind.ACTIVATION: (*_coded(hidden, activations), *_beside(train)),
            **({FrameKind.EVALUATION: (hidden, *_beside(train))} if train.eval_every else {}),
            FrameKind.GRADIENT: _coded(hidden, gradients),
            FrameKind.NORM_SQUARES: (TensorForm(torch.float64, (num_squares,), may_be_shorter=True),),
            FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
            **({FrameKind.JOB_END: (_JOB_END,)} if train.stops_early else {}),
        }
        ties = cls.between_ends(model, train)
        return cls(
            forms={
                **{kind: form for kind, form in forms.items() if has_norms or kind not in _LEADS_KINDS},
                **(ties.forms if has_ties else {}),
            },
            max_unacknowledged_frames=(4 if train.eval_every else 2) * train.microbatches
            + (ties.max_unacknowledged_frames if has_ties else 0)
            + (8 if train.stops_early else 4),
            codecs={FrameKind.ACTIVATION: activations, FrameKind.GRADIENT: gradients},
        )

    @classmethod
    def between_ends(cls, model: ModelSpec, train: TrainSpec) -> "FrameContract":
        """Return the contract between the first and the last stage of a tied embedding, if they are no neighbours."""
        tied = TensorForm(torch.float32, (model.vocab_size, model.hidden_size))
        return cls(
            forms={FrameKind.TIED_SUMS: (tied,)},
            max_unacknowledged_frames=train.reduction_groups * (2 + train.delay),
        )

    @classmethod
    def between_replicas(
        cls,
        model: ModelSpec,
        train: TrainSpec,
        *,
        layers: Sequence[str],
        replica_groups: Sequence[Sequence[int]],
        own: int,
        sibling: int,
        update_shares: UpdateShares | None = None,
    ) -> "FrameContract":
        """Return the contract between two replicas of the stage of these layers, at positions `own` and `sibling`.

        A replica is at most one batch and the delay ahead of the frames by which the other has acknowledged its own.
        """

        def said_by(speaker: int, listener: int) -> dict[FrameKind, tuple[TensorForm, ...]]:
            bounds = slice_bounds(num_elements(layers, model), len(replica_groups))
            lengths = [stop - start for start, stop in bounds]
            groups = replica_groups[speaker]
            forms: dict[FrameKind, tuple[TensorForm, ...]] = {
                FrameKind.SUMS: (TensorForm(torch.float32, (len(groups), lengths[listener])),),
                FrameKind.REDUCED: (TensorForm(torch.float32, (lengths[speaker],)),),
            }
            if listener == 0 and layers[-1] == layer_names(model)[-1]:
                held = [i for i in range(train.microbatches) if i % train.reduction_groups in groups]
                num_held_out = sum(train.evaluates(0, i) for i in held)
                most = len(held) + num_held_out
                forms[FrameKind.LOSSES] = (TensorForm(torch.float32, (most,), may_be_shorter=num_held_out > 0),)
            if update_shares is not None and update_shares.num_elements[speaker]:
                share = (update_shares.num_elements[speaker],)
                forms[FrameKind.UPDATE_SHARE] = (TensorForm(update_shares.dtype, share),)
            if speaker == 0:
                forms[FrameKind.NORM_TOTAL] = (TensorForm(torch.float64, ()),)
                if train.stops_early:
                    forms[FrameKind.JOB_END] = (_JOB_END,)
            if speaker == 0 and layers[0] == layer_names(model)[0]:
                forms[FrameKind.STOP] = (TensorForm(torch.int64, ()),)
            return forms

        return cls(
            forms=said_by(sibling, own),
            max_unacknowledged_frames=len(SIBLING_KINDS) * (2 + train.delay),
            sent_forms=said_by(own, sibling),
        )

    def largest(self, kind: FrameKind) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """Return types and shapes of the tensors of the largest arriving frame of this kind."""
        return tuple((form.dtype, form.shape) for form in self.forms[kind])

    @property
    def max_frame_bytes(self) -> int:
        """Return the payload of the largest frame."""
        all_forms = (*self.forms.values(), *self.sent_forms.values())
        return max(sum(aligned(form.num_bytes) for form in forms) for forms in all_forms)

    @property
    def max_unacknowledged_bytes(self) -> int:
        """Return the bytes that one side may have sent and not yet seen acknowledged."""
        return self.max_unacknowledged_frames * self.max_frame_bytes

    def violation(
        self, kind: FrameKind, tensors: Sequence[tuple[torch.dtype, Sequence[int]]], codec: int = Codec.NONE
    ) -> str | None:
        """Return how a frame of these tensors violates the contract, or None."""
        if (miscoded := self.miscoded(kind, codec)) is not None:
            return miscoded
        if kind not in self.forms:
            return f"{kind.name}, which this link does not carry"
        forms = self.forms[kind]
        if len(tensors) != len(forms):
            return f"{kind.name} with {len(tensors)} tensors instead of {len(forms)}"
        for position, (form, (dtype, shape)) in enumerate(zip(forms, tensors, strict=True)):
            if not form.fits(dtype, shape):
                return (
                    f"{kind.name} tensor {position} is {dtype} {list(shape)} instead of {form.dtype} {list(form.shape)}"
                )
        return None

    def miscoded(self, kind: FrameKind, codec: int) -> str | None:
        """Return how a frame with this codec violates the contract, or None."""
        wanted = self.codecs.get(kind, Codec.NONE)
        if codec == wanted:
            return None
        said = Codec(codec).name.lower() if codec in set(Codec) else f"number {codec}"
        return f"{kind.name} with codec {said}, the plan has {wanted.name.lower()} here"


def _beside(train: TrainSpec) -> tuple[TensorForm, ...]:
    """Return the forms of what travels with hidden states, in the order of `Microbatch.tensors`."""
    tokens = (train.microbatch_size, train.sequence_length)
    return (
        *([TensorForm(torch.int32, tokens)] if train.separates_documents else []),
        TensorForm(torch.int64, tokens),
        *([TensorForm(torch.float32, ())] if train.has_mask else []),
    )


def _coded(values: TensorForm, codec: Codec) -> tuple[TensorForm, ...]:
    """Return the form that `compression.encode` makes of a tensor of this form."""
    match codec:
        case Codec.NONE:
            return (values,)
        case Codec.BF16:
            return (TensorForm(torch.bfloat16, values.shape),)
        case Codec.INT8:
            return TensorForm(torch.int8, values.shape), TensorForm(torch.float32, (num_blocks(prod(values.shape)),))


def num_elements(layers: Sequence[str], model: ModelSpec) -> int:
    """Return the number of elements of all trained parameters of these layers."""
    return sum(shape.numel() for layer in layers for shape in trained_shapes(layer, model).values())
