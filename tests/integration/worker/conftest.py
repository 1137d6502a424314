"""Real worker processes, and a daemon that is played by the test: it gives orders and collects reports."""

import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.daemon.jobs.job import DataSpec, FaultSpec, JobSection, JobSpec
from headway.daemon.records.format import encode
from headway.daemon.rpc.certificates import CertificateAuthority
from headway.daemon.workers.service import WorkerStream, serve_workers
from headway.optim.spec import OptimSpec
from headway.proto import control_pb2
from headway.proto.control_pb2 import Order, Report
from headway.stages.data.shard_writer import writing_shards
from headway.stages.data.tokens import TokenShards
from headway.stages.links.loop_thread import LoopThread
from headway.stages.schedule.depth import depths_with_slack, schedule_depth
from headway.stages.spec import ModelSpec, TrainSpec

DEADLINE_S = 60.0
MODEL = ModelSpec(
    num_hidden_layers=3,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)
TRAIN = TrainSpec(batches=10, microbatches=4, microbatch_size=2, sequence_length=16)


@dataclass
class Worker:
    """A worker process that has attached, as its daemon sees it."""

    process: "subprocess.Popen[bytes]"
    stream: WorkerStream
    reports: "queue.SimpleQueue[Report]"
    loop: LoopThread
    error_file: Path
    entries: list[control_pb2.JournalEntry] = field(default_factory=list)
    heartbeats: list[control_pb2.Heartbeat] = field(default_factory=list)
    snapshots: list[control_pb2.Wrote] = field(default_factory=list)
    """Periodic ones that were passed over while something else was expected."""

    @property
    def address(self) -> str:
        """Where neighbouring stages dial."""
        return f"127.0.0.1:{self.stream.hello.link_port}"

    def order(self, **order: Any) -> None:
        """Send one order, such as `release=Release(…)`."""
        self.loop.call_soon(self.stream.send, Order(**order))

    def expect(self, kind: str, *, timeout_s: float = DEADLINE_S) -> Any:
        """The next report that is neither a heartbeat, progress nor a snapshot must be of this kind.

        `snapshot` is the next periodic snapshot that was written.
        """
        until = time.monotonic() + timeout_s
        while True:
            try:
                report = self.reports.get(timeout=min(0.5, max(0.001, until - time.monotonic())))
            except queue.Empty:
                assert self.process.poll() is None, f"the worker exited with {self.process.returncode}"
                assert time.monotonic() < until, f"no {kind} within {timeout_s} s"
                continue
            found = report.WhichOneof("report")
            if found == "heartbeat":
                self.heartbeats.append(report.heartbeat)
            elif found == "progress":
                self.entries += report.progress.entries
                if kind == "progress":
                    return report.progress
            elif found == "wrote" and report.wrote.is_snapshot:
                if kind == "snapshot":
                    return report.wrote
                self.snapshots.append(report.wrote)
            else:
                assert found == kind, f"{found} instead of {kind}: {report}"
                return getattr(report, kind)


def replicas_of(cuts: Sequence[Sequence[str]]) -> list[list[int]]:
    """The positions of each stage's workers: those with the same layers, side by side."""
    return [[k for k, _ in same] for _, same in groupby(enumerate(cuts), key=lambda item: tuple(item[1]))]


