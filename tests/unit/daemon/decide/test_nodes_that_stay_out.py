"""Nodes that ask to be left out of plans (a full state folder, no address) and obey none meanwhile, simulated."""

import pytest

from headway.daemon.cluster.records import Phase
from tests.rigs.nodes_that_stay_out import recovering
from tests.rigs.random_orders import build, finish, happen
from tests.rigs.recovery import recovered
from tests.rigs.scenarios import events, plan

FULL = "state_dir /s cannot be written: No space left on device"
KIND = ("join", "drain", "elect", "fail", "crash", "lapse")
BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 20))]


def test_a_recovery_goes_on_without_a_node_that_takes_no_step() -> None:
    """A member of `next` cannot write its state folder: others take over within a moment, not after the deadline."""
    cluster = recovering("a", "b", "c")
    cluster.say("b", stays_out=FULL)
    began = cluster.now
    after = recovered(cluster)
    assert "b" not in {stage.node for stage in after.workers}
    assert cluster.now - began < 10
    assert any(text.startswith(f"Node b stays out of new plans: {FULL}; goes back to") for text in events(cluster))
    assert not cluster.facts().failures.get("b"), "the node is not to blame"


def test_a_job_that_needs_a_node_that_stays_out_waits_and_names_it() -> None:
    cluster = recovering("a", "b", min_nodes=2)
    cluster.say("b", stays_out=FULL)
    cluster.calm(max_rounds=10)
    phase = cluster.phase("first")
    assert phase.phase is Phase.RECOVERING
    assert f"node b stays out of plans: {FULL}" in phase.reason
    cluster.say("b", stays_out="")
    assert {stage.node for stage in recovered(cluster).workers} == {"a", "b"}


def test_a_ready_plan_takes_effect_if_no_other_node_is_left() -> None:
    """The node that stays out has already written the plan down."""
    cluster = recovering("a", "b", min_nodes=2)
    offered = cluster.phase("first").generation
    for node in cluster.nodes.values():
        for _ in range(3):
            cluster.deliver(node)
            cluster.act(node)
    for node in cluster.nodes.values():
        cluster.deliver(node)
        cluster.act(node)
    cluster.say("b", stays_out=FULL)
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RUNNING, max_rounds=3)
    assert plan(cluster).generation == offered


@pytest.mark.parametrize("block", BLOCKS)
def test_nodes_stay_out_and_come_back_and_every_job_finishes(block: int) -> None:
    """At any moment beside joins, drains and deaths; when all have room again, the jobs reach their end."""
    for seed in range(block * 3, block * 3 + 3):
        cluster, chance = build(seed)
        for _ in range(600):
            cluster.random_step()
            living = sorted(name for name, node in cluster.nodes.items() if node.is_alive)
            if living and chance.random() < 0.02:
                cluster.say(chance.choice(living), stays_out=chance.choice(("", FULL)))
            if chance.random() < 0.01:
                happen(cluster, chance.choice(KIND), chance)
        for name in [name for name, node in cluster.nodes.items() if node.is_alive]:
            cluster.say(name, stays_out="")
        finish(cluster, seed)
