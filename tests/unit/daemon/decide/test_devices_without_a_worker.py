"""A device whose worker does not start is in a plan: others take over at once, and the job says why, simulated."""

import pytest

from headway.daemon.cluster.records import (
    Failure,
    Phase,
)
from headway.daemon.decide.failures import MAX_DEATHS
from tests.rigs.nodes_that_stay_out import recovering
from tests.rigs.recovery import recovered
from tests.rigs.scenarios import events, plan, run_until
from tests.rigs.simulated_cluster import KILLED, SimulatedCluster, small_spec
from tests.rigs.simulated_node import Worker

TAKEN = "worker cpu:0 does not start: each of the ports 7100 to 7107 at 10.0.0.1 is in use"


def without_worker(cluster: SimulatedCluster, name: str) -> None:
    """Its process died before it had heard of any plan, and no other one starts."""
    cluster.nodes[name].workers[0].is_down = True
    cluster.say(name, down_devices=(0,), worker_trouble=TAKEN)


def preparing(*names: str) -> SimulatedCluster:
    """A job of two nodes whose first plan is offered, and nobody has heard of that yet."""
    cluster = SimulatedCluster()
    for name in names:
        cluster.add_node(name)
    cluster.submit(small_spec("first", min_nodes=2, max_nodes=2))
    run_until(cluster, Phase.PREPARING)
    return cluster


def test_a_job_begins_without_a_device_that_has_no_worker() -> None:
    """Of three nodes one has no port for its worker: the others train within moments, and nobody has failed."""
    cluster = preparing("a", "b", "c")
    job = cluster.facts().jobs["first"]
    assert job.next is not None
    name = job.next.workers[0].node
    without_worker(cluster, name)
    began = cluster.now
    run_until(cluster, Phase.RUNNING)
    assert name not in {stage.node for stage in plan(cluster).workers}
    assert cluster.now - began < 20
    assert f"The new plan is dropped: {name} has no worker on device 0 ({TAKEN})" in events(cluster)
    assert not any(cluster.facts().failures.values())


def test_a_job_that_needs_a_device_without_a_worker_waits_and_says_why() -> None:
    """Both nodes are needed: the reason names the device, and the job continues once its worker is up."""
    cluster = preparing("a", "b")
    without_worker(cluster, "b")
    cluster.calm(max_rounds=20)
    phase = cluster.phase("first")
    assert phase.phase is Phase.QUEUED
    assert f"b has no worker on device 0 ({TAKEN})" in phase.reason
    cluster.nodes["b"].workers[0].is_down = False
    cluster.say("b", down_devices=(), worker_trouble="")
    run_until(cluster, Phase.RUNNING)


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_recovery_goes_on_without_a_device_that_has_no_worker(name: str) -> None:
    """The plan of the recovery names that device; another plan follows without waiting for a deadline."""
    cluster = recovering("a", "b", "c")
    job = cluster.facts().jobs["first"]
    assert job.next is not None
    assert name in {stage.node for stage in job.next.workers}
    without_worker(cluster, name)
    began = cluster.now
    assert name not in {stage.node for stage in recovered(cluster).workers}
    assert cluster.now - began < 20


def die_while_preparing(cluster: SimulatedCluster, name: str) -> None:
    """The node's record says that the device is down before its worker's record says that it failed."""
    job = cluster.facts().jobs["first"]
    assert job.next is not None
    node = cluster.nodes[name]
    failure = job.next.generation, Failure(KILLED)
    node.workers[0] = Worker(f"{name}/next", failure=failure, failed_job="first", is_down=True)
    cluster.say(name, down_devices=(0,))
    cluster.deliver(cluster.nodes[cluster.leader])
    cluster.lead()


def charged(cluster: SimulatedCluster, name: str) -> int:
    return len(cluster.facts().failures.get(name, {}))


def test_a_worker_that_dies_while_it_prepares_is_charged() -> None:
    """The leader first sees only that the device is down, and waits for the record with the reason."""
    cluster = preparing("a", "b")
    die_while_preparing(cluster, "b")
    assert cluster.phase("first").phase is Phase.PREPARING
    run_until(cluster, Phase.QUEUED)
    assert cluster.phase("first").failures.num_deaths == 1
    assert charged(cluster, "b") == 1


def test_a_worker_that_dies_whenever_it_prepares_spends_the_budget() -> None:
    """The job fails instead of looping."""
    cluster = preparing("a", "b")
    for _ in range(MAX_DEATHS):
        run_until(cluster, Phase.PREPARING)
        die_while_preparing(cluster, "b")
        cluster.calm(until=lambda: cluster.phase("first").phase is not Phase.PREPARING)
        cluster.replace_worker("b")
    assert cluster.phase("first").phase is Phase.FAILED


def test_a_worker_that_dies_while_a_recovery_prepares_is_charged() -> None:
    """Its death counts on top of the one that the job recovers from."""
    cluster = recovering("a", "b", "c")
    job = cluster.facts().jobs["first"]
    assert job.next is not None
    name, before = job.next.workers[0].node, cluster.phase("first").failures.num_deaths
    num_charges = charged(cluster, name)
    die_while_preparing(cluster, name)
    assert cluster.facts().jobs["first"].next == job.next
    cluster.calm(until=lambda: cluster.phase("first").failures.num_deaths > before)
    assert charged(cluster, name) == num_charges + 1


def test_a_worker_that_dies_while_it_runs_is_charged() -> None:
    """Also where the device is seen to be down before its record comes."""
    cluster = preparing("a", "b")
    run_until(cluster, Phase.RUNNING)
    cluster.fail_worker("b", has_spare=False)
    cluster.deliver(cluster.nodes[cluster.leader])
    cluster.lead()
    assert cluster.phase("first").phase is Phase.RUNNING
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RECOVERING)
    assert cluster.phase("first").failures.num_deaths == 1
    assert charged(cluster, "b") == 1
