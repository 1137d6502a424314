"""A worker's measurements are recorded when they have changed."""

from dataclasses import replace

import pytest

from headway.daemon.agent.profiling import has_moved, profile_of, with_demand
from headway.daemon.cluster.measurements import LayerTime, ProfileRecord
from headway.daemon.cluster.records import Device
from headway.daemon.decide.outlook import LEAST_SAMPLES
from headway.daemon.worker.goal import Heartbeat
from tests.rigs.agent_views import job, node_record, plan


def beat(*, block: float = 1.0, embed: float = 0.001, update: float = 0.1, replan: float = 0.0) -> Heartbeat:
    layers = {
        "block": LayerTime(forward_s=block, backward_s=2 * block, update_s=update),
        "embed": LayerTime(forward_s=embed, backward_s=embed, update_s=update),
    }
    samples = LEAST_SAMPLES + 2
    return Heartbeat(job="demo", generation=3, num_samples=samples, peak_bytes=1000, replan_s=replan, layers=layers)


def test_a_profile_is_the_heartbeats_medians_to_three_digits() -> None:
    record = profile_of(beat(block=1.23456))
    assert record.generation == 3
    assert (record.layers["block"].forward_s, record.layers["block"].backward_s) == (1.23, 2.47)
    assert list(record.layers) == ["block", "embed"]


def test_five_percent_of_what_counts_is_a_move() -> None:
    """The first is; noise and a layer that costs nothing are not; a stranger layer or a change of plan is."""
    before = profile_of(beat())
    assert has_moved(None, before)
    assert not has_moved(before, profile_of(beat(block=1.04)))
    assert has_moved(before, profile_of(beat(block=1.06)))
    assert not has_moved(before, profile_of(beat(embed=0.002))), "twice of nothing"
    assert has_moved(before, profile_of(beat(update=0.2)))
    assert has_moved(before, profile_of(beat(replan=1.5)))
    fewer = {kind: times for kind, times in beat().layers.items() if kind != "embed"}
    assert has_moved(before, profile_of(replace(beat(), layers=fewer)))
    assert has_moved(before, profile_of(replace(beat(), peak_bytes=1100)))


def test_the_same_times_under_another_plan_are_told() -> None:
    """Only what was measured under the plan in force counts, and only with enough samples: both must be seen."""
    before = profile_of(beat())
    assert has_moved(before, profile_of(replace(beat(), generation=4)))
    few, enough = (replace(beat(), num_samples=number) for number in (LEAST_SAMPLES - 1, LEAST_SAMPLES))
    assert has_moved(profile_of(few), profile_of(enough))
    assert not has_moved(profile_of(enough), before)


def measured(
    before: ProfileRecord | None, *, generation: int, peak: int, samples: int = LEAST_SAMPLES
) -> ProfileRecord:
    """What node a writes under a plan that predicts a peak of 1000 bytes."""
    view = job(profiles={("a", 0): before} if before is not None else {})
    offered = plan(generation, ("a", ("block.0",)))
    view.plan = replace(offered, workers=(replace(offered.workers[0], device_bytes=1000),))
    record = ProfileRecord(generation=generation, peak_bytes=peak, num_samples=samples)
    card = Device(kind="cuda", model="H100")
    return with_demand(record, view, replace(node_record("a"), devices=(card,)), 0)


def test_one_odd_peak_fades_with_the_plans_that_follow() -> None:
    """Once for each plan with enough samples, down to nothing; within a plan it stays."""
    odd = measured(None, generation=1, peak=2000)
    assert odd.demand == 2.0
    assert measured(odd, generation=1, peak=900).demand == 2.0
    early = measured(odd, generation=2, peak=900, samples=LEAST_SAMPLES - 1)
    assert early.demand == 2.0
    second = measured(early, generation=2, peak=900)
    assert second.demand == 1.5
    assert measured(second, generation=2, peak=900).demand == 1.5
    for generation in range(3, 20):
        second = measured(second, generation=generation, peak=900)
    assert second.demand == 1.0


def test_a_peak_that_comes_again_counts_again() -> None:
    """The newest measurement is the least that the factor is; without one, nothing is forgotten."""
    odd = measured(None, generation=1, peak=2000)
    assert measured(odd, generation=2, peak=1900).demand == pytest.approx(1.9)
    assert measured(odd, generation=2, peak=0).demand == 2.0
