"""The coordinator among simulated nodes: thousands of orders of events, with everything checked at every decision."""

import random
from typing import Any

import pytest

from headway.daemon.records import Desired, Phase
from tests.fakes.simulated_cluster import SimulatedCluster, small_spec

FINAL = (Phase.FINISHED, Phase.CANCELLED)


def chaos(cluster: SimulatedCluster, *, num_steps: int, chance: random.Random, may_crash: bool) -> None:
    """Random steps, and now and then a join, a drain, a wish; with may_crash, a death too."""
    jobs = ["first", "second"]
    for _ in range(num_steps):
        cluster.random_step()
        if chance.random() > 0.02:
            continue
        living = sorted(name for name, node in cluster.nodes.items() if node.is_alive)
        what = chance.choice(["join", "join", "drain", "pause", "resume", "crash", "expire", "fail", "elect", "again"])
        if what == "join" and len(cluster.nodes) < 6:
            cluster.add_node(f"n{cluster.num_incarnations}", speed=chance.choice((1.0, 1.0, 2.0)))
        elif what == "drain" and living:
            cluster.drain(chance.choice(living))
        elif what in ("pause", "resume"):
            cluster.want(chance.choice(jobs), Desired.PAUSED if what == "pause" else Desired.RUNNING)
        elif what == "elect":
            cluster.elect()
        elif may_crash and what == "crash" and living:
            cluster.kill(chance.choice(living))
        elif may_crash and what == "fail" and living:
            cluster.fail_worker(chance.choice(living))
        elif may_crash and what == "expire":
            for name in [name for name, node in cluster.nodes.items() if not node.is_alive]:
                cluster.expire(name)
        elif may_crash and what == "again" and living:
            name = chance.choice(living)  # its daemon starts anew, in no time
            cluster.kill(name)
            cluster.expire(name)
            cluster.add_node(name)


def settle(cluster: SimulatedCluster) -> None:
    """The dead are gone, a few nodes are there, both jobs are wanted."""
    for name in [name for name, node in cluster.nodes.items() if not node.is_alive]:
        cluster.expire(name)
    for index in range(2):
        cluster.add_node(f"late{index}")
    for job in ("first", "second"):
        cluster.want(job, Desired.RUNNING)


def build(seed: int) -> tuple[SimulatedCluster, random.Random]:
    chance = random.Random(seed + 1_000_000)
    cluster = SimulatedCluster(seed)
    for index in range(chance.randint(1, 4)):
        cluster.add_node(f"n{index}", num_devices=chance.choice((1, 1, 2)))
    cluster.submit(small_spec("first", num_blocks=chance.randint(1, 4), batches=chance.choice((1, 4, 40, 40))))
    limits: dict[str, Any] = {"max_nodes": chance.choice((0, 2)), "min_nodes": chance.choice((1, 1, 2))}
    cluster.submit(small_spec("second", num_blocks=2, batches=chance.choice((1, 4, 40, 40)), **limits))
    return cluster, chance


@pytest.mark.parametrize("block", range(8))
def test_without_failures_every_job_finishes(block: int) -> None:
    """Joins, drains, pauses, elections, in any order, seen late, twice and disorderly: all batches, no failure."""
    for seed in range(block * 10, block * 10 + 10):
        cluster, chance = build(seed)
        chaos(cluster, num_steps=600, chance=chance, may_crash=False)
        settle(cluster)
        cluster.calm(until=lambda: all(cluster.phase(job).phase in FINAL for job in ("first", "second")))  # noqa: B023
        assert {cluster.phase(job).phase for job in ("first", "second")} == {Phase.FINISHED}, seed


@pytest.mark.parametrize("block", range(8))
def test_with_failures_every_job_finishes_or_fails_and_can_be_resumed(block: int) -> None:
    """Crashes of nodes and workers besides: a job fails with a reason, and once resumed it finishes."""
    for seed in range(block * 10, block * 10 + 10):
        cluster, chance = build(seed)
        chaos(cluster, num_steps=600, chance=chance, may_crash=True)
        settle(cluster)
        for _ in range(4):
            done = (*FINAL, Phase.FAILED)
            cluster.calm(until=lambda: all(cluster.phase(job).phase in done for job in ("first", "second")))  # noqa: B023
            for job in ("first", "second"):
                if cluster.phase(job).phase is Phase.FAILED:
                    assert cluster.phase(job).reason
                    cluster.want(job, Desired.RUNNING)
        cluster.calm(until=lambda: all(cluster.phase(job).phase in FINAL for job in ("first", "second")))  # noqa: B023
        assert {cluster.phase(job).phase for job in ("first", "second")} == {Phase.FINISHED}, seed
