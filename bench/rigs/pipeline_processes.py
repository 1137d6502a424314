"""Worker processes for benches: each computes one stage over real links, without daemons or etcd around it.

The processes are forked once, from a process in which everything is imported and nothing runs, and keep their link
endpoints; every run of a pipeline is a task for each of them. CUDA survives no fork:
for a card they are started.
"""

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count, pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self
from unittest import mock

import torch

from headway.daemon.net.certificates import CertificateAuthority
from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.spec import OptimSpec
from headway.stages.data.microbatch import Microbatch
from headway.stages.device.device import StageDevice
from headway.stages.device.opening import open_device
from headway.stages.device.run_events import DeviceDone
from headway.stages.ids import Boundary, Generation, LayerName, StageIndex, Timeline
from headway.stages.links.codec import codec_between
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Frame, Link, LinkLost
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.nccl import NcclAttach
from headway.stages.links.worker_link import WorkerLink
from headway.stages.model.determinism import configure
from headway.stages.schedule.next_op import next_op
from headway.stages.schedule.operations import Backward, Op
from headway.stages.schedule.stage_schedule import depths_with_slack, schedule_depth
from headway.stages.sockets.tls_identity import TlsIdentity
from headway.stages.spec import ModelSpec, TrainSpec
from headway.stages.stage.allocator import keep_freed_memory
from headway.stages.stage.content import MicrobatchSource, StageContent
from headway.stages.stage.context import StageContext, StageLinks
from headway.stages.stage.executor import Executor
from headway.stages.stage.graph import StageGraph
from headway.stages.stage.loop import StageLoop
from headway.stages.state.journal import Journal, JournalRow
from headway.stages.state.layer_state import LayerState
from rigs.emulated_stage import FixedOrder, SleepTimes, sleeping_graph

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)
"""Timeout for a neighbour to be there, and to come back."""
RUN_TIMEOUT_S = 300.0
TROUBLES_S = 2.0
"""Time for the other processes to report after the first error."""
GENERATION = Generation(1)
LinkInbox = queue.SimpleQueue[Frame | LinkLost]
StageItem = Frame | LinkLost | DeviceDone | BaseException
StageInbox = queue.SimpleQueue[StageItem]
PRELOADED = [
    "headway.daemon.net.certificates",
    "headway.optim.layer_optimizer",
    "headway.stages.stage.executor",
    "headway.stages.links.endpoint",
    "torch.distributed.pipelining",
]
"""Imported before the fork."""
ROUND_TRIP_S = 1e-3
"""Round trip that a planner assumes inside a site; with the microbatch's time it gives the depth."""
REAL_MICROBATCH_S = 0.1
"""What a stage takes that computes, about: one round trip is much less."""


class RandomTokens:
    """Tokens that are a function of (seed, batch, microbatch)."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def microbatch(self, train: TrainSpec, *, seed: int, batch: int, microbatch: int) -> Microbatch:
        """As a `MicrobatchSource`."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + batch * 1009 + microbatch)
        window = torch.randint(
            self._vocab_size, (train.microbatch_size, train.sequence_length + 1), generator=generator
        )
        return Microbatch(window[:, :-1].contiguous(), window[:, 1:].contiguous())

    def held_out(self, train: TrainSpec, microbatch: int) -> Microbatch:
        """As a `MicrobatchSource`."""
        return self.microbatch(train, seed=0, batch=10**6, microbatch=microbatch)


@dataclass(frozen=True, slots=True)
class StageReport:
    """The result of one stage of a run."""

    operations: list[tuple[Op, float, float]]
    """Operations with begin and end, seconds of the machine's monotonic clock."""
    losses: list[float]
    """Losses per batch, on the last stage."""
    peak_bytes: int = 0
    """Most bytes that were allocated on a card; 0: not known."""

    def batch_ends(self) -> list[float]:
        """Return when each batch's last backward was done."""
        ends: dict[int, float] = {}
        for op, _, ended in self.operations:
            if isinstance(op, Backward):
                ends[op.batch] = ended
        return [ends[batch] for batch in sorted(ends)]


