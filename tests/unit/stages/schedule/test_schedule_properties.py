"""What every schedule promises, whatever the times are."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from headway.stages.schedule.operations import Backward, Forward, Op, Update
from headway.stages.schedule.simulator import (
    LinkTimes,
    Simulation,
    StageTimes,
    StopRequest,
    TimedOp,
    simulate,
    stages_of,
)
from headway.stages.schedule.stage_schedule import StageSchedule
from headway.stages.spec import ScheduleName, TrainSpec, weight_version
from tests.unit.stages.schedule.strategies import Case, cases, stage_schedules


def format_grid(timeline: Sequence[TimedOp], *, bad: TimedOp | None = None) -> str:
    """The timeline as a grid for people: a row per worker, a column per start time; the bad cell is marked >so<."""
    columns = {time: column for column, time in enumerate(sorted({done.started for done in timeline}))}
    num_stages = 1 + max((done.stage for done in timeline), default=-1)
    cells = [[""] * len(columns) for _ in range(num_stages)]
    for done in timeline:
        text = f">{done.op}<" if done == bad else str(done.op)
        cell = cells[done.stage][columns[done.started]]
        cells[done.stage][columns[done.started]] = f"{cell},{text}" if cell else text
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(len(columns))]
    return "\n".join(
        f"stage {stage}: " + " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for stage, row in enumerate(cells)
    )


def violation(case: Case, simulation: Simulation) -> tuple[str, TimedOp | None]:
    """The first promise that a timeline breaks, and the cell; ("", None) when it keeps them all.

    Versions are recomputed here from the updates in the timeline, not asked of the schedule's own books.
    """
    if simulation.is_stuck:
        return f"stuck at {simulation.boundaries}, not {simulation.stop}", None
    delay, first = case.schedules[0].delay, case.schedules[0].first_batch
    newest = [first] * len(case.schedules)
    in_flight = [0] * len(case.schedules)
    read_until = [0.0] * len(case.schedules)
    read_by: dict[tuple[int, int, int], int] = {}
    counts: Counter[tuple[int, Op]] = Counter()
    left: defaultdict[tuple[int, int], int] = defaultdict(int)
    for s, schedule in enumerate(case.schedules):
        for batch in range(first, simulation.stop):
            left[s, batch] = len(schedule.held_microbatches)
    stages = stages_of(case.schedules)
    siblings = {worker: workers for workers in stages for worker in workers}
    for done in simulation.timeline:
        s, op = done.stage, done.op
        counts[s, op] += 1
        match op:
            case Forward(batch, microbatch):
                in_flight[s] += 1
                read_by[s, batch, microbatch] = done.version
                if done.version != weight_version(batch, delay):
                    return "forward on another version than v(b)", done
                if newest[s] - done.version not in (0, 1):
                    return "forward on a version that is not live", done
                if in_flight[s] > case.schedules[s].depth:
                    return "in flight above depth", done
            case Backward(batch, microbatch):
                in_flight[s] -= 1
                left[s, batch] -= 1
                if read_by.pop((s, batch, microbatch), None) != done.version:
                    return "backward on another version than its forward", done
                if newest[s] - done.version not in (0, 1):
                    return "backward on a version that was overwritten", done
            case Update(batch):
                if batch != newest[s]:
                    return "update out of order", done
                if any(left[sibling, batch] for sibling in siblings[s]):
                    return "update before the last backward", done
                if done.started < read_until[s]:
                    return "update of what a snapshot still reads", done
                if any(stage == s and version <= batch - 1 for (stage, _, _), version in read_by.items()):
                    return "update over a version that a graph reads", done
                newest[s] = batch + 1
                if case.snapshots is not None and newest[s] % case.snapshots.every == 0 and newest[s] < simulation.stop:
                    read_until[s] = done.ended + case.snapshots.seconds
    wanted: Counter[tuple[int, Op]] = Counter()
    for s, schedule in enumerate(case.schedules):
        for batch in range(first, simulation.stop):
            wanted[s, Update(batch)] = 1
            for i in schedule.held_microbatches:
                wanted[s, Forward(batch, i)] = wanted[s, Backward(batch, i)] = 1
    for workers in stages:
        held = sorted(i for worker in workers for i in case.schedules[worker].held_microbatches)
        if held != list(range(case.schedules[0].num_microbatches)):
            return f"a stage computes microbatches {held}", None
    if counts != wanted:
        return f"not each operation exactly once: {list((counts - wanted) + (wanted - counts))[:4]}", None
    return "", None


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_any_pipeline_keeps_every_promise(case: Case) -> None:
    """Random stages, times, latencies, clip and stop: no deadlock, one version per microbatch, each counted once."""
    simulation = case.simulate()
    broken, cell = violation(case, simulation)
    assert not broken, f"{broken}\n{format_grid(simulation.timeline, bad=cell)}"
    assert max(simulation.peak_versions) <= 1 + case.schedules[0].delay
    assert all(peak <= s.depth for peak, s in zip(simulation.peak_in_flight, case.schedules, strict=True))


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_slow_lead_stops_no_sibling_in_a_batch_that_it_has_begun(schedule: ScheduleName) -> None:
    """The sibling computes ten times as fast, and with delay it is a batch ahead of the lead: wherever the stop is
    asked for, both end at one boundary with nothing half done."""
    train = TrainSpec(schedule=schedule, batches=8, microbatches=4, reduction_groups=2)
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
        simulation = simulate(
            schedules, [StageTimes(forward=0.0, backward=0.0)] * 2, links=links, jitter=0.3, seed=seed
        )
        assert not simulation.is_stuck
        assert simulation.boundaries == (2, 2)
