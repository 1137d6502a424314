"""What a stage is and where its tokens come from: what an executor is given for one generation."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
