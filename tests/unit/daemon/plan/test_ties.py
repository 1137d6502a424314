"""What a tied embedding costs a plan: links between its ends, the time of the exchange, memory."""

from dataclasses import replace

import pytest

from headway.daemon.cluster.records import WorkerPart
from headway.daemon.jobs.job import JobSpec, PlacementSpec
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.link_choice import linked, linked_pairs
from headway.daemon.plan.planner import PlanRefused, make_plan
from tests.rigs.blocked_planning import names, ways
from tests.rigs.clusters import job, node, planned


def tied_job(*, vocab_size: int = 256, **fields: object) -> JobSpec:
    spec = job(**fields)  # type: ignore[arg-type]
    return replace(spec, model=replace(spec.model, tie_word_embeddings=True, vocab_size=vocab_size))


def test_the_ends_have_a_link_where_they_share_a_group() -> None:
    """Stages of 2, 1 and 2 workers: each worker of an end and those of the other that share a group."""
    groups = [(0, 2), (1, 3), (), (0, 1), (2, 3)]
    layers = [("embed",), ("embed",), ("block.0",), ("head",), ("head",)]
    stages = [
        WorkerPart(node=f"n{k}", node_incarnation="i", device_index=0, layers=layers[k], depth=1, groups=groups[k])
        for k in range(5)
    ]
    tied = [linked(stages, k, trains_tie=True).tied for k in range(5)]
    assert tied == [(3, 4), (3, 4), (), (0, 1), (0, 1)]
    assert [linked(stages, k, trains_tie=False).tied for k in range(5)] == [()] * 5
    assert ("n0", "n3") in linked_pairs(stages, trains_tie=True)
    assert ("n0", "n3") not in linked_pairs(stages, trains_tie=False)
    two = [replace(stages[0], groups=()), replace(stages[3], groups=())]
    assert linked(two, 0, trains_tie=True).tied == (), "neighbours have a link already"


@pytest.mark.parametrize("number", [4, 5, 7, 12, 20])
def test_ends_are_never_on_a_blocked_pair(number: int) -> None:
    """All nodes work, and every second pair cannot talk: the ring avoids them."""
    blocked = ways(*((f"n{index}", f"n{index + 1}") for index in range(0, number - 1, 2)))
    spec = tied_job(num_blocks=2 * number, microbatches=2 * number, placement=PlacementSpec(min_nodes=number))
    plan = planned(spec, names(number), blocked=blocked)
    assert len(plan.workers) == number
    assert linked_pairs(plan.workers, trains_tie=True).isdisjoint(blocked.pairs)


def test_three_stages_need_all_three_pairs() -> None:
    """Untied, the node in the middle talks to both. Tied, the ends have to talk too."""
    three = PlacementSpec(min_nodes=3)
    blocked = ways(("n0", "n1"))
    planned(job(num_blocks=4, placement=three), names(3), blocked=blocked)
    assert isinstance(make_plan(tied_job(num_blocks=4, placement=three), names(3), blocked=blocked), PlanRefused)


@pytest.mark.parametrize("number", [2, 6])
def test_a_large_tie_brings_the_ends_into_one_site(number: int) -> None:
    """Between two sites a tie of many bytes costs more than hidden states that cross once more."""
    nodes = [node(f"{site}{k}", site=site) for site in "ab" for k in range(number)]
    placement = PlacementSpec(min_nodes=2 * number)
    fields = {"num_blocks": 4 * number, "microbatches": 16, "sequence_length": 8, "placement": placement}
    small = planned(tied_job(vocab_size=256, **fields), nodes)
    large = planned(tied_job(vocab_size=150_000, **fields), nodes)
    sites = [[stage.node[0] for stage in plan.workers] for plan in (small, large)]
    assert sites[1][0] == sites[1][-1]
    assert sum(one != other for one, other in zip(sites[0], sites[0][1:], strict=False)) == 1
    assert large.tie is not None


def test_an_exchange_that_is_slower_than_a_batch_sets_the_pace() -> None:
    """With delay it runs beside the next batch, without it adds up; the explanation names it."""
    links = LinkAssumptions(site_bytes_per_s=1e6)
    two = PlacementSpec(min_nodes=2)
    tie_s = 4 * 30_000 * 256 / 1e6
    with_delay = planned(tied_job(vocab_size=30_000, placement=two), names(2), links=links)
    assert with_delay.tie is not None
    assert with_delay.tie.batch_seconds == pytest.approx(tie_s)
    assert with_delay.predicted_batch_seconds == pytest.approx(tie_s, rel=0.05)
    assert "The sums of the tied embedding between" in with_delay.explanation()[0]
    without = planned(tied_job(vocab_size=30_000, placement=two, schedule="1f1b"), names(2), links=links)
    untied = planned(job(placement=two, schedule="1f1b"), names(2), links=links)
    assert without.predicted_batch_seconds > tie_s + 0.5 * untied.predicted_batch_seconds
    assert any("The embedding is tied" in line for line in without.explanation())


def test_both_ends_count_the_buffers_of_the_tie() -> None:
    """Under 2bw: the sums that wait, those that arrive, and their sum; the other stages count nothing."""
    three = PlacementSpec(min_nodes=3)
    spec = tied_job(vocab_size=4000, num_blocks=7, placement=three)
    tied = planned(spec, names(3))
    untied = planned(replace(spec, model=replace(spec.model, tie_word_embeddings=False)), names(3))
    assert [stage.layers for stage in tied.workers] == [stage.layers for stage in untied.workers]
    more = [one.device_bytes - other.device_bytes for one, other in zip(tied.estimates, untied.estimates, strict=True)]
    assert more == [3 * 4 * 4000 * 256, 0, 3 * 4 * 4000 * 256]