class FakeDaemon:
    """Serves the socket that workers attach to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        self.socket_path = directory / "run" / "workers.sock"
        self.certificates = CertificateAuthority.create(directory / "authority").issue("node")
        self.loop = LoopThread("fake-daemon")
        self.loop.start()
        self._attached: queue.SimpleQueue[WorkerStream] = queue.SimpleQueue()
        self._reports: dict[str, queue.SimpleQueue[Report]] = {}
        self._server = self.loop.run(
            serve_workers(self.socket_path, self), timeout=timedelta(seconds=10), what="serving workers"
        )
        self.processes: list[subprocess.Popen[bytes]] = []

    # What service.py asks of its Attachments.

    def attach(self, stream: WorkerStream) -> str:
        """Everybody is welcome."""
        self._reports[stream.hello.incarnation] = queue.SimpleQueue()
        self._attached.put(stream)
        return ""

    def report(self, stream: WorkerStream, report: Report) -> None:
        """Keep it for `expect`."""
        self._reports[stream.hello.incarnation].put(report)

    def detach(self, stream: WorkerStream) -> None:
        """Nothing follows from it here."""

    def command(self, device_index: int | None) -> list[str]:
        """The worker's command line, as the supervisor makes it; None: a spare's."""
        command = [sys.executable, "-m", "headway.daemon.worker", "--socket", str(self.socket_path)]
        command += ["--host", "127.0.0.1", "--certificates", str(self.certificates), "--device", "cpu"]
        command += ["--spare"] if device_index is None else ["--device-index", str(device_index)]
        return [*command, "--node", "node-1", "--history-dir", str(self.directory / "history")]

    def spawn(self, count: int, *, is_spare: bool = False, variables: Mapping[str, str] | None = None) -> list[Worker]:
        """This many workers, started together, with these environment variables too."""
        started = {}
        for index in range(count):
            error_file = self.directory / f"error-{index}.json"
            environment = {
                **os.environ,
                "PYTHONSAFEPATH": "1",
                "TORCHELASTIC_ERROR_FILE": str(error_file),
                **(variables or {}),
            }
            with (self.directory / f"output-{index}.log").open("ab") as output:
                command = self.command(None if is_spare else index)
                process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            started[process.pid] = (process, error_file)
            self.processes.append(process)
        workers = []
        for _ in range(count):
            stream = self.next_attached()
            process, error_file = started[stream.hello.pid]
            reports = self._reports[stream.hello.incarnation]
            workers.append(Worker(process, stream, reports, self.loop, error_file))
        return sorted(workers, key=lambda worker: worker.stream.hello.device_index)

    def next_attached(self) -> WorkerStream:
        """The next worker that says hello."""
        return self._attached.get(timeout=DEADLINE_S)

    def stop_serving(self) -> None:
        """Cut every stream, at once."""
        self.loop.run(self._server.stop(None), timeout=timedelta(seconds=10), what="stopping the server")

    def close(self) -> None:
        """Leave no process behind."""
        for process in self.processes:
            process.kill()
            process.wait(DEADLINE_S)
        self.stop_serving()
        self.loop.stop()


@dataclass(frozen=True)
class Case:
    """A job, its data, and the orders about it."""

    spec: JobSpec
    data: Path
    directory: Path

    @property
    def name(self) -> str:
        """Of the job."""
        return self.spec.job.name

    def assignment(self, index: int, cuts: Sequence[Sequence[str]]) -> control_pb2.StageAssignment:
        """Worker `index` of a plan that assigns these layers to its workers; equal ones side by side are replicas."""
        stages = replicas_of(cuts)
        stage = next(s for s, workers in enumerate(stages) if index in workers)
        train, p = self.spec.train, len(stages)
        needed = [schedule_depth(train.schedule, train.microbatches, p, s) for s in range(p)]
        return control_pb2.StageAssignment(
            index=stage,
            num_stages=len(stages),
            layers=cuts[index],
            depth=depths_with_slack(train.schedule, needed, train.microbatches)[stage],
            groups=self.groups(index, cuts),
            worker=index,
        )

    def groups(self, index: int, cuts: Sequence[Sequence[str]]) -> Sequence[int]:
        """The reduction groups of a worker that shares its stage; none: all."""
        workers = next(workers for workers in replicas_of(cuts) if index in workers)
        if len(workers) == 1:
            return ()
        num_groups, place, count = self.spec.train.reduction_groups, workers.index(index), len(workers)
        return range(num_groups * place // count, num_groups * (place + 1) // count)

    def prepare(
        self, generation: int, index: int, cuts: Sequence[Sequence[str]], **changes: Any
    ) -> control_pb2.Prepare:
        """The order that comes before Start."""
        fields: dict[str, Any] = {
            "job": encode(self.spec),
            "job_name": self.name,
            "generation": generation,
            "stage": self.assignment(index, cuts),
            "data_paths": [str(self.data)] if cuts[index] == cuts[0] else [],
            "log_path": str(self.directory / f"{self.name}.log"),
        }
        return control_pb2.Prepare(**{**fields, **changes})

    def start(
        self,
        generation: int,
        index: int,
        cuts: Sequence[Sequence[str]],
        workers: Sequence[Worker],
        *,
        boundary: int = 0,
        paths: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> control_pb2.Start:
        """Layers come from the paths given, else from live buffers, at boundary 0 from the seed."""
        fields: dict[str, Any] = {
            "job_name": self.name,
            "generation": generation,
            "timeline": 1,
            "boundary": boundary,
            "stage": self.assignment(index, cuts),
        }
        start = control_pb2.Start(**{**fields, **changes})
        stages = replicas_of(cuts)
        own = next(s for s, of_stage in enumerate(stages) if index in of_stage)
        for layer in [*cuts[index], *(["journal"] if index == stages[-1][0] else [])]:
            if paths is not None and layer in paths:
                start.sources.add(layer=layer, path=paths[layer])
            elif boundary == 0:
                start.sources.add(layer=layer, initial=True)
            else:
                start.sources.add(layer=layer, live=True)
        held = set(self.groups(index, cuts))
        for stage, peers in ((own - 1, start.upstream), (own, start.siblings), (own + 1, start.downstream)):
            for position in stages[stage] if 0 <= stage < len(stages) else []:
                groups = self.groups(position, cuts)
                is_neighbour = stage == own or not held or not groups or bool(held & set(groups))
                if position != index and is_neighbour:
                    incarnation = workers[position].stream.hello.incarnation
                    peers.add(
                        stage=stage,
                        address=workers[position].address,
                        incarnation=incarnation,
                        worker=position,
                        groups=groups,
                        node="node",
                    )
        return start

    def begin(self, generation: int, cuts: Sequence[Sequence[str]], workers: Sequence[Worker], **start: Any) -> None:
        """Prepare and start every stage, and wait until all have started."""
        for index in range(len(cuts)):
            workers[index].order(prepare=self.prepare(generation, index, cuts))
        for index in range(len(cuts)):
            workers[index].expect("prepared")
        for index in range(len(cuts)):
            workers[index].order(start=self.start(generation, index, cuts, workers, **start))
        for index in range(len(cuts)):
            workers[index].expect("started")

    def write(self, worker: Worker, generation: int, boundary: int, layers: Sequence[str]) -> control_pb2.Wrote:
        """Have layers written, and wait for it."""
        worker.order(
            write=control_pb2.Write(
                job_name=self.name,
                generation=generation,
                timeline=1,
                boundary=boundary,
                layers=layers,
                directory=str(self.directory / f"{self.name}-{generation}-{boundary}"),
            )
        )
        wrote: control_pb2.Wrote = worker.expect("wrote")
        return wrote

    def release(self, *workers: Worker) -> None:
        """Have the job forgotten."""
        for worker in workers:
            worker.order(release=control_pb2.Release(job_name=self.name))
        for worker in workers:
            assert worker.expect("released").job == self.name


@pytest.fixture(scope="package")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards with tokens below 64."""
    folder = tmp_path_factory.mktemp("tokens") / "data"
    with writing_shards(folder, vocab_size=MODEL.vocab_size) as writer:
        writer.append(np.random.default_rng(0).integers(0, 32, 4000) * np.tile([1, 2], 2000))
    return folder


