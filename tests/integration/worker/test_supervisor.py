"""Real worker processes under a supervisor: how each death is noticed, and who takes over."""

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headway.daemon.base.fault_points import ENVIRONMENT
from headway.daemon.cluster.records import (
    Device,
    Failure,
    PlanRecord,
    WorkerPart,
)
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.worker import liveness, roster
from headway.daemon.worker import socket as workers_socket
from headway.daemon.worker.goal import (
    Goal,
    JobGeneration,
    Preparation,
    Progress,
    SnapshotMissed,
    Source,
    SourceKind,
    Start,
    WorkerStatus,
    Wrote,
)
from headway.daemon.worker.process import SPARE_INDEX, WorkerOptions, WorkerProcess
from headway.daemon.worker.roster import WorkerSettings
from headway.daemon.worker.supervisor import Supervisor
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.schedule.stage_schedule import schedule_depth
from headway.stages.spec import ModelSpec, TrainSpec

DEADLINE_S = 60.0
LAYERS = ("embed", "block.0", "head")
SPEC = JobSpec(
    job=JobSection(name="tiny", seed=3),
    model=ModelSpec(
        num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2
    ),
    train=TrainSpec(batches=100_000, microbatches=4, microbatch_size=2, sequence_length=16, attention_backend="flash"),
)


class Ears:
    """A listener that remembers what it is told."""

    def __init__(self) -> None:
        self.num_changes = 0
        self.damaged: list[str] = []

    def worker_changed(self) -> None:
        """Counted."""
        self.num_changes += 1

    async def worker_wrote(self, wrote: Wrote) -> str:  # noqa: ARG002
        """Everything can be kept."""
        return ""

    def worker_progressed(self, progress: Progress) -> None:
        """Nobody asks."""

    def worker_refused_file(self, path: str) -> None:
        """Remembered."""
        self.damaged.append(path)

    def worker_missed_snapshot(self, missed: SnapshotMissed) -> None:
        """Nobody asks."""


class SupervisorHarness:
    """A supervisor with one device, and the goals that a job needs."""

    def __init__(self, folder: Path, *, num_spares: int, ports: str = "") -> None:
        self.folder = folder
        self.ears = Ears()
        with writing_shards(folder / "data", DataForm(vocab_size=256)) as writer:
            writer.append(np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8))
        settings = WorkerSettings(
            options=WorkerOptions(
                socket_path=str(folder / "run" / "workers.sock"),
                node="a",
                host="127.0.0.1",
                ports=ports,
                certificates=str(CertificateAuthority.create(folder / "authority").issue("a")),
                renewals=str(folder / "renewals"),
            ),
            output_dir=folder / "output",
            logs_dir=folder / "logs",
            num_spares=num_spares,
        )
        self.downs: list[tuple[int, ...]] = []
        self.supervisor = Supervisor(
            (Device(kind="cpu"),),
            settings,
            self.ears,
            on_change=lambda: self.downs.append(self.supervisor.down_devices),
        )

    @property
    def status(self) -> WorkerStatus:
        """Return the status of the one worker."""
        return self.supervisor.statuses[0]

    async def until(self, claim: Callable[[], Any], what: str) -> None:
        """Return when the claim holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not claim():
            assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}; {self.status}"
            await asyncio.sleep(0.02)

    async def run_generation(self, generation: int) -> JobGeneration:
        """Prepare and start a job of one stage; returns when it computes."""
        await self.until(lambda: self.status.is_up, "a worker")
        of, train = JobGeneration("tiny", generation), SPEC.train
        depth = schedule_depth(train.schedule, train.microbatches, 1, 0)
        part = WorkerPart(node="a", node_incarnation="a-1", device_index=0, layers=LAYERS, depth=depth)
        plan = PlanRecord(generation=generation, timeline=generation, workers=(part,))
        data = (str(self.folder / "data"),)
        prepare = Preparation(plan=plan, position=0, data_paths=data, data_states=("",))
        log_path = str(self.supervisor.log_path("tiny"))
        goal = Goal(job="tiny", spec=SPEC, log_path=log_path, prepare=prepare)
        self.supervisor.set_goal(0, goal)
        await self.until(lambda: self.status.is_prepared(of) or of in self.status.failures, "prepared")
        sources = tuple(Source(layer, SourceKind.INITIAL) for layer in (*LAYERS, "journal"))
        start = Start(plan=plan, position=0, sources=sources, takes_snapshots=False)
        self.supervisor.set_goal(0, msgspec.structs.replace(goal, start=start))
        await self.until(lambda: self.status.has_started(of) or of in self.status.failures, "started")
        assert of not in self.status.failures, self.status.failures
        await self.until(lambda: self.supervisor.heartbeats[0].operations > 0, "operations")
        return of

    async def failure(self, of: JobGeneration) -> Failure:
        """Return why a generation failed, once it has."""
        await self.until(lambda: of in self.status.failures, "a failure")
        return self.status.failures[of]

    async def spare(self) -> int:
        """The spare's pid, once it has attached."""

        def attached() -> list[int]:
            return [
                handle.status.pid
                for handle in self.supervisor._roster.everybody
                if handle.index == SPARE_INDEX and handle.status.is_up
            ]

        await self.until(attached, "a spare")
        return attached()[0]


