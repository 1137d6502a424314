"""Real worker processes, and a daemon that is played by the test: it sets goals and collects what workers say."""

import os
import queue
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headway.daemon.cluster.records import (
    Failure,
    PlanRecord,
    WorkerPart,
)
from headway.daemon.jobs.job import DataSpec, FaultSpec, JobSection, JobSpec
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.worker.goal import (
    Actual,
    BatchDone,
    FromWorker,
    Goal,
    Neighbour,
    Neighbours,
    Preparation,
    Progress,
    SnapshotMissed,
    Source,
    SourceKind,
    Start,
    WrittenFile,
    Wrote,
)
from headway.daemon.worker.process import ERROR_FILE, SPARE_INDEX, WorkerOptions, command
from headway.daemon.worker.socket import WorkersSocket, WorkerStream
from headway.optim.spec import OptimSpec
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.tokens import TokenShards
from headway.stages.links.loop_thread import LoopThread
from headway.stages.schedule.stage_schedule import depths_with_slack, schedule_depth
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
    messages: "queue.SimpleQueue[FromWorker]"
    loop: LoopThread
    error_file: Path
    goal: Goal = field(default_factory=Goal)
    actual: Actual = field(default_factory=Actual)
    done: list[tuple[int, BatchDone]] = field(default_factory=list)
    """(generation, batch) of what it has told."""
    written: list[WrittenFile] = field(default_factory=list)
    """Files of goals."""
    snapshots: list[Wrote] = field(default_factory=list)
    missed: list[SnapshotMissed] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Where neighbouring stages dial."""
        return f"127.0.0.1:{self.stream.hello.link_port}"

    def want(self, **changes: Any) -> None:
        """Set its goal: the last one with these changes."""
        self.goal = msgspec.structs.replace(self.goal, **changes)
        self.loop.call_soon(self.stream.send, self.goal)

    def until(self, claim: Callable[[], Any], what: str, *, timeout_s: float = DEADLINE_S) -> Any:
        """Take what it says until a claim holds. Return the claim's value."""
        until = time.monotonic() + timeout_s
        while not (found := claim()):
            try:
                message = self.messages.get(timeout=min(0.5, max(0.001, until - time.monotonic())))
            except queue.Empty:
                assert self.process.poll() is None, f"the worker exited with {self.process.returncode}"
                assert time.monotonic() < until, f"not within {timeout_s} s: {what}; {self.actual}"
                continue
            match message:
                case Actual():
                    self.actual = message
                case Progress():
                    self.done.append((message.generation, message.batch))
                case Wrote():
                    if message.is_snapshot:
                        self.snapshots.append(message)
                    else:
                        self.written += message.files
                case SnapshotMissed():
                    self.missed.append(message)
        return found

    def standing(self, generation: int, boundary: int | None = None) -> int:
        """Return the boundary at which it stands in a generation, once it does."""
        stands = lambda: self.actual.generation == generation and self.actual.boundary is not None  # noqa: E731
        self.until(stands, f"the end of a run: {self.actual.failures}")
        assert self.actual.boundary is not None
        assert boundary in (None, self.actual.boundary)
        return self.actual.boundary

    def failure(self, generation: int) -> Failure:
        """Return why it could not do its part, once it says so."""
        found: Failure = self.until(lambda: self.actual.failures.get(generation), "a failure")
        return found

    def progress(self) -> None:
        """Wait until it has finished another batch."""
        before = len(self.done)
        self.until(lambda: len(self.done) > before, "a batch")

    def snapshot(self) -> Wrote:
        """Return its next periodic snapshot."""
        self.until(lambda: self.snapshots, "a snapshot")
        return self.snapshots.pop(0)


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
        self._messages: dict[str, queue.SimpleQueue[FromWorker]] = {}
        self._socket = WorkersSocket(self.socket_path, self)
        self.loop.run(self._socket.serve(), timeout=timedelta(seconds=10), what="serving workers")
        self.processes: list[subprocess.Popen[bytes]] = []

    # What the socket asks of its Attachments.

    def attach(self, stream: WorkerStream) -> str:
        """Everybody is welcome."""
        self._messages[stream.hello.incarnation] = queue.SimpleQueue()
        self._attached.put(stream)
        return ""

    def report(self, stream: WorkerStream, message: FromWorker) -> None:
        """Keep it for `until`."""
        self._messages[stream.hello.incarnation].put(message)

    def detach(self, stream: WorkerStream) -> None:
        """Nothing follows from it here."""

    def command(self, device_index: int | None) -> list[str]:
        """The worker's command line, as the supervisor makes it; None: a spare's."""
        options = WorkerOptions(
            socket_path=str(self.socket_path),
            node="node-1",
            host="127.0.0.1",
            certificates=str(self.certificates),
            renewals=str(self.directory / "renewals"),
            history_dir=str(self.directory / "history"),
            device_index=SPARE_INDEX if device_index is None else device_index,
        )
        return command(options)

    def spawn(self, count: int, *, is_spare: bool = False, variables: Mapping[str, str] | None = None) -> list[Worker]:
        """This many workers, started together, with these environment variables too."""
        started = {}
        for index in range(count):
            error_file = self.directory / f"error-{index}.json"
            environment = {
                **os.environ,
                "PYTHONSAFEPATH": "1",
                ERROR_FILE: str(error_file),
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
            messages = self._messages[stream.hello.incarnation]
            workers.append(Worker(process, stream, messages, self.loop, error_file))
        return sorted(workers, key=lambda worker: worker.stream.hello.device_index)

    def next_attached(self) -> WorkerStream:
        """The next worker that says hello."""
        return self._attached.get(timeout=DEADLINE_S)

    def stop_serving(self) -> None:
        """Cut every stream, at once."""
        self.loop.run(self._socket.stop(), timeout=timedelta(seconds=10), what="stopping the server")

    def close(self) -> None:
        """Leave no process behind."""
        for process in self.processes:
            process.kill()
            process.wait(DEADLINE_S)
        self.stop_serving()
        self.loop.stop()


@dataclass(frozen=True)
class Case:
    """A job, its data, and the goals about it."""

    spec: JobSpec
    data: Path
    directory: Path

    @property
    def name(self) -> str:
        """Of the job."""
        return self.spec.job.name

    def plan(self, generation: int, cuts: Sequence[Sequence[str]], **fields: Any) -> PlanRecord:
        """A plan that assigns these layers to its workers; equal ones side by side are replicas."""
        train, stages = self.spec.train, replicas_of(cuts)
        needed = [schedule_depth(train.schedule, train.microbatches, len(stages), s) for s in range(len(stages))]
        depths = depths_with_slack(train.schedule, needed, train.microbatches)
        parts = tuple(
            WorkerPart(
                node="node",
                node_incarnation="1",
                device_index=index,
                layers=tuple(layers),
                depth=depths[next(s for s, workers in enumerate(stages) if index in workers)],
                groups=tuple(self.groups(index, cuts)),
            )
            for index, layers in enumerate(cuts)
        )
        known: dict[str, Any] = {"timeline": 1, "source": "initial", "source_timeline": 1}
        if fields.get("boundary"):
            known["source"] = "nodes"
        return PlanRecord(generation=generation, workers=parts, **(known | fields))

    def groups(self, index: int, cuts: Sequence[Sequence[str]]) -> Sequence[int]:
        """The reduction groups of a worker that shares its stage; none: all."""
        workers = next(workers for workers in replicas_of(cuts) if index in workers)
        if len(workers) == 1:
            return ()
        num_groups, place, count = self.spec.train.reduction_groups, workers.index(index), len(workers)
        return range(num_groups * place // count, num_groups * (place + 1) // count)

    def prepared(
        self, worker: Worker, generation: int, index: int, cuts: Sequence[Sequence[str]], **changes: Any
    ) -> None:
        """Have a worker get ready, and wait for it."""
        self.prepare(worker, generation, index, cuts, **changes)
        worker.until(lambda: worker.actual.prepared == generation, f"ready: {worker.actual.failures}")

    def prepare(
        self, worker: Worker, generation: int, index: int, cuts: Sequence[Sequence[str]], **changes: Any
    ) -> None:
        """Have a worker get ready. changes: of the goal."""
        preparation = Preparation(
            plan=self.plan(generation, cuts),
            position=index,
            data_paths=(str(self.data),) if cuts[index] == cuts[0] else (),
            data_states=("",) if cuts[index] == cuts[0] else (),
        )
        log_path = str(self.directory / f"{self.name}.log")
        fields = {"job": self.name, "spec": self.spec, "log_path": log_path, "prepare": preparation}
        worker.want(**(fields | changes))

    def start(
        self,
        generation: int,
        index: int,
        cuts: Sequence[Sequence[str]],
        workers: Sequence[Worker],
        *,
        paths: Mapping[str, str] | None = None,
        state_dir: str = "",
        takes_snapshots: bool = False,
        num_damaged: int = 0,
        **plan: Any,
    ) -> Start:
        """Layers come from the paths given, else from live buffers, at boundary 0 from the seed."""
        found = self.plan(generation, cuts, **plan)
        stages, own = found.replicas, found.stage_index(index)
        at_first = SourceKind.LIVE if found.boundary else SourceKind.INITIAL
        parts = [*cuts[index], *(["journal"] if found.has_journal(index) else [])]
        sources = tuple(
            Source(part, SourceKind.FILE, paths[part])
            if paths is not None and part in paths
            else Source(part, at_first)
            for part in parts
        )
        held = set(self.groups(index, cuts))

        def peers(stage: int) -> tuple[Neighbour, ...]:
            positions = stages[stage] if 0 <= stage < len(stages) else ()
            return tuple(
                Neighbour(position, workers[position].address, workers[position].stream.hello.incarnation)
                for position in positions
                if position != index
                and (
                    stage == own
                    or not held
                    or not self.groups(position, cuts)
                    or held & set(self.groups(position, cuts))
                )
            )

        return Start(
            plan=found,
            position=index,
            sources=sources,
            neighbours=Neighbours(peers(own - 1), peers(own + 1), peers(own)),
            state_dir=state_dir or str(self.directory / f"{self.name}-{generation}"),
            takes_snapshots=takes_snapshots,
            num_damaged=num_damaged,
        )

    def begin(self, generation: int, cuts: Sequence[Sequence[str]], workers: Sequence[Worker], **start: Any) -> None:
        """Prepare and start every stage, and wait until all have started."""
        for index in range(len(cuts)):
            self.prepare(workers[index], generation, index, cuts)
        for index in range(len(cuts)):
            worker = workers[index]
            worker.until(lambda worker=worker: worker.actual.prepared == generation, "ready")  # type: ignore[misc]
        for index in range(len(cuts)):
            nothing: dict[str, Any] = {"chooses_stop": False, "stop_at": None, "write": ()}
            workers[index].want(start=self.start(generation, index, cuts, workers, **start), **nothing)
        for index in range(len(cuts)):
            workers[index].until(lambda k=index: workers[k].actual.generation == generation, "started")  # type: ignore[misc]

    def write(self, worker: Worker, boundary: int, parts: Sequence[str]) -> list[WrittenFile]:
        """Have parts written where the worker stands, and wait for it."""
        worker.written.clear()
        worker.want(stop_at=boundary, write=tuple(parts))
        worker.until(lambda: {*worker.actual.written} == {*parts}, f"written: {worker.actual.failures}")
        return list(worker.written)

    def release(self, *workers: Worker) -> None:
        """Have the job forgotten."""
        for worker in workers:
            worker.goal = Goal()
            worker.want()
        for worker in workers:
            worker.until(lambda worker=worker: not worker.actual.job, "released")  # type: ignore[misc]


@pytest.fixture(scope="package")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards with tokens below 64."""
    folder = tmp_path_factory.mktemp("tokens") / "data"
    with writing_shards(folder, DataForm(vocab_size=MODEL.vocab_size)) as writer:
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
        for told in (worker.done, worker.written, worker.snapshots, worker.missed):
            told.clear()
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