class CaseMaker:
    """Makes jobs that differ in what a test is about."""

    def __init__(self, data: Path, directory: Path) -> None:
        self._data = data
        self._directory = directory

    def __call__(
        self,
        name: str,
        *,
        model: ModelSpec = MODEL,
        optim: OptimSpec | None = None,
        fault: FaultSpec | None = None,
        **train: Any,
    ) -> Case:
        fields = {name: getattr(TRAIN, name) for name in TrainSpec.__slots__}
        spec = JobSpec(
            job=JobSection(name=name, seed=5),
            model=model,
            data=DataSpec(source=str(self._data), sha256=TokenShards.open(self._data).index.sha256),
            train=TrainSpec(**{**fields, **train}),
            optim=optim or OptimSpec(warmup_batches=2),
            fault=fault or FaultSpec(),
        )
        return Case(spec, self._data, self._directory)


@pytest.fixture
def make_case(data: Path, tmp_path: Path) -> CaseMaker:
    """A job on the test's data, in the test's folder."""
    return CaseMaker(data, tmp_path)


@pytest.fixture(scope="package")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    """Serves the workers that tests share."""
    daemon = FakeDaemon(tmp_path_factory.mktemp("daemon") / "shared")
    yield daemon
    daemon.close()


@pytest.fixture(scope="package")
def shared_workers(daemon: FakeDaemon) -> list[Worker]:
    """Two workers for all tests that leave them as they were: released."""
    return daemon.spawn(2)


@pytest.fixture(scope="package")
def more_workers(daemon: FakeDaemon) -> list[Worker]:
    """Three more, for tests with replicas."""
    return daemon.spawn(3)


@pytest.fixture
def workers(shared_workers: list[Worker]) -> list[Worker]:
    """The shared workers, with nothing left of the test before."""
    return _renewed(shared_workers)


@pytest.fixture
def five_workers(workers: list[Worker], more_workers: list[Worker]) -> list[Worker]:
    """The same, and three more."""
    return [*workers, *_renewed(more_workers)]


def _renewed(workers: list[Worker]) -> list[Worker]:
    for worker in workers:
        assert worker.process.poll() is None, "a test before this one has ended a shared worker"
        worker.entries.clear()
        worker.heartbeats.clear()
        worker.snapshots.clear()
    return workers


@pytest.fixture
def mortal_daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    """One of the test's own, for workers that are meant to die."""
    daemon = FakeDaemon(tmp_path / "daemon")
    yield daemon
    daemon.close()


def wait_for_death(pid: int, *, timeout_s: float) -> float:
    """Seconds until a process that need not be a child has ended."""
    began = time.monotonic()
    descriptor = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
    finally:
        os.close(descriptor)
    assert ready, f"process {pid} is still there after {timeout_s} s"
    return time.monotonic() - began