@asynccontextmanager
async def supervisor_harness(folder: Path, *, num_spares: int = 1, ports: str = "") -> AsyncIterator[SupervisorHarness]:
    """A started supervisor, which is stopped at the end."""
    made = SupervisorHarness(folder, num_spares=num_spares, ports=ports)
    await made.supervisor.start()
    try:
        yield made
    finally:
        await made.supervisor.stop()


@pytest.mark.slow
async def test_a_spare_takes_over_at_once_from_each_that_dies(tmp_path: Path) -> None:
    """A worker is killed, its spare is there in no time; that one is stopped, then its spare's main thread hangs."""
    faults = tmp_path / "faults.jsonl"
    os.environ[ENVIRONMENT] = str(faults)
    try:
        async with supervisor_harness(tmp_path) as harness:
            first = await harness.run_generation(1)
            spare = await harness.spare()
            assert os.getpriority(os.PRIO_PROCESS, spare) == os.getpriority(os.PRIO_PROCESS, os.getpid())

            killed_at = time.monotonic()
            os.kill(harness.status.pid, signal.SIGKILL)
            failure = await harness.failure(first)
            await harness.until(lambda: harness.status.is_up, "the spare as worker")
            assert time.monotonic() - killed_at < 1.0
            assert (harness.status.pid, harness.status.has_died, harness.supervisor.down_devices) == (spare, False, ())
            assert "ended by signal SIGKILL" in failure.text
            assert (failure.batch >= 0, failure.fault, failure.is_hopeless) == (True, "", False)
            assert (0,) not in harness.downs

            second = await harness.run_generation(2)
            spare = await harness.spare()
            stopped_at = time.monotonic()
            os.kill(harness.status.pid, signal.SIGSTOP)
            failure = await harness.failure(second)
            assert 4.0 < time.monotonic() - stopped_at < 8.0
            assert "said nothing for 5 s; it was killed" in failure.text
            await harness.until(lambda: harness.status.pid == spare, "the spare as worker")

            third = await harness.run_generation(3)
            faults.write_text(
                json.dumps({"id": "h", "at": "operation", "when": {"generation": 3}, "do": "hang"}) + "\n"
            )
            await harness.until((tmp_path / "faults.jsonl.struck").exists, "the fault")
            hung_at = time.monotonic()
            failure = await harness.failure(third)
            assert 4.0 < time.monotonic() - hung_at < 9.0
            assert "stood still for 5 s in batch" in failure.text
    finally:
        del os.environ[ENVIRONMENT]


