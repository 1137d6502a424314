"""Plans whose nodes cannot all dial each other: a link through a relay is slower, and direct neighbours are better."""

import random
from dataclasses import replace
from itertools import pairwise, permutations

import pytest

from headway.daemon.client.plan_simulation import forecast
from headway.daemon.cluster.measurements import LinkProbe
from headway.daemon.cluster.records import NodeRecord, PlanRecord
from headway.daemon.jobs.job import JobSpec, PlacementSpec
from headway.daemon.plan.connections import LinkAssumptions, Links
from headway.daemon.plan.link_choice import link_sentences, planned_links
from headway.daemon.plan.paths import RelayedWays
from headway.daemon.plan.plan_question import ask, differs_in_measurements_alone, still_answers
from headway.daemon.plan.planner import ClusterPlan, answer, assemble
from headway.daemon.plan.predicted_time import place, predict
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.search import WORTH_A_STAGE
from headway.daemon.plan.stage_costs import StageCosts
from tests.rigs.clusters import job, node, planned
from tests.rigs.every_cut import PipelineCut

RELAY = "relay:7070"
QUICK = LinkProbe(round_trip_s=0.01, bytes_per_s=1e9)


def far(name: str, *relays: str) -> NodeRecord:
    """A node that can only dial out."""
    return replace(node(name), address=f"{','.join(relays) or RELAY}/{name}~")


def near(name: str) -> NodeRecord:
    """A node that others dial."""
    return replace(node(name), address=f"{name}:7070")


def all_equal(nodes: list[NodeRecord]) -> Profiles:
    """Measurements in which each link is as fast as any other, whatever way it goes."""
    ways = RelayedWays.of(nodes, nodes)
    pairs = permutations([each.name for each in nodes], 2)
    return Profiles.of(links={pair: replace(QUICK, via=ways.between(*pair)) for pair in pairs})


def chain(nodes: list[NodeRecord], profiles: Profiles | None = None) -> list[str]:
    """The nodes of a plan that needs all of them, in its order."""
    number = len(nodes)
    spec = job(num_blocks=2 * number, microbatches=2 * number, placement=PlacementSpec(min_nodes=number))
    plan = planned(spec, nodes, profiles=profiles)
    assert len(plan.workers) == number
    return [stage.node for stage in plan.workers]


def num_relayed(order: list[str] | tuple[str, ...], nodes: list[NodeRecord]) -> int:
    ways = RelayedWays.of(nodes, nodes)
    return sum(bool(ways.between(*pair)) for pair in pairwise(order))


@pytest.mark.parametrize("is_measured", [False, True])
def test_between_two_nodes_behind_nat_stands_the_one_that_is_their_relay(is_measured: bool) -> None:
    """The first one dials it, and it finds the last one at its own port."""
    nodes = [far("a", "c:7070"), far("b", "c:7070"), near("c")]
    assert chain(nodes, all_equal(nodes) if is_measured else None)[1] == "c"


def test_the_node_that_can_only_dial_out_dials() -> None:
    """Nobody but its relay dials it directly, so it comes first."""
    for nodes in ([near("a"), far("b")], [far("b"), near("a")], [far("b"), near("c")]):
        assert chain(nodes, all_equal(nodes))[0] == "b"


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_of_equal_plans_the_one_with_fewest_relays_wins(seed: int, is_measured: bool) -> None:
    """Compared with every order of the nodes, whatever their relays are."""
    chance = random.Random(seed)
    number = chance.choice((3, 4, 5))
    names = [f"n{index}" for index in range(number)]
    ports = [RELAY, "other:7070", *(f"{name}:7070" for name in names)]
    outside = chance.sample(names, chance.randint(1, number))
    nodes = [
        far(name, *chance.sample([port for port in ports if port.partition(":")[0] not in outside], 2))
        if name in outside
        else near(name)
        for name in names
    ]
    found = chain(nodes, all_equal(nodes) if is_measured else None)
    assert num_relayed(found, nodes) == min(num_relayed(order, nodes) for order in permutations(names))


@pytest.mark.parametrize("is_measured", [False, True])
def test_two_of_many_that_need_no_relay_are_taken(is_measured: bool) -> None:
    """Nodes that are equal in everything else."""
    nodes = [far("a"), far("b"), far("c", "d:7070"), near("d")]
    spec = job(placement=PlacementSpec(min_nodes=2, max_nodes=2))
    plan = planned(spec, nodes, profiles=all_equal(nodes) if is_measured else None)
    assert num_relayed([stage.node for stage in plan.workers], nodes) == 0


