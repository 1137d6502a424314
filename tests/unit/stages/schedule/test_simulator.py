"""What the simulator predicts: the figures of the design, for the very function that drives the stages."""

from dataclasses import replace

import pytest

from headway.stages.schedule.simulator import LinkTimes, Simulation, StageTimes, simulate
from headway.stages.spec import ScheduleName
from tests.rigs.eventful_pipeline import EventfulPipeline
from tests.rigs.strategies import stage_schedules

MICROBATCH_S = 3.0
"""Backward takes twice the time of forward."""


def run(
    schedule: ScheduleName,
    p: int,
    m: int,
    *,
    update: float = 0.0,
    has_clip: bool = False,
    far_latency: float = 0.0,
    num_batches: int = 24,
    jitter: float = 0.0,
    seed: int = 0,
) -> Simulation:
    """Equal stages; one far link in the middle, its one-way latency in microbatch times."""
    latencies = [far_latency if s == p // 2 - 1 else 0.0 for s in range(p - 1)]
    return EventfulPipeline(
        stage_schedules(
            schedule, m, p, num_batches=num_batches, round_trips=tuple(2 * x for x in latencies), has_clip=has_clip
        ),
        [StageTimes(forward=1.0, backward=2.0, update=update)] * p,
        links=[LinkTimes(latency=x * MICROBATCH_S) for x in latencies],
        jitter=jitter,
        seed=seed,
    ).run()


def share(simulation: Simulation) -> float:
    """Of the slowest stage's bound, as the design rounds it."""
    return round(1.0 - simulation.bubble, 2)


@pytest.mark.parametrize("batches_of_stages", [1, 2, 4])
def test_2bw_reaches_the_bound_of_the_slowest_stage(batches_of_stages: int) -> None:
    """No latency, m = p, 2p, 4p, for 2 to 16 stages → no bubble at all."""
    assert [share(run("2bw", p, batches_of_stages * p)) for p in (2, 4, 8, 16)] == [1.0] * 4


@pytest.mark.parametrize(
    ("batches_of_stages", "wanted"),
    [(1, [0.67, 0.57, 0.53, 0.52]), (2, [0.8, 0.73, 0.7, 0.68]), (4, [0.89, 0.84, 0.82, 0.81])],
)
def test_1f1b_pays_its_flush(batches_of_stages: int, wanted: list[float]) -> None:
    """A flush each batch → m / (m + p - 1) of the bound, as in the design's table."""
    assert [share(run("1f1b", p, batches_of_stages * p)) for p in (2, 4, 8, 16)] == wanted


@pytest.mark.parametrize(("latency", "wanted"), [(0, 1.0), (1, 1.0), (2, 1.0), (3, 0.94), (4, 0.84)])
def test_2bw_hides_a_far_link_while_there_are_microbatches_enough(latency: float, wanted: float) -> None:
    """p = 4, m = 8: no loss while m ≥ p + 2L, then it falls slowly; 1f1b is at a third already."""
    assert share(run("2bw", 4, 8, far_latency=latency)) == wanted
    if latency == 2:
        assert share(run("1f1b", 4, 8, far_latency=latency)) == 0.35


@pytest.mark.parametrize(("p", "m", "update", "wanted"), [(4, 16, 3.0, 1.0), (8, 32, 9.0, 1.0)])
def test_clipping_costs_little_because_updates_come_last(p: int, m: int, update: float, wanted: float) -> None:
    """An update as long as a microbatch, or three: free with clip as without, for there is slack."""
    assert share(run("2bw", p, m, update=update)) == 1.0
    assert share(run("2bw", p, m, update=update, has_clip=True)) == wanted


@pytest.mark.parametrize(("p", "m", "gain"), [(2, 2, 1.01), (2, 8, 1.02), (4, 4, 1.02), (4, 16, 1.05), (8, 16, 1.07)])
def test_slack_makes_up_for_times_that_vary(p: int, m: int, gain: float) -> None:
    """Every operation up to half as long again, a dozen seeds: faster than with the depths that equal times need."""
    with_slack = stage_schedules("2bw", m, p, num_batches=24)
    without = [replace(schedule, depth=p - s) for s, schedule in enumerate(with_slack)]
    times = [StageTimes(forward=1.0, backward=2.0)] * p
    seconds = [
        sum(EventfulPipeline(schedules, times, jitter=0.5, seed=seed).run().step_seconds for seed in range(12))
        for schedules in (without, with_slack)
    ]
    assert seconds[0] > gain * seconds[1]


def test_the_same_seed_gives_the_same_times() -> None:
    """Jitter is a function of its seed → equal seeds give equal timelines, others do not; none is never slower."""
    once, again, other = (run("2bw", 3, 4, num_batches=8, jitter=0.5, seed=seed) for seed in (1, 1, 2))
    assert once.timeline == again.timeline
    assert once.total_seconds != other.total_seconds
    assert run("2bw", 3, 4, num_batches=8).total_seconds < min(once.total_seconds, other.total_seconds)


def test_a_thin_link_bounds_the_rate() -> None:
    """A frame takes five seconds on the line and a microbatch three → five seconds a microbatch."""
    simulation = simulate(
        stage_schedules("2bw", 4, 2, num_batches=16, round_trips=(4.0,)),
        [StageTimes(forward=1.0, backward=2.0)] * 2,
        links=[LinkTimes(bandwidth=10.0, frame_bytes=50)],
    )
    assert simulation.step_seconds == pytest.approx(4 * 5.0)


def test_a_two_stage_pipeline_runs_as_written() -> None:
    """Golden: every operation of both stages, and the seconds at which they end."""
    simulation = run("2bw", 2, 2, num_batches=2)
    ops = [[done for done in simulation.timeline if done.stage == s] for s in (0, 1)]
    assert " ".join(str(done.op) for done in ops[0]) == "F0.0 F0.1 F1.0 B0.0 F1.1 B0.1 U0 B1.0 B1.1 U1"
    assert " ".join(str(done.op) for done in ops[1]) == "F0.0 B0.0 F0.1 B0.1 F1.0 B1.0 F1.1 B1.1 U0 U1"
    assert [done.ended for done in ops[0]] == [1, 2, 3, 6, 7, 9, 9, 12, 15, 15]
    assert simulation.peak_in_flight == (3, 1)
