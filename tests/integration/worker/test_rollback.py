"""Worker processes that write snapshots, go back to them, die, and take another's place."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.base.fault_points import ENVIRONMENT
from headway.daemon.jobs.job import FaultSpec
from headway.daemon.worker.goal import Progress, Spacing, Wrote
from headway.daemon.worker.process import SPARE_INDEX
from headway.stages.state.state_file import content_checksum
from tests.integration.worker.conftest import Case, CaseMaker, FakeDaemon, Worker
from tests.rigs.worker import ONE_STAGE, TWO_STAGES

LONG = 100_000
"""Batches of a job that does not end by itself."""
EVERY_10 = FaultSpec(snapshot_every=10, checkpoint_every=0)


def files_of(wrote: Wrote) -> dict[str, str]:
    return {file.layer: file.path for file in wrote.files}


def history_of(daemon: FakeDaemon, job: str) -> list[dict[str, Any]]:
    paths = sorted((daemon.directory / "history").glob(f"{job}-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_a_worker_goes_back_in_its_own_process(
    daemon: FakeDaemon, workers: list[Worker], make_case: CaseMaker, tmp_path: Path
) -> None:
    """A run is sent back to boundary 10 while it computes: a damaged file is named, and the bits repeat."""
    case, worker = make_case("back", batches=LONG, fault=EVERY_10), workers[0]
    case.begin(1, ONE_STAGE, workers, state_dir=str(tmp_path / "timeline-1"), takes_snapshots=True)
    wrote = worker.snapshot()
    assert (wrote.generation, wrote.timeline, wrote.boundary) == (1, 1, 10)
    assert {file.layer: file.checksum for file in wrote.files} == {
        layer: content_checksum(Path(path)) for layer, path in files_of(wrote).items()
    }
    assert worker.snapshot().boundary == 20
    paths = files_of(wrote)
    damaged = Path(shutil.copy(paths["block.1"], tmp_path / "damaged"))
    with damaged.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")

    case.prepared(worker, 2, 0, ONE_STAGE)
    back: dict[str, Any] = {"boundary": 10, "timeline": 2, "furthest": 21}
    back |= {"state_dir": str(tmp_path / "timeline-2"), "takes_snapshots": True}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"paths": paths | {"block.1": str(damaged)}, "source_timeline": 1}, str(damaged)),
        ({"paths": paths, "source_timeline": 7}, paths["embed"]),
        ({"paths": paths | {"head": "/nowhere"}, "source_timeline": 1}, "/nowhere"),
    ]
    for number, (changes, path) in enumerate(wrong):
        worker.want(start=case.start(2, 0, ONE_STAGE, workers, **back, **changes, num_damaged=number))
        worker.until(lambda k=number: worker.actual.num_damaged == k + 1, "a refused file")  # type: ignore[misc]
        assert (worker.actual.damaged_path, worker.actual.failures) == (path, {})

    right = case.start(2, 0, ONE_STAGE, workers, **back, paths=paths, source_timeline=1, num_damaged=3)
    worker.want(start=right)
    worker.until(lambda: worker.actual.generation == 2, "started")
    worker.snapshots.clear()
    again = worker.snapshot()
    assert (again.generation, again.timeline, again.boundary) == (2, 2, 20)
    worker.until(lambda: worker.actual.heartbeat.num_replayed >= 11, "replay", timeout_s=20)
    beat = worker.actual.heartbeat
    assert beat.num_replayed == 11
    assert beat.seconds.keys() >= {"useful", "replay", "recovery"}
    assert 0 < beat.typical_s < 1
    first, second = ({d.batch: d for g, d in worker.done if g == number} for number in (1, 2))
    assert min(second) == 10
    both = first.keys() & second.keys()
    assert both >= set(range(10, 21))
    assert all(first[b].loss == second[b].loss for b in both)
    case.release(worker)

    lines = history_of(daemon, "back")
    events = [line["event"] for line in lines if "event" in line]
    assert events.count("aborted") == 2
    assert [line["boundary"] for line in lines if line.get("event") == "started"] == [0, 10]
    loaded = [line for line in lines if line.get("event") == "loaded" and line["source"] == "path"]
    assert {(line["timeline"], line["source_timeline"]) for line in loaded} == {(2, 1), (2, 7)}
    replayed = [(line["op"], line["batch"]) for line in lines if "op" in line and line["generation"] == 2]
    assert replayed[0] == ("forward", 10)


def test_snapshots_are_spaced_and_their_failure_is_no_fault(
    workers: list[Worker], make_case: CaseMaker, tmp_path: Path
) -> None:
    """Every second one by its goal; into an impossible folder: told each time, and the run reaches its end."""
    case, worker = make_case("spaced", batches=LONG, fault=EVERY_10), workers[0]
    case.begin(1, ONE_STAGE, workers, state_dir=str(tmp_path / "snapshots"), takes_snapshots=True)
    worker.snapshot()
    worker.want(spacing=Spacing(2, 10))
    boundaries = [worker.snapshot().boundary for _ in range(6)]
    assert worker.actual.spacing == Spacing(2, 10)
    assert boundaries[-1] - boundaries[-2] == boundaries[-2] - boundaries[-3] == 20
    assert boundaries[-1] % 20 == 0
    case.release(worker)

    case = make_case("nowhere", batches=25, fault=EVERY_10)
    (tmp_path / "file").write_text("")
    case.begin(1, ONE_STAGE, workers, state_dir=str(tmp_path / "file"), takes_snapshots=True)
    worker.standing(1, 25)
    assert [(missed.boundary, missed.factor) for missed in worker.missed] == [(10, 1), (20, 1)]
    assert all("Not a directory" in missed.reason for missed in worker.missed)
    case.release(worker)


def test_a_planned_change_writes_what_stayed(workers: list[Worker], make_case: CaseMaker, tmp_path: Path) -> None:
    """Stopped and started anew on live layers: these are written; another timeline is refused."""
    case, upper, lower = make_case("stayed", batches=LONG, fault=EVERY_10), workers[0], workers[1]
    case.begin(1, TWO_STAGES, workers)
    lower.progress()
    boundary = stopped(case, 1, workers)
    case.prepared(upper, 2, 0, TWO_STAGES)
    upper.want(start=case.start(2, 0, TWO_STAGES, workers, boundary=boundary, timeline=2))
    assert "embed is held on timeline 1, not on 2" in upper.failure(2).text
    case.begin(3, TWO_STAGES, workers, boundary=boundary, state_dir=str(tmp_path / "live"), takes_snapshots=True)
    for worker, layers in zip(workers, ({*TWO_STAGES[0]}, {*TWO_STAGES[1], "journal"}), strict=True):
        wrote = worker.snapshot()
        assert (wrote.boundary, {file.layer for file in wrote.files}) == (boundary, layers)
    stopped(case, 3, workers)
    case.release(*workers)


def stopped(case: Case, generation: int, workers: list[Worker]) -> int:
    """The boundary at which two stages have stopped."""
    upper, lower = workers
    upper.want(chooses_stop=True)
    boundary: int = upper.until(lambda: upper.actual.generation == generation and upper.actual.chosen, "a choice")
    lower.want(stop_at=boundary)
    for worker in workers:
        worker.standing(generation, boundary)
    return boundary


def cpu_seconds(worker: Worker) -> float:
    """That the process has used so far."""
    fields = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("place", ["operation", pytest.param("snapshot.file_written", marks=pytest.mark.slow)])
def test_a_killed_worker_loses_no_line_of_its_history_and_a_spare_goes_on(
    mortal_daemon: FakeDaemon, make_case: CaseMaker, tmp_path: Path, place: str
) -> None:
    """Killed in batch 14, or between two files of boundary 20 → a spare goes on from 10, and the bits are the same."""
    faults = tmp_path / "faults"
    when: dict[str, object] = {"boundary": 20, "layer": "block.1"}
    if place == "operation":
        when = {"stage": 0, "batch": 14, "op": "backward", "microbatch": 2}
    faults.write_text(json.dumps({"id": "a", "at": place, "when": when, "do": "kill"}))
    (victim,) = mortal_daemon.spawn(1, variables={ENVIRONMENT: str(faults)})
    (spare,) = mortal_daemon.spawn(1, is_spare=True)
    assert spare.stream.hello.device_index == SPARE_INDEX
    case = make_case("handed-on", batches=LONG, fault=EVERY_10)
    case.begin(1, ONE_STAGE, [victim], state_dir=str(tmp_path / "1"), takes_snapshots=True)
    wrote = victim.snapshot()
    assert victim.process.wait(30) == -signal.SIGKILL
    lines = [line for line in history_of(mortal_daemon, case.name) if "op" in line]
    assert all(line["node"] == "node-1" and line["pid"] == victim.process.pid for line in lines)
    if place == "operation":
        last = {key: lines[-1][key] for key in ("stage", "batch", "op", "microbatch")}
        assert last == when
    imported = cpu_seconds(spare)
    case.prepared(spare, 2, 0, ONE_STAGE)
    assert cpu_seconds(spare) - imported < 0.4, "a spare has imported everything before it attaches"
    back: dict[str, Any] = {"boundary": 10, "timeline": 2, "source_timeline": 1, "furthest": 14}
    spare.want(start=case.start(2, 0, ONE_STAGE, [spare], **back, paths=files_of(wrote)))
    spare.until(lambda: spare.done and spare.done[-1][1].batch >= 15, "batch 15")
    while not victim.messages.empty():
        message = victim.messages.get()
        if isinstance(message, Progress):
            victim.done.append((message.generation, message.batch))
    told = {done.batch: done.loss for _, done in victim.done}
    assert all(told.get(done.batch, done.loss) == done.loss for _, done in spare.done)
    assert any(done.batch in told for _, done in spare.done)
    spare.want(ends=True)
    assert spare.process.wait(30) == 0
