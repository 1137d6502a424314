"""Which nodes a job starts on while others come and go."""

from headway.daemon.cluster.format import decode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Phase, PlanRecord
from headway.daemon.decide.cluster_view import LONGEST_UNREST_S, SETTLE_S, Unrest
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

FLAPS_EVERY_S = 1.5


def test_a_group_of_nodes_is_waited_for() -> None:
    """Three nodes within 3 s: all count from when the last of them has settled."""
    unrest = Unrest()
    for number, at in enumerate((100.0, 101.5, 103.0)):
        unrest.changed(f"n{number}", now=at)
    assert unrest.settled_at == 103.0 + SETTLE_S


def test_an_endless_row_of_newcomers_is_not_waited_for() -> None:
    """A node every second: after a while a job may start, on those that have settled."""
    unrest = Unrest()
    for number in range(60):
        unrest.changed(f"n{number}", now=100.0 + number)
    assert unrest.settled_at == 100.0 + LONGEST_UNREST_S
    assert unrest.unsettled([f"n{number}" for number in range(60)], now=159.0) == {"n58", "n59"}
    assert len(unrest.changed_at) <= 3, "the memory of changes is short"


def test_a_node_that_flaps_does_not_hold_up_a_queued_job() -> None:
    """A node comes and goes every 1.5 s: the job starts within seconds on the other one, without it."""
    cluster = SimulatedCluster()
    cluster.add_node("steady")
    cluster.submit(small_spec("first", batches=2000))
    began = cluster.now

    def flap() -> bool:
        if int((cluster.now - began) / FLAPS_EVERY_S) % 2:
            if "flapping" not in cluster.nodes:
                cluster.add_node("flapping")
        elif "flapping" in cluster.nodes:
            cluster.kill("flapping")
            cluster.expire("flapping")
        return cluster.phase("first").phase is Phase.RUNNING or cluster.now > began + 60

    cluster.calm(until=flap)
    assert cluster.now - began < LONGEST_UNREST_S + 5
    plan = decode(cluster.store.values[Keys.of("first", "plan")], PlanRecord)
    assert {stage.node for stage in plan.workers} == {"steady"}


def test_a_node_that_went_twice_is_left_out_of_a_start() -> None:
    """A node that went twice in the last minutes is there again, for longer than nodes settle: the job starts on the
    other one, and moves to it only later."""
    cluster = SimulatedCluster()
    cluster.quarantine_after = 3
    cluster.add_node("steady")
    for _ in range(3):
        cluster.add_node("flapping")
        cluster.calm(max_rounds=4)
        cluster.kill("flapping")
        cluster.expire("flapping")
        cluster.calm(max_rounds=1)
    cluster.add_node("flapping")
    cluster.calm(max_rounds=6)
    cluster.submit(small_spec("first", batches=2000))
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RUNNING)
    plan = decode(cluster.store.values[Keys.of("first", "plan")], PlanRecord)
    assert {stage.node for stage in plan.workers} == {"steady"}
    cluster.calm(until=lambda: len(decode(cluster.store.values[Keys.of("first", "plan")], PlanRecord).workers) == 2)


def test_a_node_that_changes_again_stays_unsettled() -> None:
    """The changes before its last one are forgotten, and those of others are not forgotten with it."""
    unrest = Unrest()
    for name, at in (("one", 100.0), ("two", 100.5), ("one", 101.5), ("three", 102.2)):
        unrest.changed(name, now=at)
    assert unrest.changed_at == {"two": 100.5, "one": 101.5, "three": 102.2}
    assert unrest.unsettled(["one", "two", "three"], now=102.6) == {"one", "three"}
    unrest.changed("four", now=103.0)
    assert unrest.changed_at == {"one": 101.5, "three": 102.2, "four": 103.0}
