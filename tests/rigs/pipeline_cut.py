"""Parts that tests of pipeline cut share."""

import random
from typing import Literal

from headway.daemon.cluster.measurements import LayerTime
from headway.daemon.jobs.job import FaultSpec, PlacementSpec
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.layer_costs import layer_costs
from headway.daemon.plan.profiles import Profiles
from headway.stages.spec import timed_kind
from tests.rigs.brute_force import Instance
from tests.rigs.clusters import job, node

SHARE_UPDATES: tuple[Literal["auto", "always", "never"], ...] = ("auto", "never", "always", "auto", "auto")


def instance(seed: int, *, most_nodes: int = 5, is_auto: bool = False) -> tuple[Instance, Profiles]:
    """At most 8 layers and 5 nodes; schedules, groups, memory, classes, sites, links and measurements by chance.

    is_auto: without measurements, and what is computed again is the planner's choice.
    """
    chance = random.Random(seed)
    num_microbatches = chance.randint(1, 9)
    spec = job(
        num_blocks=chance.randint(1, 6),
        microbatches=num_microbatches,
        reduction_groups=chance.randint(1, min(5, num_microbatches)),
        schedule=chance.choice(("2bw", "2bw", "1f1b", "gpipe")),
        recompute="auto" if is_auto else chance.choice(("none", "none", "block")),
        fault=FaultSpec(snapshot_every=chance.choice((0, 20))),
        placement=PlacementSpec(share_updates=SHARE_UPDATES[seed % len(SHARE_UPDATES)]),
    )
    costs = layer_costs(spec)
    whole = sum(cost.resident_bytes + cost.group_bytes + 2 * cost.activation_bytes for cost in costs)
    kept = 6 * sum(cost.state_bytes for cost in costs)
    limits = chance.random() < 0.4
    nodes = tuple(
        node(
            f"n{index}",
            speed=chance.choice((0.5, 1.0, 1.0, 2.0, chance.uniform(0.3, 3.0))),
            site=chance.choice("xxy"),
            arithmetic_class=chance.choice(("one", "one", "one", "two")),
            memory_bytes=chance.choice((0, int(whole * chance.uniform(0.1, 1.2)))) if limits else 0,
            host_bytes=chance.choice((0, 0, int(kept * chance.uniform(0.2, 1.0)))) if limits else 0,
        )
        for index in range(chance.randint(1, most_nodes))
    )
    links = chance.choice(
        (LinkAssumptions(), LinkAssumptions(site_bytes_per_s=2e7, far_bytes_per_s=4e6, far_round_trip_s=0.3))
    )
    measured: dict[tuple[str, str], tuple[float, float]] = {}
    if not is_auto and chance.random() < 0.3:
        measured = {
            (each.name, kind): (chance.uniform(0.005, 0.1), chance.uniform(0.001, 0.1))
            for each in nodes
            for kind in ("embed", "block", "head")
        }
    profiles = Profiles.of(
        {
            (each.name, 0): {
                timed_kind(kind, spec.train.recompute): LayerTime(
                    forward_s=seconds[0] / 4, backward_s=seconds[0] * 3 / 4, update_s=seconds[1]
                )
                for (name, kind), seconds in measured.items()
                if name == each.name
            }
            for each in nodes
            if measured
        }
    )
    return Instance(spec, nodes, links, measured), profiles
