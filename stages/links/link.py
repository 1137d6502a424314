"""The frames between workers, and the Protocol that every kind of link (transport) implements."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.codec import Codec


class FrameKind(IntEnum):
    """The kinds of frame on a link; the numbers are those of data.proto."""

    ACTIVATION = 1  # downstream: (hidden, as coded, [positions,] targets[, mean_tokens]): stages/data/microbatch.py
    GRADIENT = 2  # upstream: (gradient of hidden,)
    NORM_SQUARES = 3  # upstream: (float64 [layers so far], last layer first,)
    NORM_TOTAL = 4  # downstream, and from the leading replica to the others: (float64 [] total of the squares,)
    SUMS = 7  # between replicas: (float32 [groups of the sender, slice of the receiver],)
    REDUCED = 8  # between replicas: (float32 [slice of the sender] of the mean gradient,)
    LOSSES = 9  # to the leading replica of the last stage: (float32 [own microbatches, held-out ones], in order,)
    STOP = 10  # from the leading replica of the first stage to the others: (int64 [] boundary,)
    UPDATE_SHARE = 11  # between replicas: (as iterated, [elements of the sender's share of the update],)
    EVALUATION = 12  # downstream, ahead of the ACTIVATION of its number: a held-out microbatch, never coded
    TIED_SUMS = 13  # between first and last stage: (float32 [vocabulary, hidden] of one group, for a tied embedding,)
    JOB_END = 14  # upstream, and from the leading replica to the others: (int64 [2] boundary, best batch,)


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of one generation.

    The norm kinds, STOP and JOB_END have microbatch 0. The microbatch of SUMS, REDUCED, LOSSES and UPDATE_SHARE is the
    sender's first one, which identifies the sender. That of TIED_SUMS is the group.
    """

    kind: FrameKind
    generation: Generation
    batch: Batch
    microbatch: MicrobatchIndex
    tensors: tuple[Tensor, ...]
    codec: Codec = Codec.NONE
    """Codec of the hidden states or of their gradient: then one tensor or two (stages/links/compression.py)."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The neighbour is gone for good: the link could not be resumed within its deadline."""

    peer: str
    reason: str
    was_unreached: bool = False
    """True if the neighbour was dialled and never answered, not even that it is not ready yet."""


class Inbox(Protocol):
    """Receives a link's frames. Must never block: `queue.SimpleQueue` fits."""

    def put(self, item: "Frame | LinkLost") -> None: ...


class Link(Protocol):
    """One neighbour. Frames arrive in the peer's order, in the inbox of the link."""

    @property
    def peer(self) -> str:
        """Return the other end's name, for error messages: `stage 2 at 10.0.0.7:4711`."""
        ...

    def send(self, frame: Frame) -> None:
        """Hand the frame over and return at once. The tensors must not be written to afterwards.

        The link has room for the frames of the stage's whole depth; `LinkLost` reports a break.
        """
        ...

    def close(self) -> None:
        """Stop both directions. Idempotent; no frame arrives in the inbox afterwards."""
        ...
