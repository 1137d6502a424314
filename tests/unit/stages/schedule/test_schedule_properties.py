"""What every schedule promises, whatever the times are."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from headway.stages.schedule.operations import Forward, Update
from headway.stages.schedule.simulator import LinkTimes, StageTimes
from headway.stages.schedule.stage_schedule import StageSchedule
from headway.stages.spec import ScheduleName, TrainSpec
from tests.rigs.eventful_pipeline import EventfulPipeline, StopRequest
from tests.rigs.strategies import Case, cases, format_grid, stage_schedules, violation


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_any_pipeline_keeps_every_promise(case: Case) -> None:
    """Random stages, times, latencies, clip and stop: no deadlock, one version per microbatch, each counted once."""
    simulation = case.simulate()
    broken, cell = violation(case, simulation)
    assert not broken, f"{broken}\n{format_grid(simulation.timeline, bad=cell)}"
    assert max(simulation.peak_versions) <= 1 + case.schedules[0].delay
    assert all(peak <= s.depth for peak, s in zip(simulation.peak_in_flight, case.schedules, strict=True))


@pytest.mark.parametrize(("schedule", "sync_batches"), [("1f1b", 0), ("2bw", 0), ("2bw", 3)])
def test_a_slow_lead_stops_no_sibling_in_a_batch_that_it_has_begun(schedule: ScheduleName, sync_batches: int) -> None:
    """The sibling computes ten times as fast, and with delay it is a batch ahead of the lead: wherever the stop is
    asked for, both end at one boundary with nothing half done."""
    train = TrainSpec(schedule=schedule, sync_batches=sync_batches, batches=8, microbatches=4, reduction_groups=2)
    schedules = tuple(
        StageSchedule.of(train, stage_index=0, num_stages=1, depth=4, groups=groups) for groups in ((0,), (1,))
    )
    case = Case(
        schedule=schedule,
        schedules=schedules,
        times=(StageTimes(forward=1, backward=2), StageTimes(forward=0.1, backward=0.2)),
        links=(),
    )
    for tenth in range(0, 420, 5):
        stopped = replace(case, stop=StopRequest(at=tenth / 10 + 0.01)).simulate()
        assert violation(case, stopped) == ("", None), tenth / 10


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_the_pipe_drains_after_each_batch_without_delay(m: int, k: int) -> None:
    """Four stages, k of six batches, also of one microbatch: only batches from k + 1 on begin before the last update,
    and the first k take no longer than under 1f1b."""
    times, links = [StageTimes(forward=1, backward=2, update=1)] * 4, [LinkTimes(latency=0.5)] * 3
    ended: dict[str, list[float]] = {}
    overlapping: dict[str, list[int]] = {}
    cases: tuple[tuple[ScheduleName, int], ...] = (("1f1b", 0), ("2bw", k))
    for name, sync_batches in cases:
        schedules = stage_schedules(name, m, 4, num_batches=6, sync_batches=sync_batches)
        done = [each for each in EventfulPipeline(schedules, times, links=links).run().timeline if each.stage == 0]
        ended[name] = [each.ended for each in done if isinstance(each.op, Update)]
        begun = [next(each.started for each in done if each.op == Forward(b, 0)) for b in range(6)]
        overlapping[name] = [b for b in range(1, 6) if begun[b] < ended[name][b - 1]]
    assert overlapping == {"1f1b": [], "2bw": list(range(k + 1, 6))}
    assert all(late <= plain for late, plain in zip(ended["2bw"], ended["1f1b"], strict=True))


def test_the_checker_marks_the_cell_that_breaks_a_promise() -> None:
    """An update moved before its batch's last backward is found, and marked in the grid."""
    case = Case(
        schedule="1f1b",
        schedules=stage_schedules("1f1b", 2, 1, num_batches=1),
        times=(StageTimes(forward=1, backward=2, update=1),),
        links=(),
    )
    simulation = case.simulate()
    *rest, backward, update = simulation.timeline
    broken, cell = violation(case, replace(simulation, timeline=(*rest, update, backward)))
    assert (broken, cell) == ("update before the last backward", update)
    assert ">U0<" in format_grid(simulation.timeline, bad=cell)


def test_jitter_does_not_reorder_a_link() -> None:
    """Two tiny batches with clip over a jittery link, where the second's squares would have overtaken the first's."""
    train = TrainSpec(schedule="2bw", batches=2, microbatches=1, clip_norm=1.0)
    schedules = [StageSchedule.of(train, stage_index=s, num_stages=2, depth=2 - s) for s in (0, 1)]
    links = (LinkTimes(latency=1.0),)
    for seed in range(20):
        times = [StageTimes(forward=0.0, backward=0.0)] * 2
        simulation = EventfulPipeline(schedules, times, links=links, jitter=0.3, seed=seed).run()
        assert not simulation.is_stuck
        assert simulation.boundaries == (2, 2)
