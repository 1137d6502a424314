"""A device whose worker does not start is in a plan: others take over at once, and the job says why, simulated."""

import pytest

from headway.daemon.records import Phase
from tests.fakes.simulated_cluster import SimulatedCluster, small_spec
from tests.unit.coordinator.test_nodes_that_stay_out import recovering
from tests.unit.coordinator.test_recovery import recovered
from tests.unit.coordinator.test_scenarios import events, plan, run_until

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
    name = job.next.stages[0].node
    without_worker(cluster, name)
    began = cluster.now
    run_until(cluster, Phase.RUNNING)
    assert name not in {stage.node for stage in plan(cluster).stages}
    assert cluster.now - began < 20
    assert f"The new plan is dropped: {name} has no worker on device 0 ({TAKEN})" in events(cluster)
    assert not any(cluster.facts().failures.values())


def test_where_nobody_else_is_left_the_job_says_why_and_goes_on_when_there_is_a_worker() -> None:
    """Both nodes are needed: the job waits, and names the device and the reason."""
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
    """The next plan of a job that recovers names it: another plan follows at once, not after the deadline."""
    cluster = recovering("a", "b", "c")
    job = cluster.facts().jobs["first"]
    assert job.next is not None
    assert name in {stage.node for stage in job.next.stages}
    without_worker(cluster, name)
    began = cluster.now
    assert name not in {stage.node for stage in recovered(cluster).stages}
    assert cluster.now - began < 20
