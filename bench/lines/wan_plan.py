"""The planner's advice for stages with a line in their middle: m and depths, as `headway plan` would say."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from rigs.emulated_stage import SleepTimes

from headway.daemon.cluster.measurements import LayerTime, LinkProbe
from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.jobs.job import JobSection, JobSpec, PlacementSpec
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.planner import make_plan
from headway.daemon.plan.profiles import Profiles
from headway.stages.spec import ModelSpec, TrainSpec
from lines.wan_line import Line

SITE = LinkAssumptions()
"""Link inside a site."""
FREE_S = 1e-9
OF_JITTER = 0.5
"""A probe's round trip is the least of five: of jitter, each way up to so much, about half is in it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice for a job over a line."""

    least_microbatches: int
    """The m that hides the line under 2bw."""
    depths: tuple[int, ...]
    """Depths of the stages."""


@lru_cache
def advice(model: ModelSpec, train: TrainSpec, times: SleepTimes, line: Line | None, num_stages: int = 2) -> Advice:
    """Return the advice for equal stages with these times, half of them on either site; line: None for one site.
    Raises ValueError without a plan.
    """
    num_blocks = model.num_hidden_layers // num_stages
    block = LayerTime(
        forward_s=times.forward_s / num_blocks,
        backward_s=times.backward_s / num_blocks,
        update_s=max(FREE_S, times.update_s / num_blocks),
    )
    free = LayerTime(forward_s=FREE_S, backward_s=FREE_S, update_s=FREE_S)
    a, b = ([f"{site}{index}" for index in range(num_stages // 2)] for site in ("a", "b"))
    nodes = tuple(_node(name, site=name[0] if line is not None else "here") for name in (*a, *b))
    placement = PlacementSpec(min_nodes=num_stages, replicas=(1,) * num_stages)
    plan = make_plan(
        JobSpec(job=JobSection(name="two-sites"), model=model, train=train, placement=placement),
        nodes,
        profiles=Profiles.of(
            {(node.name, 0): {"embed": free, "block": block, "head": free} for node in nodes},
            dict.fromkeys(product(a, b), _as_probed(line)) if line is not None else None,
        ),
    )
    if not isinstance(plan, ClusterPlan):
        raise ValueError(f"no plan for {train} over {line}: {plan}")
    return Advice(plan.distance.least_microbatches, tuple(stage.depth for stage in plan.workers))


def _as_probed(line: Line) -> LinkProbe:
    round_trip_ms = line.round_trip_ms + OF_JITTER * line.jitter_ms
    return LinkProbe(
        round_trip_s=max(SITE.site_round_trip_s, round_trip_ms / 1e3), bytes_per_s=line.bytes_per_s, loss=line.loss
    )


def _node(name: str, *, site: str) -> NodeRecord:
    return NodeRecord(
        name=name,
        incarnation=name,
        address="",
        host="",
        site=site,
        devices=(Device(kind="cpu"),),
        memory_bytes=0,
        arithmetic_class="one",
    )
