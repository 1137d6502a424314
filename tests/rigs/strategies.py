"""Pipelines of every kind and size, for tests that try many of them."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from headway.stages.early_stop import stop_lag
from headway.stages.schedule.operations import Backward, Forward, Op, Update
from headway.stages.schedule.simulator import LinkTimes, Simulation, StageTimes, TimedOp, stages_of
from headway.stages.schedule.stage_schedule import StageSchedule, depths_with_slack, replica_depth, schedule_depth
from headway.stages.spec import ScheduleName
from tests.rigs.eventful_pipeline import EventfulPipeline, SnapshotTimes, StopRequest


@dataclass(frozen=True)
class Case:
    """One pipeline and what happens to it. Schedules and times: of each worker."""

    schedule: ScheduleName
    schedules: tuple[StageSchedule, ...]
    times: tuple[StageTimes, ...]
    links: tuple[LinkTimes, ...]
    sibling_links: tuple[LinkTimes, ...] = ()
    jitter: float = 0.0
    seed: int = 0
    stop: StopRequest | None = None
    snapshots: SnapshotTimes | None = None
    decided_at: int | None = None
    """Batch whose evaluation ends the job, if the schedules judge evaluations; None: none does."""

    @property
    def end(self) -> int:
        """The job's last boundary."""
        schedule = self.schedules[0]
        if self.decided_at is None:
            return schedule.num_batches
        return min(self.decided_at + stop_lag(schedule.delay), schedule.num_batches)

    def simulate(self) -> Simulation:
        return EventfulPipeline(
            self.schedules,
            self.times,
            links=self.links,
            sibling_links=self.sibling_links,
            jitter=self.jitter,
            seed=self.seed,
            stop=self.stop,
            snapshots=self.snapshots,
            end_after=self._end_after,
        ).run()

    def _end_after(self, batch: int) -> int:
        is_decided = self.decided_at is not None and batch >= self.decided_at
        return self.end if is_decided else self.schedules[0].num_batches


def stage_schedules(
    schedule: ScheduleName,
    num_microbatches: int,
    num_stages: int,
    *,
    num_batches: int,
    round_trips: tuple[float, ...] = (),
    has_clip: bool = False,
    num_groups: int = 1,
    first_batch: int = 0,
    num_held_out: int = 0,
    sync_batches: int = 0,
) -> tuple[StageSchedule, ...]:
    """The schedule of every stage, with slack; round_trips: of each link, in microbatch times."""
    needed = [
        schedule_depth(schedule, num_microbatches, num_stages, s, sum(round_trips[s:])) for s in range(num_stages)
    ]
    depths = depths_with_slack(schedule, needed, num_microbatches)
    return tuple(
        StageSchedule(
            delay=1 if schedule == "2bw" else 0,
            sync_batches=sync_batches,
            depth=depths[s],
            warmup=num_microbatches if schedule == "gpipe" and s == num_stages - 1 else 1,
            num_microbatches=num_microbatches,
            num_groups=num_groups,
            is_first=s == 0,
            is_last=s == num_stages - 1,
            first_batch=first_batch,
            num_batches=num_batches,
            has_clip=has_clip,
            num_held_out=num_held_out,
        )
        for s in range(num_stages)
    )


def shared(schedule: StageSchedule, parts: list[tuple[int, ...]], *, is_gpipe: bool) -> list[StageSchedule]:
    """A stage's schedule as those of its replicas, which hold these groups."""
    if len(parts) == 1:
        return [schedule]
    replicas = [replace(schedule, groups=groups) for groups in parts]
    m, depth = schedule.num_microbatches, schedule.depth
    return [
        replica
        if is_gpipe
        else replace(replica, depth=replica_depth(depth, num_held=len(replica.held_microbatches), num_microbatches=m))
        for replica in replicas
    ]


