"""A stage's identity, and the source of its tokens: an executor's input for one generation."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headway.stages.ids import Boundary, Generation, LayerName, StageIndex, Timeline
from headway.stages.links.codec import Codec
from headway.stages.links.frame_contract import FrameContract
from headway.stages.spec import ModelSpec, TrainSpec


class MicrobatchSource(Protocol):
    """The source of the first stage's tokens: `stages/data/tokens.py`, or a fake."""

    def microbatch(self, *, seed: int, batch: int, microbatch: int, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets), both int64 [size, length] on the CPU."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """The identity of a stage, during one generation."""

    model: ModelSpec
    train: TrainSpec
    seed: int
    job: str
    generation: Generation
    timeline: Timeline
    stage_index: StageIndex
    num_stages: int
    layers: tuple[LayerName, ...]
    depth: int
    boundary: Boundary
    """Boundary at which the stage starts."""
    device: torch.device
    replica_groups: tuple[tuple[int, ...], ...] = ()
    """Reduction groups of each replica of the stage, rising, sorted by the first; empty: there is only this one."""
    replica_index: int = 0
    """Position of this worker among them."""
    upstream_codec: Codec = Codec.NONE
    downstream_codec: Codec = Codec.NONE
    """Codecs of hidden states and gradients on the links with the stages before and after."""

    @property
    def contract(self) -> FrameContract:
        """Return the contract of the frames from neighbouring stages."""
        return FrameContract.of(
            self.model, self.train, activations=self.upstream_codec, gradients=self.downstream_codec
        )

    @property
    def has_replicas(self) -> bool:
        """Return whether other workers compute this stage too."""
        return len(self.replica_groups) > 1

    @property
    def is_lead(self) -> bool:
        """Return whether it leads its stage: it holds group 0."""
        return self.replica_index == 0

    @property
    def groups(self) -> tuple[int, ...] | None:
        """Return the reduction groups of this worker; None: all."""
        return self.replica_groups[self.replica_index] if self.has_replicas else None