def test_a_direct_link_is_worth_more_than_layers_that_stay() -> None:
    """Among equals: whether a running job moves for it is not asked here."""
    nodes, spec = [far("a"), near("b")], job(placement=PlacementSpec(min_nodes=2))
    stages = planned(spec, [near("a"), near("b")]).workers
    order = [replace(stage, node=name, node_incarnation=f"{name}-1") for stage, name in zip(stages, "ba", strict=True)]
    before = PlanRecord(generation=1, timeline=0, workers=tuple(order))
    assert [stage.node for stage in planned(spec, [near("a"), near("b")], previous=before).workers] == ["b", "a"]
    assert [stage.node for stage in planned(spec, nodes, profiles=all_equal(nodes), previous=before).workers] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("number", [10, 20])
def test_of_many_nodes_those_that_are_reached_directly_are_neighbours(number: int) -> None:
    """Where not every order is tried: half of the nodes stand by at another one each."""
    half = number // 2
    nodes = [far(f"n{index}", f"n{half + index}:7070") for index in range(half)]
    nodes += [near(f"n{index}") for index in range(half, number)]
    assert num_relayed(chain(nodes, all_equal(nodes)), nodes) == 0


@pytest.mark.parametrize("number", [10, 20])
def test_of_many_nodes_behind_nat_some_are_direct_neighbours_of_the_only_relay(number: int) -> None:
    nodes = [far(f"n{index}", "z:7070") for index in range(1, number)] + [near("z")]
    assert num_relayed(chain(nodes), nodes) == number - 3


def test_a_link_through_a_relay_makes_a_batch_slower_until_it_is_measured() -> None:
    spec = job(placement=PlacementSpec(min_nodes=2), schedule="1f1b")
    direct, relayed = [near("a"), near("b")], [near("a"), far("b")]
    stages = planned(spec, direct).workers
    assert (predict(spec, stages, relayed) or 0.0) > (predict(spec, stages, direct) or 0.0) > 0.0
    seconds = {predict(spec, stages, nodes, profiles=all_equal(nodes)) for nodes in (direct, relayed)}
    assert len(seconds) == 1


def behind(relay: str, number: int) -> list[NodeRecord]:
    return [far(f"n{index:02}", relay) for index in range(number)]


def through(nodes: list[NodeRecord], bytes_per_s: float) -> Profiles:
    """Measurements in which each link through a relay has some bandwidth, and every other link any."""
    links = dict(all_equal(nodes).links)
    return Profiles.of(
        links={pair: replace(way, bytes_per_s=bytes_per_s) if way.via else way for pair, way in links.items()}
    )


def narrow(spec: JobSpec, part: float) -> float:
    """The bandwidth with which one link takes some part of the time in which one node computes a batch."""
    alone = planned(replace(spec, placement=PlacementSpec()), [near("a")]).predicted_batch_seconds
    two = planned(replace(spec, placement=PlacementSpec(min_nodes=2)), [near("a"), near("b")])
    [link] = two.connections
    return link.batch_seconds * LinkAssumptions().site_bytes_per_s / (part * alone)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_the_links_of_a_plan_through_one_relay_share_its_line(number: int) -> None:
    """The relay carries all of them at once: here its line sets the pace, and not the stages."""
    spec = job(num_blocks=8, microbatches=8, placement=PlacementSpec(min_nodes=number))
    nodes = behind(RELAY, number)
    rate = narrow(spec, 2.0)
    plan = planned(spec, nodes, profiles=through(nodes, rate))
    [seconds] = {link.batch_seconds for link in plan.connections}
    alone = planned(job(num_blocks=8, microbatches=8), [near("a")]).predicted_batch_seconds
    assert seconds == pytest.approx(2.0 * alone * (number - 1))
    assert plan.predicted_batch_seconds >= seconds
    assert predict(spec, plan.workers, nodes, profiles=through(nodes, rate)) == plan.predicted_batch_seconds
    run = forecast(spec, plan.workers, nodes, profiles=through(nodes, rate))
    assert run.step_seconds == pytest.approx(plan.predicted_batch_seconds, rel=0.1)