@st.composite
def shares(draw: st.DrawFn, num_groups: int) -> list[tuple[int, ...]]:
    """The groups of each of a stage's replicas, however many and whichever; sorted by the first."""
    holders = [draw(st.integers(0, 2)) for _ in range(num_groups)]
    return sorted(tuple(k for k in range(num_groups) if holders[k] == holder) for holder in set(holders))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to 6 stages of up to 3 workers, and 12 microbatches; any times, latencies, update times; with and without
    clip, stop, snapshot, held-out text; with delay after any number of batches without it.
    """
    p, m = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    seconds = st.floats(0.0, 8.0, allow_nan=False)
    latencies = tuple(draw(seconds) for _ in range(p - 1))
    names: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "2bw")
    schedule = draw(st.sampled_from(names))
    first_batch = draw(st.integers(0, 3))
    num_groups = draw(st.integers(1, min(m, 4)))
    of_stages = stage_schedules(
        schedule,
        m,
        p,
        num_batches=first_batch + draw(st.integers(0, 5)),
        round_trips=tuple(2 * latency / 3 for latency in latencies),
        has_clip=draw(st.booleans()),
        num_groups=num_groups,
        first_batch=first_batch,
        num_held_out=draw(st.integers(0, m)),
        sync_batches=draw(st.integers(0, 8)) if schedule == "2bw" else 0,
    )
    has_replicas, group_by_group = draw(st.booleans()), draw(st.booleans())
    if not has_replicas:
        of_stages = tuple(replace(stage, group_by_group=group_by_group) for stage in of_stages)
    schedules = tuple(
        worker
        for stage in of_stages
        for worker in shared(
            stage,
            draw(shares(num_groups)) if has_replicas else [tuple(range(num_groups))],
            is_gpipe=schedule == "gpipe",
        )
    )
    delays = st.tuples(*(st.floats(0.0, 50.0) for _ in schedules))
    stop = st.builds(StopRequest, at=st.floats(0.0, 200.0), delays=delays)
    return Case(
        schedule=schedule,
        schedules=schedules,
        times=tuple(
            StageTimes(forward=draw(seconds), backward=draw(seconds), update=draw(seconds), clip=draw(seconds))
            for _ in schedules
        ),
        links=tuple(
            LinkTimes(latency=latency, bandwidth=draw(st.floats(1.0, 100.0)), frame_bytes=draw(st.integers(0, 50)))
            for latency in latencies
        ),
        sibling_links=tuple(LinkTimes(latency=draw(seconds)) for _ in range(p)),
        jitter=draw(st.sampled_from((0.0, 0.3, 3.0))),
        seed=draw(st.integers(0, 2**32)),
        stop=draw(st.none() | stop),
        snapshots=draw(st.none() | st.builds(SnapshotTimes, every=st.integers(1, 3), seconds=st.floats(0.0, 200.0))),
    )


@st.composite
def judged_cases(draw: st.DrawFn) -> Case:
    """The same with evaluations that are judged, one of which may end the job; it may lie before the run."""
    case, every = draw(cases()), draw(st.integers(1, 4))
    first, delay = case.schedules[0].first_batch, case.schedules[0].delay
    num_batches = first + draw(st.integers(1, 14))
    case = replace(
        case,
        schedules=tuple(replace(each, num_batches=num_batches, judged_every=every) for each in case.schedules),
    )
    possible = [b for b in range(0, num_batches, every) if b + stop_lag(delay) >= first]
    return replace(case, decided_at=draw(st.none() | st.sampled_from(possible)) if possible else None)


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
    first, is_late = case.schedules[0].first_batch, case.schedule == "2bw"
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
            case Forward(batch, _) if batch == case.end:
                if not (done.version == newest[s] == case.end) or in_flight[s]:
                    return "an evaluation of other weights than the last", done
            case Forward(batch, microbatch):
                in_flight[s] += 1
                read_by[s, batch, microbatch] = done.version
                if done.version != batch - (is_late and batch > case.schedules[0].sync_batches):
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
        if simulation.stop == case.end:
            wanted.update((s, Forward(case.end, i)) for i in schedule.held_microbatches if i < schedule.num_held_out)
    for workers in stages:
        held = sorted(i for worker in workers for i in case.schedules[worker].held_microbatches)
        if held != list(range(case.schedules[0].num_microbatches)):
            return f"a stage computes microbatches {held}", None
    if counts != wanted:
        return f"not each operation exactly once: {list((counts - wanted) + (wanted - counts))[:4]}", None
    return "", None
