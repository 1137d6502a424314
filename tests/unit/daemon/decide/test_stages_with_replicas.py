"""A job on 2-1-2 workers: deaths, drains, saves, and a leader that dies at every single decision."""

from typing import Any

import pytest

from headway.daemon.cluster.records import Desired, Phase, PlanRecord
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.decide.boundaries import restorable
from headway.daemon.jobs.job import FaultSpec
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

SHAPE = (2, 1, 2)
FAULT = FaultSpec(snapshot_every=4, copies=2, checkpoint_every=0)


def cluster_of(num_nodes: int, *, batches: int = 60, seed: int = 0) -> SimulatedCluster:
    """Make equal nodes, and a job of five layers on five workers of three stages."""
    cluster = SimulatedCluster(seed)
    for index in range(num_nodes):
        cluster.add_node(f"n{index}")
    cluster.submit(small_spec("first", batches=batches, fault=FAULT, reduction_groups=4, replicas=SHAPE))
    return cluster


def plan(cluster: SimulatedCluster) -> PlanRecord:
    found = cluster.facts().jobs["first"].plan
    assert found is not None
    return found


def shape(record: PlanRecord) -> tuple[int, ...]:
    return tuple(len(workers) for workers in record.replicas)


def events(cluster: SimulatedCluster) -> list[str]:
    return [event.text for _, event in sorted(cluster.facts().jobs["first"].events.items())]


def until_batch(cluster: SimulatedCluster, batch: int) -> None:
    def is_done() -> bool:
        progress = cluster.facts().jobs["first"].progress
        return progress is not None and progress.batch >= batch

    cluster.calm(until=is_done)


def finish(cluster: SimulatedCluster) -> None:
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.FINISHED, max_rounds=1000)


def test_a_replica_that_dies_is_named_and_the_job_goes_back() -> None:
    """The second replica of the last stage is killed: an unplanned change like any other, to the same shape."""
    cluster = cluster_of(5)
    until_batch(cluster, 10)
    victim = plan(cluster).workers[4].node
    cluster.fail_worker(victim)
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RECOVERING)
    told = f"The worker of stage 2 on node {victim} (replica 2 of 2) was killed by SIGKILL; goes back to boundary "
    assert events(cluster)[-1].startswith(told)
    assert "3 stages of 2, 1 and 2 replicas on " in events(cluster)[-1]
    finish(cluster)


def test_siblings_alone_make_a_boundary_restorable() -> None:
    """Five nodes, two copies: the stages of two need no other node but for the journal; the middle has one buddy."""
    cluster = cluster_of(5)
    until_batch(cluster, 9)
    facts = cluster.facts()
    job, present = facts.jobs["first"], plan(cluster)
    assert restorable(job, facts.nodes)
    place = restorable(job, facts.nodes)[0]
    front = {present.workers[position].node for position in (0, 1)}
    assert set(job.holders(*place, present.workers[0].layers[0])) == front
    back = {present.workers[position].node for position in (3, 4)}
    assert set(job.holders(*place, present.workers[3].layers[0])) == back
    assert set(job.holders(*place, JOURNAL)) == back
    assert len(job.holders(*place, present.workers[2].layers[0])) == 2


@pytest.mark.parametrize("position", range(5))
def test_a_replica_that_drains_is_replaced_by_a_planned_change(position: int) -> None:
    """A sixth node takes over from any of the five, lead or not, without a batch computed again."""
    cluster = cluster_of(6)
    until_batch(cluster, 10)
    before = plan(cluster)
    cluster.drain(before.workers[position].node)
    cluster.calm(until=lambda: plan(cluster).generation > before.generation)
    after = plan(cluster)
    assert (after.timeline, shape(after)) == (before.timeline, SHAPE)
    changed = [at for at, stage in enumerate(after.workers) if stage.node != before.workers[at].node]
    assert changed == [position], "whoever stays keeps its place"
    num_moved = len(after.workers[position].layers)
    assert f"{num_moved} layer{'s' * (num_moved != 1)} moved" in events(cluster)[-1]
    finish(cluster)
    assert not any("goes back" in text for text in events(cluster))


def test_a_pause_saves_each_layer_once() -> None:
    """The leads write and copy: of every part there is one durable file, on the lead's node."""
    cluster = cluster_of(5)
    until_batch(cluster, 10)
    present = plan(cluster)
    leads = {present.workers[workers[0]].node for workers in present.replicas}
    cluster.want("first", Desired.PAUSED)
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.PAUSED)
    durable = {name for name, node in cluster.nodes.items() if node.durable}
    assert durable == leads
    assert sum(len(node.durable) for node in cluster.nodes.values()) == 6, "five layers and the journal"
    cluster.want("first", Desired.RUNNING)
    finish(cluster)


def test_a_shape_for_which_nodes_are_missing_is_waited_for() -> None:
    """Four nodes of five: the reason has the numbers; the fifth comes, and the job starts."""
    cluster = cluster_of(4)
    cluster.calm(max_rounds=10)
    assert "replicas = [2, 1, 2] asks for 5 workers, 4 free" in cluster.phase("first").reason
    cluster.add_node("late")
    finish(cluster)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("crashes", [pytest.param("before", marks=SLOW), pytest.param("between", marks=SLOW), "after"])
def test_a_leader_that_dies_at_any_decision_is_survived(crashes: str) -> None:
    """Start, death of a replica, drain of a lead, end: at each decision of that story in turn the leader dies."""
    number = 0
    while (num_decisions := _story(number, crashes)) >= number:
        number += 1
    assert number > 8, f"only {num_decisions} decisions in the whole story"


def _story(fatal: int, crashes: Any) -> int:
    """The leader dies at its decision number `fatal`, counted from 0. Returns how many were written before the end."""
    cluster, has_died = cluster_of(7, batches=28, seed=fatal), False
    lead = cluster.lead

    def lead_once_fatally(**options: Any) -> float | None:
        nonlocal has_died
        if has_died or cluster.num_events < fatal:
            return lead(**options)
        leader, deadline = cluster.leader, lead(crashes=crashes)
        if cluster.leader in cluster.nodes and not cluster.nodes[cluster.leader].is_alive:
            has_died = True
            cluster.expire(cluster.leader)
            cluster.add_node(f"instead-of-{leader}")
        return deadline

    cluster.lead = lead_once_fatally  # type: ignore[method-assign]
    until_batch(cluster, 5)
    cluster.fail_worker(plan(cluster).workers[1].node)
    until_batch(cluster, 14)
    cluster.drain(plan(cluster).workers[3].node)
    finish(cluster)
    return cluster.num_events