@pytest.mark.parametrize("number", [4, 6])
def test_a_plan_has_no_more_links_through_a_relay_than_its_line_carries(number: int) -> None:
    """A link takes a fifth of one node's batch: three stages take two fifths, two a half, and four would take three."""
    spec, nodes = job(num_blocks=22, microbatches=24), behind(RELAY, number)
    plan = planned(spec, nodes, profiles=through(nodes, narrow(spec, 0.2)))
    assert len(plan.workers) == 3
    assert len(planned(spec, nodes, profiles=all_equal(nodes)).workers) == number


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_nodes_behind_narrow_relays_is_faster_than_the_plan(seed: int, schedule: str) -> None:
    """Compared with every order of any of the nodes, at every way's own rate."""
    chance = random.Random(seed)
    spec = job(num_blocks=10, microbatches=12, schedule=schedule)
    nodes = [replace(far(name, chance.choice((RELAY, "d:7070"))), site=chance.choice("xy")) for name in "abc"]
    nodes.append(near("d"))
    rate = narrow(spec, 0.2)
    ways = {pair: replace(way, bytes_per_s=rate * chance.uniform(0.5, 3)) for pair, way in all_equal(nodes).links}
    profiles = Profiles.of(links=ways)
    plan = planned(spec, nodes, profiles=profiles)
    slots = ask(spec, nodes).slots
    links = Links(LinkAssumptions(), profiles, relayed=RelayedWays.of(nodes, nodes))
    costs = StageCosts(spec, slots, profiles, links)
    orders = [order for number in range(1, len(slots) + 1) for order in permutations(slots, number)]
    cuts = [found[1] for order in orders if (found := PipelineCut(costs, order).best()) is not None]
    fastest = min(assemble(costs, place(costs, cut), slots, ()).predicted_batch_seconds for cut in cuts)
    assert plan.predicted_batch_seconds <= fastest * WORTH_A_STAGE


@pytest.mark.parametrize("number", [16, 40])
def test_of_many_nodes_behind_one_relay_few_work(number: int) -> None:
    """Its line carries no more: the plan is nearly as fast as the best one of any length, two fifths of one node's."""
    spec, nodes = job(num_blocks=46, microbatches=48), behind(RELAY, number)
    alone = planned(spec, [near("a")]).predicted_batch_seconds
    plan = planned(spec, nodes, profiles=through(nodes, narrow(spec, 0.2)))
    assert plan.predicted_batch_seconds <= 0.51 * alone


def test_of_many_nodes_those_work_that_need_no_relay() -> None:
    """Ten that others dial and ten behind a narrow relay, all equally fast: one of those may come first."""
    nodes = [*behind(RELAY, 10), *(near(f"m{index:02}") for index in range(10))]
    spec = job(num_blocks=46, microbatches=48)
    alone = planned(spec, [near("a")]).predicted_batch_seconds
    plan = planned(spec, nodes, profiles=through(nodes, narrow(spec, 0.2)))
    assert num_relayed([stage.node for stage in plan.workers], nodes) == 0
    assert plan.predicted_batch_seconds <= 0.12 * alone


def test_other_relays_ask_for_a_plan_again_and_leave_the_old_one_usable() -> None:
    """As with a measurement: the job goes on with the plan that it has until the new one is there."""
    spec = job(placement=PlacementSpec(min_nodes=3))
    nodes = [far("a", "c:7070"), far("b", "c:7070"), near("c"), near("d")]
    before = ask(spec, nodes)
    moved = ask(spec, [far("a", "d:7070"), *nodes[1:]])
    plan = answer(before)
    assert isinstance(plan, ClusterPlan)
    assert before != moved
    assert differs_in_measurements_alone(before, moved)
    assert still_answers(plan, before, moved)
    assert before == ask(spec, [far("a", "c:7070", "d:7070"), *nodes[1:]])


@pytest.mark.parametrize("wanted", ["auto", "collective", "grpc"])
def test_two_nodes_behind_nat_of_one_private_site_meet_at_the_relay_too(wanted: str) -> None:
    """Their links dial no other address, and a collective link would need more ports than the one that they have."""
    nodes = [
        replace(far(name), host=name, site="home", site_is_private=True, worker_ports="7070") for name in ("a", "b")
    ]
    spec = job(placement=PlacementSpec(min_nodes=2), link=wanted)
    plan = planned(spec, nodes)
    record = PlanRecord(generation=1, timeline=0, workers=plan.workers)
    [link] = planned_links(spec, record, {each.name: each for each in nodes})
    assert (link.kind, link.via) == ("grpc", RELAY)
    assert [connection.via for connection in plan.connections] == [RELAY]


def test_a_plan_and_its_links_name_the_relay() -> None:
    """A relay has its name if it is a node, else its port."""
    nodes = {each.name: each for each in (near("a"), far("b", "r:7070"), far("c"), near("r"))}
    spec = job(placement=PlacementSpec(min_nodes=4))
    plan = planned(spec, nodes.values())
    order = [nodes[name] for name in ("a", "b", "c", "r")]
    stages = tuple(
        replace(stage, node=each.name, node_incarnation=each.incarnation)
        for stage, each in zip(plan.workers, order, strict=True)
    )
    found = planned_links(spec, PlanRecord(generation=1, timeline=0, workers=stages), nodes)
    assert [(link.lower, link.via) for link in found] == [("b", "r"), ("c", RELAY), ("r", "")]
    told = " ".join(link_sentences(found))
    assert "through the relay r." in told
    assert f"through the relay {RELAY}." in told
    alone = planned(job(placement=PlacementSpec(min_nodes=2)), [far("b"), far("c")])
    assert f"assumed, through the relay {RELAY}." in " ".join(alone.explanation())