class Host:
    """One process: its links' endpoints."""

    def __init__(self, rank: int, certificates: Path) -> None:
        self.rank = rank
        self.addresses: Sequence[str] = ()
        self._links: list[Link] = []
        self._loop = LoopThread()
        self._loop.start()
        endpoint: dict[str, Any] = {
            "loop": self._loop,
            "identity": TlsIdentity.read(certificates),
            "host": HOST,
            "incarnation": str(rank),
            "protocol": 1,
        }
        self._endpoint = LinkEndpoint(**endpoint)
        self._endpoint.start()

    @property
    def address(self) -> str:
        """Return the address where the earlier stage dials."""
        return f"{HOST}:{self._endpoint.port}"

    def close_links(self) -> None:
        """Close the links of the last run: a neighbour may not have ended it when this process had."""
        for link in self._links:
            link.close()
        self._links.clear()

    def open_link(
        self,
        job: str,
        stage: int,
        peer: int,
        inbox: LinkInbox | StageInbox,
        contract: FrameContract,
        kind: str,
        *,
        device: str = "cpu",
    ) -> Link:
        """Open a link to a neighbouring stage, whose process has the rank of its stage. device: this stage's."""
        is_on_cards = kind == "collective" and device.startswith("cuda")
        terms = LinkTerms(
            job=job,
            generation=GENERATION,
            stage=StageIndex(stage),
            worker=stage,
            peer_stage=StageIndex(peer),
            peer_worker=peer,
            peer_incarnation=str(peer),
            peer_node="node",
            peer_name=f"stage {peer}",
            peer_address=self.addresses[peer],
            inbox=inbox,
            contract=contract,
            first_contact=TIMEOUT,
            silence=TIMEOUT,
            attach=NcclAttach(torch.device(device), print) if is_on_cards else None,
            is_plain=kind == "collective" and not is_on_cards,
        )
        if peer > stage:
            link = self._endpoint.dial(terms)
        else:  # where all have links with all, the next lower process is awaited last
            link = self._endpoint.accept(terms, is_last=peer == stage - 1)
        self._links.append(link)
        return link


class Task(Protocol):
    """A task for a process; it is sent as a pickle."""

    def run(self, host: Host) -> object:
        """Run in the process."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One stage of a run of ours: layers from the seed, through all batches."""

    job: str
    model: ModelSpec
    train: TrainSpec
    optim: OptimSpec
    cuts: Sequence[Sequence[str]]
    """The layers of each stage."""
    link: str = "grpc"
    sleeps: SleepTimes | None = None
    """Seconds to sleep instead of computing."""
    is_alone: bool = False
    """Every process computes the only stage of a pipeline of its own."""
    orders: Sequence[Sequence[Op]] = ()
    """Operations of each stage in a fixed order; none: any ready operation."""
    has_slack: bool = True
    """More in flight than equal times need, as a planner gives it."""
    seed: int = 1
    device: str = "cpu"
    """Where the stages compute."""

    def run(self, host: Host) -> StageReport:
        """The stage of the host's rank."""
        host.close_links()
        configure(self.train, torch.device(self.device))
        stage, num_stages = 0 if self.is_alone else host.rank, len(self.cuts)
        context = self._context(stage)
        inbox: StageInbox = StageInbox()
        if self.device.startswith("cuda"):
            torch.cuda.set_device(self.device)
        device = open_device(torch.device(self.device), on_failure=inbox.put)
        open_link = partial(self._open_link, host, context, inbox, device)
        links = StageLinks(
            upstream={0: open_link(stage - 1)} if stage else {},
            downstream={0: open_link(stage + 1)} if stage + 1 < num_stages else {},
        )
        make = optimizer_factory(self.optim, num_batches=self.train.batches, delay=self.train.delay)
        layers = [
            LayerState.initial(name, self.model, self.train, seed=self.seed, device=self.device, optimizer_factory=make)
            for name in context.layers
        ]
        journal = Journal() if stage == num_stages - 1 else None
        operations = self.observer()
        content = StageContent(layers=layers, tokens=self.tokens() if stage == 0 else None, journal=journal)
        executor = Executor(
            context,
            content,
            links,
            observer=operations,
            make_graph=self.graph_maker(stage),
            device=device,
            inbox=inbox,
        )

        def take(item: StageItem) -> None:
            if isinstance(item, BaseException):
                raise item
            executor.accept(item)

        choose = FixedOrder(self.orders[stage]) if self.orders else next_op
        try:
            StageLoop(executor, inbox, take, choose=choose).run()
        finally:
            device.close()
        losses = [] if journal is None else [row.loss for row in journal.rows]
        return StageReport(operations.all, losses, executor.layer_times.measured.peak_bytes)

    def observer(self) -> "Operations":
        """Return what hears of each operation."""
        return Operations()

    def tokens(self) -> MicrobatchSource:
        """Return the first stage's source of tokens."""
        return RandomTokens(self.model.vocab_size)

    def graph_maker(self, stage: int) -> Callable[..., StageGraph]:
        """Return the maker of a stage's graph."""
        return StageGraph if self.sleeps is None else partial(sleeping_graph, self.sleeps, stage)

    def depth(self, stage: int) -> int:
        """Return the depth that a planner would give a stage."""
        train, num_stages, sleeps = self.train, len(self.cuts), self.sleeps
        microbatch_s = REAL_MICROBATCH_S if sleeps is None else sleeps.forward_s + sleeps.backward_s
        needed = [
            schedule_depth(
                train.schedule, train.microbatches, num_stages, s, (num_stages - 1 - s) * ROUND_TRIP_S / microbatch_s
            )
            for s in range(num_stages)
        ]
        depths = depths_with_slack(train.schedule, needed, train.microbatches) if self.has_slack else needed
        return depths[stage]

    def _open_link(self, host: Host, context: StageContext, inbox: StageInbox, device: StageDevice, peer: int) -> Link:
        codec = context.upstream_codec if peer < context.stage_index else context.downstream_codec
        contract = FrameContract.of(self.model, self.train, activations=codec, gradients=codec)
        link = host.open_link(self.job, context.stage_index, peer, inbox, contract, self.link, device=self.device)
        return WorkerLink(link, device, codec, self.train, to_device=self.link == "collective")

    def _context(self, stage: int) -> StageContext:
        codec = codec_between(self.train, is_between_sites=False)
        return StageContext(
            model=self.model,
            train=self.train,
            seed=self.seed,
            job=self.job,
            generation=GENERATION,
            timeline=Timeline(1),
            stage_index=StageIndex(stage),
            num_stages=len(self.cuts),
            layers=tuple(LayerName(name) for name in self.cuts[stage]),
            depth=self.depth(stage),
            boundary=Boundary(0),
            device=torch.device(self.device),
            upstream_codec=codec,
            downstream_codec=codec,
            patience_s=TIMEOUT.total_seconds(),
            stops_at_non_finite=False,
        )


