"""Links that are lost: whether a worker, a node, nobody or a pair of nodes is to blame."""

from typing import Any

from headway.daemon.cluster.measurements import Port
from headway.daemon.cluster.records import (
    Failure,
    PlanRecord,
    WorkerPart,
)
from headway.daemon.decide.failures import LostWorker
from headway.daemon.plan.paths import BlockedWay, BlockedWays

PLAN = PlanRecord(
    generation=3,
    timeline=1,
    workers=tuple(
        WorkerPart(node=name, node_incarnation=f"{name}-1", device_index=0, layers=(name,), depth=1) for name in "abc"
    ),
)
BLOCKED = BlockedWays((BlockedWay("b", "a", Port.WORKER, "a:7100", "the connection was refused"),))
OPEN = BlockedWays()


def loss(error: str = "worker-0: the link is lost", **fields: Any) -> LostWorker:
    return LostWorker(position=0, plan=PLAN, failure=Failure(error, **fields))


def test_a_link_that_never_opened_blames_its_pair() -> None:
    unreached = loss(lost_peer=1, was_unreached=True)
    assert unreached.is_between(OPEN)
    assert not unreached.is_death
    assert not unreached.is_held_against_node


def test_a_link_that_was_open_blames_the_pair_if_one_does_not_reach_the_other_now() -> None:
    lost = loss(lost_peer=1)
    assert lost.is_between(BLOCKED)
    assert not lost.is_between(OPEN)
    assert not loss(lost_peer=2).is_between(BLOCKED), "another pair is blocked"


def test_a_worker_killed_because_its_address_moved_blames_nobody() -> None:
    """That also explains what its neighbours report about their links."""
    told = "node a: worker cpu:0 listened at an address that this machine has lost; it was killed"
    moved = loss(f"{told}\nended by signal SIGKILL", was_moved=True)
    assert not moved.is_death
    assert not moved.is_held_against_node
    assert moved.explains_others
    killed = loss("worker-0 ended by signal SIGKILL")
    assert killed.is_held_against_node


def test_a_worker_with_an_error_of_its_own_blames_no_pair() -> None:
    assert not loss(fault="ValueError: x").is_between(BLOCKED)
    assert not LostWorker(position=0, plan=PLAN).is_between(BLOCKED)
