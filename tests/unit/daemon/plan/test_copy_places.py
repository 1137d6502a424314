"""Where copies of a stage's layers go: to other machines, away from neighbours, near by, and evenly."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from headway.daemon.cluster.measurements import Port
from headway.daemon.cluster.records import NodeRecord, PlanRecord, WorkerPart
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec, PlacementSpec
from headway.daemon.plan import copy_places as module
from headway.daemon.plan.copy_places import copy_places, num_copies
from headway.daemon.plan.devices import natural
from headway.daemon.plan.paths import BlockedWay, BlockedWays

SPEC = JobSpec(job=JobSection(name="j"))


def node(name: str, *, host: str = "", site: str = "here", is_draining: bool = False) -> NodeRecord:
    return NodeRecord(
        name=name,
        incarnation=f"{name}-1",
        address="",
        host=host or name,
        site=site,
        devices=(),
        memory_bytes=0,
        arithmetic_class="",
        is_draining=is_draining,
    )


def places(stages: str, *nodes: NodeRecord, copies: int = 2) -> tuple[tuple[str, ...], ...]:
    """One stage on each of these nodes; the nodes that keep copies of each."""
    plan = PlanRecord(
        generation=1,
        timeline=1,
        workers=tuple(
            WorkerPart(node=name, node_incarnation=f"{name}-1", device_index=0, layers=(f"l{name}",), depth=1)
            for name in stages
        ),
    )
    spec = replace(SPEC, fault=FaultSpec(copies=copies))
    return copy_places(spec, plan, {node.name: node for node in nodes})


def test_a_copy_is_never_on_the_stages_own_node() -> None:
    """Two nodes are each other's; one alone has nobody; three copies of two nodes are two."""
    assert places("ab", node("a"), node("b")) == (("b",), ("a",))
    assert places("a", node("a")) == ((),)
    assert places("ab", node("a"), node("b"), copies=3) == (("b",), ("a",))


def test_a_copy_is_on_another_machine_where_there_is_one() -> None:
    """b runs on a's machine, c on another: both would be lost with a's."""
    assert places("a", node("a", host="m"), node("b", host="m"), node("c", host="n")) == (("c",),)
    assert places("a", node("a", host="m"), node("b", host="m")) == (("b",),)


def test_no_two_copies_are_on_one_machine_where_there_are_more() -> None:
    """Three copies of a: b and c share a machine, d has its own: two machines may be lost, and one copy is left."""
    nodes = [node("a"), node("b", host="m"), node("c", host="m"), node("d")]
    assert places("a", *nodes, copies=3) == (("b", "d"),)


def test_a_copy_is_away_from_the_neighbouring_stages() -> None:
    """Of four stages in a row, each has its copy two stages on; a node without a stage is as good."""
    first, second, third, fourth = places("abcd", *(node(name) for name in "abcd"))
    assert (set(first) <= {"c", "d"}, second, third, set(fourth) <= {"a", "b"}) == (True, ("d",), ("a",), True)
    assert places("ab", node("a"), node("b"), node("c")) == (("c",), ("c",))


def test_a_copy_stays_in_its_site() -> None:
    """b is far away, c is near: every snapshot would have to cross the slow link."""
    assert places("a", node("a"), node("b", site="there"), node("c")) == (("c",),)


def test_copies_are_spread_evenly() -> None:
    """Three stages of a, b, c, and three more nodes: each of these has one; with three copies, two."""
    six = [node(name) for name in "abcdef"]
    found = places("abc", *six, copies=2)
    assert len({name for (name,) in found}) == 3
    assert all(len(set(names)) == 2 for names in places("abc", *six, copies=3))


def test_a_node_that_leaves_is_the_last_choice() -> None:
    """c drains: b, though it is a neighbour; c, if there is nobody else."""
    leaving = node("c", is_draining=True)
    assert places("ab", node("a"), node("b"), leaving) == (("b",), ("a",))
    assert places("a", node("a"), leaving) == (("c",),)


@pytest.mark.parametrize(("copies", "num_nodes", "expected"), [(2, 1, 1), (2, 5, 2), (3, 2, 2), (1, 5, 1), (2, 0, 1)])
def test_as_many_copies_as_there_are_nodes(copies: int, num_nodes: int, expected: int) -> None:
    """What is restorable depends on who lives: one node alone cannot hold two copies."""
    nodes = {name: node(name) for name in "abcdefg"[:num_nodes]}
    assert num_copies(replace(SPEC, fault=FaultSpec(copies=copies)), nodes) == expected


def test_only_nodes_of_the_jobs_sites_count() -> None:
    """The job is to stay in one site: its state does too."""
    spec = replace(SPEC, placement=PlacementSpec(sites=("here",)))
    assert num_copies(spec, {"a": node("a"), "b": node("b", site="there")}) == 1