@dataclass(frozen=True, slots=True)
class KeepFreedMemory:
    """Keeps freed memory, as a worker does from its start."""

    def run(self, host: Host) -> None:
        """Keep freed memory for good."""
        del host
        keep_freed_memory()


class Operations:
    """Keeps what was done, and when."""

    def __init__(self) -> None:
        self.all: list[tuple[Op, float, float]] = []

    def ended(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:  # noqa: ARG002
        self.all.append((op, started, ended))

    def waits(self, what: str, now: float) -> None: ...

    def begins(self, op: Op, now: float) -> None: ...

    def batch_done(self, row: JournalRow) -> None: ...


class Processes:
    """The processes of a bench. A context manager; what it started is gone afterwards."""

    def __init__(self, number: int, *, environment: Mapping[str, str] | None = None) -> None:
        """environment: variables for them in addition to this process's; they are then started, not forked."""
        self._number = number
        self._environment = environment
        self._folder = tempfile.TemporaryDirectory(prefix="headway-bench-")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._names = count()

    @property
    def folder(self) -> Path:
        """Return the folder that the processes share."""
        return Path(self._folder.name)

    def __enter__(self) -> Self:
        certificates = self.certificates = CertificateAuthority.create(self.folder / "authority").issue("node")
        context: Any = multiprocessing.get_context("forkserver" if self._environment is None else "spawn")
        multiprocessing.set_forkserver_preload(PRELOADED)
        with mock.patch.dict(os.environ, self._environment or {}):
            for rank in range(self._number):
                own, other = context.Pipe()
                process = context.Process(target=self.target(rank), args=(other, rank, certificates), daemon=True)
                process.start()
                self._processes.append(process)
                self._connections.append(own)
        addresses = [connection.recv() for connection in self._connections]
        for connection in self._connections:
            connection.send(addresses)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def target(self, rank: int) -> Callable[[Connection, int, Path], None]:
        """Return the function that a process runs from its start."""
        del rank
        return serve

    def new_name(self) -> str:
        """Return a name for a job."""
        return f"job-{next(self._names)}"

    def run(self, task: Task, *, number: int) -> list[Any]:
        """Run one task in the first `number` processes; return each result. Raises RuntimeError when one fails."""
        until = time.monotonic() + RUN_TIMEOUT_S
        waiting = {connection: rank for rank, connection in enumerate(self._connections[:number])}
        for connection in waiting:
            connection.send(task)
        results: list[Any] = [None] * number
        troubles: list[str] = []
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
            if not ready and troubles:
                break
            if not ready:
                raise RuntimeError(f"processes {sorted(waiting.values())}: not done within {RUN_TIMEOUT_S:g} s")
            for answered in ready:
                assert isinstance(answered, Connection)
                rank = waiting.pop(answered)
                results[rank], trouble = answered.recv()
                if trouble:
                    troubles.append(f"process {rank}:\n{trouble}")
                    until = time.monotonic() + TROUBLES_S
        if troubles:
            raise RuntimeError("\n".join(troubles))
        return results


def serve(connection: Connection, rank: int, certificates: Path) -> None:
    """A process's life: whatever it is told to do."""
    torch.set_num_threads(1)
    host = Host(rank, certificates)
    connection.send(host.address)
    host.addresses = connection.recv()
    while True:
        try:
            task: Task = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer: tuple[object, str] = task.run(host), ""
        except Exception:
            answer = None, traceback.format_exc()
        connection.send(answer)


def cut(names: Sequence[str], num_stages: int) -> list[tuple[str, ...]]:
    """Equal shares of the blocks; embed and head go with the first and the last."""
    blocks = names[1:-1]
    edges = [len(blocks) * stage // num_stages for stage in range(num_stages + 1)]
    shares = [tuple(blocks[first:end]) for first, end in pairwise(edges)]
    shares[0] = (names[0], *shares[0])
    shares[-1] = (*shares[-1], names[-1])
    return shares


def seconds_per_batch(ends: Sequence[float], *, num_settling: int) -> float:
    """Mean over the batches after the first few, the last one left out."""
    steady = ends[num_settling - 1 : -1]
    return (steady[-1] - steady[0]) / (len(steady) - 1)
