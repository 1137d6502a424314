"""What a stage is for the time of one generation, and the links of its worker."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.stages.ids import Batch, Boundary, Generation, LayerName, MicrobatchIndex, StageIndex, Timeline
from headway.stages.links.codec import Codec
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Frame, FrameKind, Link
from headway.stages.schedule.stage_schedule import StageSchedule
from headway.stages.spec import MIXING_HALF, MLP_HALF, ModelSpec, TrainSpec, whole_layer
from headway.stages.update_shares import UpdateShares


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLinks:
    """The links of a worker. A frame of microbatch i goes to the neighbour that holds group i mod G.

    Several groups may share a link. Only the link of group 0 carries the norm: it joins the leading replicas of both
    stages.
    """

    upstream: Mapping[int, Link] = field(default_factory=dict)
    """Links by the reduction groups that this worker holds; empty on the first stage."""
    downstream: Mapping[int, Link] = field(default_factory=dict)
    """Links by the reduction groups that this worker holds; empty on the last stage."""
    siblings: Mapping[int, Link] = field(default_factory=dict)
    """Links by position among the stage's replicas, without this one; empty when it is alone on its stage."""

    tied: Mapping[int, Link] = field(default_factory=dict)
    """Links to the other end of a tied embedding, by the reduction groups that this worker holds; empty elsewhere."""

    @property
    def upstream_lead(self) -> Link | None:
        """Return the link to the lead of the stage before, if both lead."""
        return self.upstream.get(0)

    @property
    def downstream_lead(self) -> Link | None:
        """Return the link to the lead of the stage after, if both lead."""
        return self.downstream.get(0)


PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """One worker's place in a plan, and the rules of its job."""

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
    update_shares: UpdateShares | None = None
    """Which replica orthogonalises which matrices; None: each all of them."""
    group_by_group: bool = False
    """Whether no stage of the plan has replicas: one reduction group's microbatches come after another's."""
    upstream_codec: Codec = Codec.NONE
    downstream_codec: Codec = Codec.NONE
    """How the links with the stages before and after carry hidden states and gradients."""
    patience_s: float = PATIENCE_S
    """How long nothing at all may arrive while the stage waits."""
    stops_at_non_finite: bool = True
    """Whether a loss that is not finite ends the run."""

    @property
    def is_first(self) -> bool:
        """Return whether it reads the tokens."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Return whether it computes the loss."""
        return self.stage_index == self.num_stages - 1

    @property
    def has_tied_end(self) -> bool:
        """Return whether another stage trains the same embedding: this one is the first or the last, that the other."""
        return self.model.trains_tie and self.is_first != self.is_last

    @property
    def cut_above(self) -> str:
        """Return the MLP if the stage begins inside a block; empty: it does not."""
        return self.layers[0] if self.layers[0].endswith(f".{MLP_HALF}") else ""

    @property
    def cut_below(self) -> str:
        """Return the MLP of the next stage if this one ends inside a block; empty: it does not."""
        last = self.layers[-1]
        return f"{whole_layer(last)}.{MLP_HALF}" if last.endswith(f".{MIXING_HALF}") else ""

    @property
    def contract(self) -> FrameContract:
        """Return the contract of the frames from neighbouring stages, and from the other end of a tied embedding."""
        return FrameContract.of(
            self.model,
            self.train,
            has_ties=self.has_tied_end,
            activations=self.upstream_codec,
            gradients=self.downstream_codec,
            cut=self.cut_below,
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

    @property
    def schedule(self) -> StageSchedule:
        """Return this worker's part of the schedule."""
        return StageSchedule.of(
            self.train,
            stage_index=self.stage_index,
            num_stages=self.num_stages,
            depth=self.depth,
            first_batch=self.boundary,
            groups=self.groups,
            group_by_group=self.group_by_group,
            shares_update=self.update_shares is not None,
        )

    def by_microbatch(self, links: Mapping[int, Link]) -> tuple[Link | None, ...]:
        """Return the link of each microbatch of a batch; None: there is none, or another replica has the microbatch."""
        return tuple(links.get(i % self.train.reduction_groups) for i in range(self.train.microbatches))

    def frame(self, kind: FrameKind, batch: int, microbatch: int, *tensors: Tensor) -> Frame:
        """A frame of this generation."""
        return Frame(kind, self.generation, Batch(batch), MicrobatchIndex(microbatch), tensors)