def replicated(spec: JobSpec, *nodes: NodeRecord, stages: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """stages: per stage, the nodes of its replicas, the lead first."""
    workers = tuple(
        WorkerPart(
            node=name, node_incarnation=f"{name}-1", device_index=0, layers=(f"l{index}",), depth=1, groups=(replica,)
        )
        for index, names in enumerate(stages)
        for replica, name in enumerate(names)
    )
    plan = PlanRecord(generation=1, timeline=1, workers=workers)
    return copy_places(spec, plan, {node.name: node for node in nodes})


def test_replicas_of_a_stage_are_its_first_copies() -> None:
    """2-1 on a, b and c with d spare: b has a's layers anyway, though it is a's neighbour; c's go to d."""
    nodes = [node(name) for name in "abcd"]
    assert replicated(SPEC, *nodes, stages=("ab", "c")) == (("b",), ("d",))


def test_a_replica_on_the_leads_machine_is_no_copy_while_there_is_another_machine() -> None:
    """a and b share a machine, which would take both with it: c on another one; b where there is none."""
    nodes = [node("a", host="m"), node("b", host="m")]
    assert replicated(SPEC, *nodes, node("c"), stages=("ab",)) == (("c",),)
    assert replicated(SPEC, *nodes, node("c", host="m"), stages=("ab",)) == (("b",),)


def test_replicas_count_as_holders_up_to_the_copies_that_are_wanted() -> None:
    """Three copies of a stage of two replicas need one node more, of three replicas none; two copies need one place."""
    nodes, three = [node(name) for name in "abcd"], replace(SPEC, fault=FaultSpec(copies=3))
    assert replicated(three, *nodes, stages=("ab",)) == (("b", "c"),)
    assert replicated(three, *nodes, stages=("abc",)) == (("b", "c"),)
    assert replicated(SPEC, *nodes, stages=("abc",)) == (("b",),)


def test_a_replica_that_is_gone_or_drains_is_no_place_for_a_copy() -> None:
    """b drains or is gone: a's copy is on c. The lead a is gone: b has one, and c one more."""
    nodes = [node("a"), node("b", is_draining=True), node("c")]
    assert replicated(SPEC, *nodes, stages=("ab",)) == (("c",),)
    assert replicated(SPEC, node("a"), node("c"), stages=("ab",)) == (("c",),)
    assert replicated(SPEC, node("b"), node("c"), stages=("ab",)) == (("b", "c"),)


def test_a_copy_is_with_a_node_that_can_fetch_it_where_there_is_one() -> None:
    """b comes first by name, but does not reach a's daemon; where there is only b, it is b."""
    plan = PlanRecord(
        generation=1,
        timeline=1,
        workers=(WorkerPart(node="a", node_incarnation="a-1", device_index=0, layers=("l",), depth=1),),
    )
    blocked = BlockedWays((BlockedWay("b", "a", Port.DAEMON, "a:7001", "no answer"),))
    nodes = {name: node(name) for name in "abc"}
    assert copy_places(SPEC, plan, nodes) == (("b",),)
    assert copy_places(SPEC, plan, nodes, blocked=blocked) == (("c",),)
    del nodes["c"]
    assert copy_places(SPEC, plan, nodes, blocked=blocked) == (("b",),)


def test_copies_of_many_jobs_do_not_meet_on_one_node() -> None:
    """Each job runs on two of nine nodes, and its copies go on from there."""
    nodes = [node(name) for name in "abcdefghi"]
    kept = Counter(name for pair in ("ab", "de", "gh") for stage in places(pair, *nodes) for name in stage)
    assert max(kept.values()) == 1


@pytest.mark.parametrize("seed", range(200))
def test_the_place_is_the_one_with_the_fewest_faults(seed: int) -> None:
    """The search ends at a node without a fault; over all nodes it would have found the same one."""
    draw = random.Random(seed)
    names = [f"n{number}" for number in range(draw.randint(1, 12))]
    nodes = sorted(
        (
            node(name, host=draw.choice(names), site=draw.choice("ab"), is_draining=draw.random() < 0.2)
            for name in names
        ),
        key=lambda one: natural(one.name),
    )
    own = draw.choice([None, *nodes])
    hosts, siblings, neighbours = ({draw.choice(names) for _ in range(draw.randint(0, 3))} for _ in range(3))
    load = Counter(draw.choices(names, k=draw.randint(0, 6)))

    def faults(one: NodeRecord) -> tuple[object, ...]:
        is_far = own is not None and one.site != own.site
        near = (one.name not in siblings, one.name in neighbours, is_far)
        return one.is_draining, one.host in hosts, *near, load[one.name], natural(one.name)

    found = module._best(
        partial(iter, nodes), own=own, siblings=siblings, hosts=hosts, neighbours=neighbours, load=load
    )
    assert found is min(nodes, key=faults)
