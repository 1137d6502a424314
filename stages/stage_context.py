"""What a stage is and where its tokens come from: what an executor is given for one generation."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headway.stages.codec import Codec
from headway.stages.frame_contract import FrameContract
from headway.stages.ids import Boundary, Generation, LayerName, StageIndex, Timeline
from headway.stages.spec import ModelSpec, TrainSpec


class MicrobatchSource(Protocol):
    """Where the first stage's tokens come from: `stages/tokens.py`, or a fake."""

    def microbatch(self, *, seed: int, batch: int, microbatch: int, size: int, length: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets), both int64 [size, length] on the CPU."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What a stage is, for the time of one generation."""

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
    """From which the stage starts."""
    device: torch.device
    replica_groups: tuple[tuple[int, ...], ...] = ()
    """The reduction groups of each replica of the stage, rising, sorted by the first; empty: there is only this one."""
    replica_index: int = 0
    """This worker's position among them."""
    upstream_codec: Codec = Codec.NONE
    downstream_codec: Codec = Codec.NONE
    """How the links with the stages before and after carry hidden states and gradients."""

    @property
    def contract(self) -> FrameContract:
        """Of the frames that the stages beside this one send."""
        return FrameContract.of(
            self.model, self.train, activations=self.upstream_codec, gradients=self.downstream_codec
        )

    @property
    def has_replicas(self) -> bool:
        """Whether other workers compute the same stage."""
        return len(self.replica_groups) > 1

    @property
    def is_lead(self) -> bool:
        """Whether it speaks for its stage: it holds group 0."""
        return self.replica_index == 0

    @property
    def groups(self) -> tuple[int, ...] | None:
        """The reduction groups that this worker holds; None: all."""
        return self.replica_groups[self.replica_index] if self.has_replicas else None
