"""A re-cut is held to what it promised, and noise alone moves no job."""

from dataclasses import replace

import pytest

from headway.daemon.plan.rebalance import (
    LEAST_PACES,
    MEMORY_S,
    SPREADS,
    WORTH_A_CUT,
    MoveCost,
    Outlook,
    Promises,
    judge,
)
from headway.stages.telemetry.layer_times import spread_of
from tests.rigs.noisy_recuts import NoisyRecuts

TWICE = Outlook(present_s=2.0, best_s=1.0, is_other=True, batches_left=10_000, cost=MoveCost())


def after(paces: dict[int, float], *, factor: float) -> Promises:
    """Plan 1 and then plan 2, which promises a factor, each at its pace."""
    promises = Promises().plan_changed(1, factor=0.0, now=0.0)
    for generation, pace in paces.items():
        if generation > 1:
            promises = promises.plan_changed(generation, factor=factor, now=100.0)
        for _ in range(LEAST_PACES):
            promises = promises.progressed(generation, pace)
    return promises


@pytest.mark.parametrize(("pace", "doubt"), [(3000.0, 0.0), (2900.0, 0.0), (2000.0, 0.9), (1000.0, 1.9), (500.0, 1.9)])
def test_what_a_change_did_not_bring_is_doubt(pace: float, doubt: float) -> None:
    """2.9 times as fast was predicted, and the pace before was 1,000 tokens a second."""
    assert after({1: 1000.0, 2: pace}, factor=2.9).doubt(100.0) == pytest.approx(doubt)


def test_doubts_add_up_and_are_forgotten_evenly() -> None:
    """Twice 1.9 times too much was promised; half the memory's time later half of it counts."""
    promises = after({1: 1000.0, 2: 1000.0, 3: 1000.0}, factor=2.9)
    assert promises.doubt(100.0) == pytest.approx(3.8)
    assert promises.doubt(100.0 + MEMORY_S / 2) == pytest.approx(1.9)
    assert promises.doubt(100.0 + MEMORY_S) == 0.0


def test_a_change_that_had_to_be_and_a_pace_that_is_not_known_promise_nothing() -> None:
    """A drain, a recovery, a plan that has only begun."""
    assert after({1: 1000.0, 2: 500.0}, factor=0.0).made == ()
    barely = Promises().plan_changed(1, factor=0.0, now=0.0).progressed(1, 1000.0).plan_changed(2, factor=2.0, now=1.0)
    assert barely.made == ()
    begun = after({1: 1000.0}, factor=2.0).plan_changed(2, factor=2.0, now=1.0).progressed(2, 10.0)
    assert begun.doubt(1.0) == 0.0
    assert begun.progressed(1, 5000.0) == begun, "late word of the plan before"


def test_the_bar_rises_with_doubt_for_every_change_and_with_spread_for_cuts() -> None:
    """Twice as fast is enough, unless twice was within the noise, or the like was promised before."""
    assert judge(TWICE).is_worth_it
    assert judge(replace(TWICE, spread=9.0)).is_worth_it, "noise hides no node that is slowed to a third"
    assert judge(replace(TWICE, present_s=1.3, spread=(1.3 - WORTH_A_CUT) / SPREADS - 0.01)).is_worth_it
    noisy = replace(TWICE, present_s=1.3, spread=(1.3 - WORTH_A_CUT) / SPREADS + 0.01)
    assert judge(noisy).reason == "a plan predicted 1.3× faster lies within the noise of the measurements"
    assert judge(replace(noisy, brings_workers=True)).is_worth_it
    doubted = judge(replace(TWICE, doubt=1.0, brings_workers=True))
    assert doubted.reason == "a plan predicted 2× faster is not tried now: the last ones gained less than predicted"
    assert doubted.is_close
    assert doubted.wait_s > 0, "doubt is forgotten by time alone"


def test_spread_is_that_of_the_middle_samples() -> None:
    """One hiccup is not noise; too few samples say nothing."""
    assert spread_of([1.0, 1.0, 9.0, 1.0, 1.0]) == 0.0
    assert spread_of([0.7, 0.8, 1.0, 1.2, 1.3]) == pytest.approx(0.2)
    assert spread_of([1.0, 2.0]) == 0.0
    assert spread_of([0.0, 0.0, 0.0, 1e-9]) == 0.0, "a clock that is too coarse for a layer ends no worker"


@pytest.mark.parametrize("num_nodes", [2, 3, 6])
@pytest.mark.parametrize("seed", range(3))
def test_equal_nodes_with_noise_are_hardly_ever_cut_anew(num_nodes: int, seed: int) -> None:
    """Samples are off by up to 30 %: at most two cuts in 6,000 batches. A node slowed to a third is left at once."""
    job = NoisyRecuts(num_nodes=num_nodes, noise=0.3, seed=seed)
    job.run(6000)
    assert len(job.cuts) <= 2
    job.nodes[1].slowness = 3.0
    slowed_at = job.batch
    job.run(500, until_cut=True)
    assert job.batch - slowed_at <= 100


def test_a_busy_host_does_not_thrash_a_job() -> None:
    """Samples of some node take six times as long for a while, batches do not: soon no prediction is believed."""
    believing, careful = (NoisyRecuts(num_nodes=2, noise=0.1, seed=1, burst=6.0) for _ in range(2))
    believing.believes = False
    believing.run(6000)
    careful.run(6000)
    assert len(believing.cuts) > 40, "or this shows nothing"
    assert len(careful.cuts) <= 5