@pytest.mark.slow
async def test_a_worker_without_a_free_port_says_so_until_there_is_one(tmp_path: Path) -> None:
    """Somebody listens at the only port that it may have: the device is down, the reason names the port; then it is."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with supervisor_harness(tmp_path, num_spares=0, ports=str(port)) as harness:
            await harness.until(lambda: harness.supervisor.trouble, "a reason")
            told = f"worker cpu:0 does not start: PortsTakenError: port {port} at 127.0.0.1 is in use"
            assert harness.supervisor.trouble.startswith(told)
            assert harness.supervisor.down_devices == (0,)
            taken.close()
            await harness.until(lambda: harness.status.is_up, "a worker")
            assert (harness.supervisor.trouble, harness.status.address) == ("", f"127.0.0.1:{port}")


@pytest.mark.slow
async def test_workers_move_to_another_address_of_the_machine(tmp_path: Path) -> None:
    """The one that is up ends with a word about why, and the next one listens at the new address."""
    async with supervisor_harness(tmp_path, num_spares=0) as harness:
        await harness.until(lambda: harness.status.is_up, "a worker")
        before = harness.status.pid
        harness.supervisor.move("127.0.0.2")
        await harness.until(lambda: harness.status.is_up and harness.status.pid != before, "the next worker")
        assert harness.status.address.startswith("127.0.0.2:")


async def test_without_a_spare_the_device_is_down_until_the_next_worker_is_there(tmp_path: Path) -> None:
    """The node's record has to say so meanwhile; an error of the worker's own has a fault line."""
    async with supervisor_harness(tmp_path, num_spares=0) as harness:
        await harness.until(lambda: harness.status.is_up, "a worker")
        assert harness.supervisor.down_devices == ()
        before = harness.status.pid
        os.kill(before, signal.SIGKILL)
        await harness.until(lambda: harness.supervisor.down_devices == (0,), "a device that is down")
        await harness.until(lambda: harness.supervisor.down_devices == (), "a device that is up")
        assert harness.status.pid != before
        assert harness.downs[-2:] == [(0,), ()]


async def test_a_killed_worker_that_does_not_end_counts_as_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel call never returns: its job is told, its device is down, and no other process takes that meanwhile."""
    monkeypatch.setattr(roster, "ENDING_S", 0.2)
    async with supervisor_harness(tmp_path, num_spares=0) as harness:
        await harness.until(lambda: harness.status.is_up, "a worker")
        before, generation = harness.status.pid, JobGeneration("tiny", 1)
        os.kill(before, signal.SIGSTOP)
        monkeypatch.setattr(WorkerProcess, "kill", lambda _: None)
        monkeypatch.setattr(liveness, "time_for", lambda *_: 0.1)
        part = WorkerPart(node="a", node_incarnation="a-1", device_index=0, layers=LAYERS, depth=1)
        plan = PlanRecord(generation=1, timeline=1, workers=(part,))
        goal = Goal(job="tiny", spec=SPEC, prepare=Preparation(plan=plan, position=0))
        assert harness.supervisor.set_goal(0, goal)
        failure = await harness.failure(generation)
        told = f"process {before} was killed and does not end"
        assert f"did not prepare within 0.1 s; it was killed\n{told}" in failure.text
        assert (harness.supervisor.down_devices, harness.status.is_up) == ((0,), False)
        assert harness.supervisor.trouble.startswith(f"worker cpu:0 does not start: {told}")
        assert not harness.supervisor.set_goal(0, goal)
        monkeypatch.undo()
        os.kill(before, signal.SIGKILL)
        await harness.until(lambda: not harness.supervisor.trouble, "the end of the process")
        assert harness.supervisor.down_devices == (0,)


async def test_a_deleted_folder_of_sockets_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner of /tmp took it: the worker, which others could reach no more, makes room for one that they can. In a
    folder that somebody else made there meanwhile nobody serves, and the worker goes on.
    """
    monkeypatch.setattr(workers_socket, "SOCKET_CHECK_S", 0.1)
    async with supervisor_harness(tmp_path, num_spares=0) as harness:
        await harness.until(lambda: harness.status.is_up, "a worker")
        before, folder = harness.status.pid, tmp_path / "run"
        shutil.rmtree(folder)
        (tmp_path / "theirs").mkdir(mode=0o755)
        folder.symlink_to(tmp_path / "theirs")
        await asyncio.sleep(0.5)
        assert (list(folder.iterdir()), harness.status.pid) == ([], before)
        assert stat.S_IMODE((tmp_path / "theirs").stat().st_mode) == 0o755
        folder.unlink()
        await harness.until(lambda: harness.status.is_up and harness.status.pid != before, "the next worker")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert harness.supervisor.socket_path.is_socket()
