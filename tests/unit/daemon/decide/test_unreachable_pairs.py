"""Nodes that reach etcd and not each other, in the simulated cluster: pairs become blocked and heal, by seed."""

import random
from dataclasses import replace
from itertools import pairwise, permutations

import pytest

from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import GoodputRecord
from headway.daemon.cluster.records import (
    Desired,
    Failure,
    Phase,
)
from headway.daemon.decide.conditions import all_next_workers_ready
from headway.daemon.decide.failures import CAUSE_GRACE_S
from headway.daemon.decide.situation import JobSituation
from tests.rigs.random_orders import build, finish, happen
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

KIND = ("join", "drain", "elect")
CRUEL = (*KIND, "lapse", "crash", "fail")
BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 50))]


def cluster_of(*names: str, **spec: object) -> SimulatedCluster:
    cluster = SimulatedCluster(1)
    cluster.quarantine_after = 3
    for name in names:
        cluster.add_node(name)
    cluster.submit(small_spec("j", **spec))  # type: ignore[arg-type]
    return cluster


def nodes_of_plan(cluster: SimulatedCluster) -> list[str]:
    plan = cluster.facts().jobs["j"].plan
    return [stage.node for stage in plan.workers] if plan is not None else []


def assert_nobody_is_blamed(cluster: SimulatedCluster) -> None:
    assert not cluster.facts().failures, "no node is held responsible"
    for job in cluster.facts().jobs.values():
        assert job.phase.failures.num_deaths == 0, job.phase


@pytest.mark.parametrize("is_known", [True, False])
def test_a_lost_link_between_nodes_that_cannot_talk_waits_for_no_other_cause(is_known: bool) -> None:
    """A blocked pair is the cause. Where none is known, a worker's error may still follow."""
    cluster = cluster_of("a", "b", "c", min_nodes=3, batches=200)
    cluster.calm(until=lambda: cluster.phase("j").phase is Phase.RUNNING)
    cluster.calm(max_rounds=3)
    first, second = nodes_of_plan(cluster)[:2]
    if is_known:
        cluster.blocked = {(first, second)}
        cluster.nodes[first].out_of_reach.add(second)
    worker = cluster.nodes[first].workers[0]
    worker.failure = worker.started, Failure(f"the link to {second} is lost", lost_peer=1)
    since = cluster.now
    cluster.calm(until=lambda: cluster.phase("j").phase is Phase.RECOVERING, step_s=0.1)
    assert (cluster.now - since < CAUSE_GRACE_S) is is_known
    assert not cluster.facts().failures


