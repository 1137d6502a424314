"""What a stage computes on: its layers, where its tokens come from, and where its losses and snapshots go."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.stages.data.microbatch import Microbatch
from headway.stages.spec import TrainSpec
from headway.stages.stage.snapshots import Snapshots
from headway.stages.state.journal import Journal
from headway.stages.state.layer_state import LayerState


class MicrobatchSource(Protocol):
    """Where the first stage's tokens come from: `stages/data/tokens.py`, or a fake."""

    def microbatch(self, train: TrainSpec, *, seed: int, batch: int, microbatch: int) -> Microbatch:
        """A microbatch of a job, in host memory."""
        ...

    def held_out(self, train: TrainSpec, microbatch: int) -> Microbatch:
        """A microbatch of an evaluation, in host memory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContent:
    """Live, at the context's boundary. The executor alone touches it until its run is over."""

    layers: Sequence[LayerState]
    tokens: MicrobatchSource | None = None
    """On the first stage only."""
    journal: Journal | None = None
    """On the lead of the last stage only. Rows from the boundary on are cut off."""
    snapshots: Snapshots | None = None
    """None: no boundary is written while the stage runs."""
