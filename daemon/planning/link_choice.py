"""Which kind of link two workers of a plan have, and why. Pure: both ends ask, and come to the same answer.

A collective link (torch.distributed: gloo between CPUs, NCCL between CUDA devices) is not encrypted and is not resumed
when it breaks; a gRPC link is both.
"""

from dataclasses import dataclass
from typing import Final, Literal

from headway.daemon.jobs.job import JobSpec
from headway.daemon.planning.layer_costs import element_bytes, layer_costs, num_hidden
from headway.daemon.records import NodeRecord, PlanRecord
from headway.stages.codec import coded_bytes

UNNAMED_SITE: Final = "default"
"""What a node says that was told of no site: nothing is known about the network between two of them."""

WORTH_A_GROUP_BYTES: Final = 16 << 20
"""`auto` takes a collective link for frames from this size on: `bench/links.py` has it slower at 1 MiB and below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """What matters of the worker at one end."""

    node: str
    site: str
    host: str
    device_kind: str

    @classmethod
    def of(cls, node: NodeRecord, device_index: int) -> "LinkEnd":
        """A node's device; of no kind if the node does not have it any more."""
        kind = next((device.kind for device in node.devices if device.index == device_index), "")
        return cls(node=node.name, site=node.site, host=node.host, device_kind=kind)


@dataclass(frozen=True, slots=True)
class LinkChoice:
    """The kind, and why in a sentence."""

    is_collective: bool
    reason: str


def choose_link(
    wanted: Literal["auto", "grpc", "collective"], one: LinkEnd, other: LinkEnd, *, frame_bytes: int
) -> LinkChoice:
    """wanted: what the job says. frame_bytes: of the largest frame that the two exchange."""
    if wanted == "grpc":
        return LinkChoice(False, "the job asks for gRPC links")
    if one.site != other.site:
        return LinkChoice(False, f"sites {one.site} and {other.site}: between sites everything is encrypted")
    if one.device_kind != other.device_kind:
        return LinkChoice(False, f"{one.device_kind} and {other.device_kind}: one group has one kind of device")
    if wanted == "collective":
        return LinkChoice(True, f"the job asks for collective links, and both are in site {one.site}")
    if one.site == UNNAMED_SITE and one.host != other.host:
        return LinkChoice(False, "the nodes name no site: only inside a named one do tensors travel without encryption")
    if one.device_kind != "cpu":
        return LinkChoice(False, 'links by NCCL are not measured yet: link = "collective" asks for them')
    size = f"frames of {frame_bytes / 2**20:.3g} MiB"
    if frame_bytes < WORTH_A_GROUP_BYTES:
        return LinkChoice(False, f"{size}: gRPC carries them as fast, and resumes what breaks")
    return LinkChoice(True, f"{size} inside site {one.site}: process groups carry them faster")


def largest_frame_bytes(spec: JobSpec, plan: PlanRecord, one: int, other: int) -> int:
    """Of what two workers of a plan, by position, exchange: hidden states, or between replicas their groups' sums of a
    slice of the gradient. The same seen from either end."""
    stage, beside = plan.stage_index(one), plan.stage_index(other)
    if stage != beside:
        return coded_bytes(plan.codec(max(stage, beside)), num_hidden(spec), element_bytes(spec.train))
    workers = [plan.stages[position] for position in (one, other)]
    sums_bytes = sum(cost.group_bytes for cost in layer_costs(spec) if cost.name in workers[0].layers)
    return max(len(worker.groups) for worker in workers) * sums_bytes // len(plan.replicas[stage])