def test_a_pair_blocked_during_a_change_is_not_planned_as_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All workers of the new plan were ready and had reached each other before."""
    cluster = cluster_of("a", "b", batches=2000)
    cluster.calm(until=lambda: cluster.phase("j").phase is Phase.RUNNING)
    stop = cluster._stop
    monkeypatch.setattr(cluster, "_stop", lambda *_: None)  # no worker comes to the boundary yet
    cluster.add_node("c")
    cluster.calm(until=lambda: cluster.phase("j").phase is Phase.STOPPING)
    successor = cluster.facts().jobs["j"].next
    assert successor is not None
    names = [stage.node for stage in successor.workers]
    first, second = next(pair for pair in pairwise(names) if "c" in pair)  # the old plan has a link of the others
    cluster.blocked = {(first, second)}
    cluster.nodes[first].out_of_reach.add(second)
    cluster.calm(max_rounds=2)
    monkeypatch.setattr(cluster, "_stop", stop)
    cluster.calm(until=lambda: cluster.phase("j").phase is Phase.RUNNING)
    plan = cluster.facts().jobs["j"].plan
    assert plan is not None
    assert plan.generation > successor.generation
    events = [event.text for event in cluster.facts().jobs["j"].events.values()]
    assert any(
        f"{first} cannot reach" in text and "stops at a boundary and writes a checkpoint" in text for text in events
    ), events
    assert not cluster.facts().failures


def block_or_heal(cluster: SimulatedCluster, chance: random.Random) -> None:
    """Some way between two nodes, in one direction."""
    names = sorted(cluster.nodes)
    if cluster.blocked and chance.random() < 0.5:
        cluster.blocked.discard(chance.choice(sorted(cluster.blocked)))
    elif len(names) > 1:
        cluster.blocked.add(chance.choice(list(permutations(names, 2))))


@pytest.mark.parametrize("may_crash", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_pairs_come_and_go_and_every_job_finishes(block: int, may_crash: bool) -> None:
    """Blocks in one direction at any moment beside joins, drains and deaths. What the leader knows to be blocked is
    never between neighbours (checked at every decision); when all have healed, the jobs reach their end."""
    for seed in range(block * 2, block * 2 + 2):
        cluster, chance = build(seed, num_groups=1 + seed % 3)
        for _ in range(600):
            cluster.random_step()
            if chance.random() < 0.03:
                block_or_heal(cluster, chance)
            if chance.random() < 0.005:
                happen(cluster, chance.choice(CRUEL if may_crash else KIND), chance)
        cluster.blocked = set()
        finish(cluster, seed)


@pytest.mark.parametrize("block", BLOCKS)
def test_with_pairs_that_stay_blocked_a_job_runs_or_says_which(block: int) -> None:
    """A job that demands all nodes runs if an order exists; else it names the blocked direction."""
    for seed in range(block * 8, block * 8 + 8):
        chance = random.Random(seed)
        names = [f"n{index}" for index in range(chance.randint(2, 4))]
        cluster = cluster_of(*names, min_nodes=len(names), num_blocks=4)
        cluster.random.seed(seed)
        cluster.blocked = {way for way in permutations(names, 2) if chance.random() < 0.3}
        pairs = {frozenset(way) for way in cluster.blocked}
        is_possible = any(all(frozenset(two) not in pairs for two in pairwise(order)) for order in permutations(names))
        cluster.calm(max_rounds=250)
        phase = cluster.phase("j")
        assert (phase.phase is Phase.FINISHED) == is_possible, (seed, phase, sorted(cluster.blocked))
        if not is_possible:
            assert phase.phase is Phase.QUEUED
            assert "cannot reach the worker port of" in phase.reason
        assert_nobody_is_blamed(cluster)


def test_a_plan_waits_until_every_neighbour_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers are ready, and none has reached its neighbours yet."""
    cluster = cluster_of("a", "b", min_nodes=2, batches=1000)
    monkeypatch.setattr(cluster, "_prove", lambda *_: {})
    cluster.calm(max_rounds=30)
    assert cluster.phase("j").phase is Phase.PREPARING


def test_a_proof_of_a_process_that_was_replaced_brings_no_plan_into_force() -> None:
    """Both have reached each other, then b's process is replaced: a has not reached the new one."""
    cluster = cluster_of("a", "b", min_nodes=2, batches=1000)

    def next_is_ready() -> bool:
        job = cluster.facts().jobs["j"]
        workers = job.workers_of(job.next) if job.next is not None else {}
        return len(workers) == 2 and all(worker.proven for worker in workers.values())

    cluster.calm(until=lambda: cluster.phase("j").phase is Phase.PREPARING)
    for _ in range(4):
        for node in cluster.nodes.values():
            cluster.deliver(node)
            cluster.act(node)
    assert next_is_ready()
    leader = cluster.nodes[cluster.leader]
    cluster.deliver(leader)
    job = leader.view.jobs["j"]
    assert job.next is not None

    def is_ready() -> bool:
        return all_next_workers_ready(JobSituation(job=job, view=leader.view, now=cluster.now, written_at=0.0))

    assert is_ready()
    key = (job.next.generation, 1)
    job.workers[key] = replace(job.workers[key], incarnation="another")
    assert not is_ready()


def test_a_pause_of_a_job_that_stands_still_at_a_blocked_link_takes_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would never reach a stop boundary, so it goes back instead of waiting for a deadline."""
    cluster = cluster_of("a", "b", min_nodes=2, batches=200)
    cluster.calm(until=lambda: cluster.phase("j").phase is Phase.RUNNING)
    monkeypatch.setattr(cluster, "_lose_link", lambda *_: None)
    monkeypatch.setattr(cluster, "train", lambda: None)
    first, second = nodes_of_plan(cluster)
    cluster.blocked = {(first, second)}
    cluster.nodes[first].out_of_reach.add(second)
    stands = GoodputRecord(node=first, incarnation="w", waits_for=f"stage 1 at {second}:2", awaited_worker=1)
    generation = cluster.phase("j").generation
    cluster.store.transact({}, {Keys.goodput("j", generation, 0): encode(stands)}, lease=cluster.nodes[first].lease)
    monkeypatch.setattr(cluster, "_stop", lambda *_: None)  # no worker comes to a boundary
    cluster.want("j", Desired.PAUSED)
    since = cluster.now
    cluster.calm(until=lambda: cluster.phase("j").phase is Phase.PAUSED)
    assert cluster.now - since < 10
    assert not cluster.facts().failures
