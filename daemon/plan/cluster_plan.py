"""The planner's answer: a plan with its figures and sentences, or a refusal with its arithmetic. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headway.daemon.base.terminal import counted
from headway.daemon.cluster.records import DeviceKey, PlanRecord, WorkerPart, replicas_of
from headway.daemon.plan.connections import ConnectionEstimate, ReductionEstimate, TieEstimate
from headway.stages.spec import computed_layers

if TYPE_CHECKING:  # a reader of a plan need not load what made it
    from headway.daemon.plan.predicted_time import Distance
    from headway.daemon.plan.stage_costs import SecondsParts
    from headway.daemon.plan.stage_memory import MemoryParts

_COMPUTED_AGAIN: Final = {
    "elementwise": ", norms and products of the MLP computed again",
    "attention": ", attention computed again",
    "block": ", blocks computed again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """The expected work of one worker of a plan."""

    stage: WorkerPart
    stage_index: int
    device: str
    """`cuda:0`"""
    recompute: str
    """What the backward computes again: none, elementwise, attention, block."""
    share: float
    """Share of the batch's microbatches."""
    batch_seconds: float
    """Forward, backward and update of one batch; a replica counts only its share of the batch."""
    device_bytes: int
    device_limit_bytes: int
    """Memory limit of the device; 0: not known, not limited."""
    device_reserve_bytes: int
    """Memory of the device that no plan fills, beyond the limit."""
    host_bytes: int
    """What the worker's machine keeps of the job's boundaries: of its workers' layers, and copies of others'."""
    host_limit_bytes: int
    """What that machine has for it; 0: not known, not limited."""
    demand: float
    """Factor in `device_bytes` by which the job's measured peaks exceed the estimate."""
    num_parameters: int
    memory: "MemoryParts"
    """What `device_bytes` consists of."""
    seconds: "SecondsParts"
    """What `batch_seconds` consists of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A plan, and its reason."""

    workers: tuple[WorkerPart, ...]
    """Its workers; replicas of one stage are next to each other."""
    predicted_batch_seconds: float
    estimates: tuple[StageEstimate, ...]
    """Estimates, one for each worker."""
    connections: tuple[ConnectionEstimate, ...]
    distance: "Distance"
    """Estimate of whether the microbatches in flight hide the links."""
    schedule: str
    is_exact: bool
    exact_reason: str
    arithmetic_classes: tuple[str, ...]
    """The job's earlier arithmetic classes and those of this plan, sorted."""
    codecs: tuple[str, ...] = ()
    """Codecs, as in PlanRecord."""
    was_rounded: bool = False
    """True if this plan or an earlier one has a coded cut, as in PlanRecord."""
    reductions: tuple[ReductionEstimate, ...] = ()
    """Reductions, one for each stage that has several workers."""
    tie: TieEstimate | None = None
    """The exchange between the ends of a tied embedding."""
    spares: tuple[str, ...] = ()
    """Nodes that could work but do not, because the plan would not be faster with them."""

    @property
    def bottleneck(self) -> int:
        """Return the position of the slowest worker."""
        return max(range(len(self.estimates)), key=lambda index: (self.estimates[index].batch_seconds, -index))

    def explanation(self) -> tuple[str, ...]:
        """Return sentences for `headway plan`."""
        return (
            self._what_sets_the_pace(),
            *(self._about_worker(position) for position in range(len(self.workers))),
            *map(_about_connection, self.connections),
            *map(_about_reduction, self.reductions),
            *([_about_tie(self.tie)] if self.tie else []),
            *self.about_distance,
            *([f"Spare: {', '.join(self.spares)}."] if self.spares else []),
            f"Exact: {'yes' if self.is_exact else 'no'}, because {self.exact_reason}.",
        )

    @property
    def about_distance(self) -> tuple[str, ...]:
        """Return the sentence on m and the links, if links are long."""
        return self.distance.sentences(self.schedule)

    def _what_sets_the_pace(self) -> str:
        slowest = self.estimates[self.bottleneck].batch_seconds
        of_all = f"{self.predicted_batch_seconds:.3g} s a batch"
        link = max(self.connections, key=lambda each: each.batch_seconds, default=None)
        of_tie = self.tie.batch_seconds if self.tie is not None else 0.0
        if self.tie is not None and of_tie > max(slowest, link.batch_seconds if link is not None else 0.0):
            return (
                f"The sums of the tied embedding between {self.tie.first} and {self.tie.last} set the pace: "
                f"{of_tie:.3g} s of {of_all}."
            )
        if link is not None and link.batch_seconds > slowest:
            return f"The link {link.upper} → {link.lower} sets the pace: {link.batch_seconds:.3g} s of {of_all}."
        reduction = max(self.reductions, key=lambda each: each.batch_seconds, default=None)
        if reduction is not None and reduction.batch_seconds > slowest:
            return (
                f"The reduction between the replicas of stage {reduction.stage_index} sets the pace: "
                f"{reduction.batch_seconds:.3g} s of {of_all}."
            )
        name = sentence(worker_name(self.workers, self.bottleneck))
        return f"{name} sets the pace: {slowest:.3g} s of {of_all}."

    def _about_worker(self, position: int) -> str:
        estimate = self.estimates[position]
        limit = f" of {size(estimate.device_limit_bytes)}" if estimate.device_limit_bytes else ""
        groups = estimate.stage.groups
        share = f", {estimate.share:.0%} of the microbatches ({group_names(groups)})" if groups else ""
        return (
            f"{sentence(worker_name(self.workers, position))}: {estimate.batch_seconds:.3g} s a batch{share}, "
            f"{size(estimate.device_bytes)}{limit} on the device at depth {estimate.stage.depth}"
            f"{_COMPUTED_AGAIN.get(estimate.stage.recompute, '')}"
            f"{', its share of Newton-Schulz' if estimate.stage.shares_update else ''}"
            f"{f' ({estimate.demand:.2f} times the estimate, as measured)' if estimate.demand > 1 else ''}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRefused:
    """A refusal to plan, and its arithmetic."""

    reason: str
    """A sentence without full stop, for `status`: it says with numbers what is missing."""
    is_final: bool = False
    """True if no further node would help, because the job contradicts itself."""


def size(num_bytes: float) -> str:
    """Return bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def _about_connection(connection: ConnectionEstimate) -> str:
    late = f", frames up to {connection.lateness_s * 1e3:.3g} ms late" if connection.lateness_s else ""
    return (
        f"{connection.upper} → {connection.lower}: {size(connection.bytes_per_microbatch)} a microbatch each way"
        f"{f' as {connection.codec}' if connection.codec != 'none' else ''}, "
        f"{counted(connection.num_microbatches, 'microbatch')} and "
        f"{connection.batch_seconds:.3g} s a batch, round trip {connection.round_trip_s * 1e3:.3g} ms "
        f"{'measured' if connection.is_measured else 'assumed'}"
        f"{f', through the relay {connection.via}' if connection.via else ''}{late}."
    )


def _about_reduction(reduction: ReductionEstimate) -> str:
    return (
        f"Replicas of stage {reduction.stage_index}: {size(reduction.bytes_per_worker)} a batch each way and worker to "
        f"add their gradients, {reduction.batch_seconds:.3g} s"
        f"{', while the next batch computes' if reduction.is_hidden else ''}."
    )


def _about_tie(tie: TieEstimate) -> str:
    return (
        f"The embedding is tied: {tie.first} and {tie.last} send each other {size(tie.num_bytes)} a batch to add its "
        f"gradients, {tie.batch_seconds:.3g} s{', while the next batch computes' if tie.is_hidden else ''}."
    )


def sentence(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


MOST_RUNS: Final = 4
"""Maximum number of runs of consecutive groups that are listed."""


def worker_name(workers: Sequence[WorkerPart], position: int) -> str:
    """Return `stage 1 on node-3`, or `stage 1 on node-3 (replica 2 of 2)`."""
    return f"{stage_name(workers, position)} on {workers[position].node}{replica_note(workers, position)}"


def stage_name(workers: Sequence[WorkerPart], position: int) -> str:
    """Return `stage 1`."""
    return f"stage {_place_of(workers, position)[0]}"


def replica_note(workers: Sequence[WorkerPart], position: int) -> str:
    """Return ` (replica 2 of 2)`; empty if the stage has one worker."""
    _, number, num_replicas = _place_of(workers, position)
    return f" (replica {number} of {num_replicas})" if num_replicas > 1 else ""


def shape(workers: Sequence[WorkerPart]) -> str:
    """Return `1 stage`, `3 stages`, `3 stages of 2, 1 and 2 replicas`."""
    counts = [len(positions) for positions in replicas_of(workers)]
    text = counted(len(counts), "stage")
    if max(counts, default=1) == 1:
        return text
    if len(set(counts)) == 1:
        return f"{text} of {counts[0]} replicas" + (" each" if len(counts) > 1 else "")
    return f"{text} of {', '.join(map(str, counts[:-1]))} and {counts[-1]} replicas"


def group_names(groups: Sequence[int]) -> str:
    """Return reduction groups for people: `group 0`, `groups 0-3`, `groups 0, 2-3 and 5`, `16 groups from 0 to 61`."""
    if len(groups) == 1:
        return f"group {groups[0]}"
    runs: list[list[int]] = []
    for group in groups:
        if runs and runs[-1][-1] == group - 1:
            runs[-1][1:] = [group]
        else:
            runs.append([group])
    if len(runs) > MOST_RUNS:
        return f"{len(groups)} groups from {groups[0]} to {groups[-1]}"
    names = ["-".join(map(str, run)) for run in runs]
    return f"groups {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"groups {names[0]}"


def _place_of(workers: Sequence[WorkerPart], position: int) -> tuple[int, int, int]:
    """Return (stage from 0, replica from 1, replicas of the stage)."""
    for stage, positions in enumerate(replicas_of(workers)):
        if position in positions:
            return stage, positions.index(position) + 1, len(positions)
    raise IndexError(position)


def layer_range(layers: Sequence[str]) -> str:
    """Return consecutive layers in few characters: `embed, block.0-3`, or `block.4.mlp-7` from half a block on."""
    blocks = [name.removeprefix("block.") for name in computed_layers(layers) if name.startswith("block.")]
    parts = ["embed"] if "embed" in layers else []
    if blocks:
        parts.append(f"block.{blocks[0]}" + (f"-{blocks[-1]}" if len(blocks) > 1 else ""))
    if "head" in layers:
        parts.append("head")
    return ", ".join(parts)


def devices(plan: PlanRecord | ClusterPlan | None) -> frozenset[DeviceKey]:
    """Return the devices that the plan uses."""
    return frozenset((stage.node, stage.device_index) for stage in plan.workers) if plan is not None else frozenset()


def place(stage: WorkerPart) -> tuple[str, str, int]:
    """Return the worker's place: (node, incarnation, device)."""
    return stage.node, stage.node_incarnation, stage.device_index


def is_moving(plan: PlanRecord, successor: PlanRecord, layer: str) -> bool:
    """Return whether a worker of the next plan needs a layer that it does not compute in the present one."""
    return not {place(stage) for stage in successor.holders(layer)} <= {place(stage) for stage in plan.holders(layer)}
