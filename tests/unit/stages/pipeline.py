"""A whole pipeline in this process: one thread and one executor per stage, joined by local links."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from headway.daemon.jobs.job import JobSection, JobSpec
from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.executor import Executor
from headway.stages.goodput import Goodput
from headway.stages.history import Recorder
from headway.stages.ids import Boundary, Generation, LayerName, StageIndex, Timeline
from headway.stages.journal import Journal
from headway.stages.layer_file import SUFFIX, read_journal, read_layer, write_journal, write_layer
from headway.stages.layer_state import LayerState
from headway.stages.optimizer import OptimizerFactory
from headway.stages.schedule import Op, schedule_depth
from headway.stages.snapshot_interval import SnapshotInterval
from headway.stages.snapshot_writer import Snapshot, SnapshotEnded, SnapshotWriter
from headway.stages.snapshots import Snapshots
from headway.stages.spec import ModelSpec, TrainSpec
from headway.stages.stage_context import StageContext
from tests.fakes.local_link import LocalLink

MODEL = ModelSpec(
    num_hidden_layers=3,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=32,
)
TRAIN = TrainSpec(schedule="2bw", batches=4, microbatches=4, microbatch_size=2, sequence_length=8)
EF = OptimSpec(warmup_batches=2)
ADAMW = OptimSpec(matrices=GroupSpec(name="adamw"), error_feedback=0.0, lr_schedule="wsd", warmup_batches=1)


def make_job(train: TrainSpec = TRAIN, optim: OptimSpec = EF, *, seed: int = 7) -> JobSpec:
    """A job of the tiny model."""
    return JobSpec(job=JobSection(name="tiny", seed=seed), model=MODEL, train=train, optim=optim)


class CountingTokens:
    """Tokens that are a function of (seed, batch, microbatch), as those of the shards are."""

    def microbatch(self, *, seed: int, batch: int, microbatch: int, size: int, length: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + batch * 1009 + microbatch)
        window = torch.randint(MODEL.vocab_size, (size, length + 1), generator=generator)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


@dataclass
class Trace:
    """A recorder that keeps what it is told."""

    ops: list[tuple[Op, int, int]] = field(default_factory=list)

    def record(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:
        assert started <= ended
        self.ops.append((op, version, num_versions_live))


def factory_of(job: JobSpec) -> OptimizerFactory:
    return optimizer_factory(job.optim, num_batches=job.train.batches, delay=job.train.delay)


def initial_layers(job: JobSpec) -> dict[str, LayerState]:
    return {
        name: LayerState.initial(
            LayerName(name), job.model, job.train, seed=job.job.seed, device="cpu", optimizer_factory=factory_of(job)
        )
        for name in job.layers
    }


def cut(names: Sequence[str], num_stages: int) -> list[tuple[LayerName, ...]]:
    """Contiguous slices, as equal as can be, the later ones the longer."""
    edges = [len(names) * s // num_stages for s in range(num_stages + 1)]
    return [tuple(LayerName(name) for name in names[a:b]) for a, b in pairwise(edges)]


@dataclass
class SnapshotPlan:
    """Where, and how often, a pipeline's stages write snapshots."""

    folder: Path
    every: int = 1
    on_file: Callable[[Snapshot, LayerName], None] = lambda _snapshot, _layer: None
    writers: list[SnapshotWriter] = field(default_factory=list)
    live: tuple[LayerName, ...] = ()

    def open(self, context: StageContext, inbox: SimpleQueue[object]) -> Snapshots:
        """One stage's, with a writer of its own."""
        self.writers.append(SnapshotWriter(inbox, on_file=self.on_file))
        interval = SnapshotInterval(self.every, 0)
        return Snapshots(self.writers[-1], interval, context, folder=self.folder, live=self.live)


class Pipeline:
    """One generation of a job: `run()` takes every stage to the stop boundary."""

    def __init__(
        self,
        job: JobSpec,
        layers: Mapping[str, LayerState],
        journal: Journal,
        *,
        num_stages: int,
        generation: int = 1,
        stop_after_batch: int | None = None,
        recorders: Sequence[Recorder] | None = None,
        snapshots: SnapshotPlan | None = None,
        abort_after_batch: int | None = None,
        goodputs: Sequence[Goodput] | None = None,
    ) -> None:
        self.abort_after_batch = abort_after_batch
        self.snapshots = snapshots
        self.ended: list[SnapshotEnded] = []
        """What became of the snapshots, of all stages."""
        self.inboxes: list[SimpleQueue[object]] = [SimpleQueue() for _ in range(num_stages)]
        self.journal = journal
        self.stop: Boundary | None = None
        self.stop_after_batch = stop_after_batch
        self.executors: list[Executor] = []
        for s, names in enumerate(cut(job.layers, num_stages)):
            depth = schedule_depth(job.train.schedule, job.train.microbatches, num_stages, s)
            context = StageContext(
                model=job.model,
                train=job.train,
                seed=job.job.seed,
                job=job.job.name,
                generation=Generation(generation),
                timeline=Timeline(1),
                stage_index=StageIndex(s),
                num_stages=num_stages,
                layers=names,
                depth=depth,
                boundary=layers[names[0]].boundary,
                device=torch.device("cpu"),
            )
            is_last = s == num_stages - 1
            self.executors.append(
                Executor(
                    context,
                    [layers[name] for name in names],
                    tokens=CountingTokens() if s == 0 else None,
                    journal=journal if is_last else None,
                    upstream=LocalLink(f"stage {s - 1}", self.inboxes[s - 1]) if s else None,
                    downstream=None if is_last else LocalLink(f"stage {s + 1}", self.inboxes[s + 1]),
                    inbox=self.inboxes[s],
                    handle=self._handler(s),
                    on_batch=(lambda row: self._batch_ended(row.batch)) if is_last else None,
                    recorder=recorders[s] if recorders else None,
                    goodput=goodputs[s] if goodputs else None,
                    snapshots=snapshots.open(context, self.inboxes[s]) if snapshots else None,
                    patience_s=20.0,
                )
            )

    def run(self) -> list[Boundary]:
        with ThreadPoolExecutor(len(self.executors)) as threads:
            futures = [threads.submit(executor.run) for executor in self.executors]
            boundaries = [future.result(timeout=60) for future in futures]
        self.finish_snapshots()
        return boundaries

    def finish_snapshots(self) -> None:
        """Wait for the writers, as a worker does in its idle time, and hear what they have to say."""
        if self.snapshots is None:
            return
        for writer in self.snapshots.writers:
            until = time.monotonic() + 20
            while writer.is_busy and time.monotonic() < until:
                time.sleep(0.001)
            assert not writer.is_busy
        for inbox in self.inboxes:
            while not inbox.empty():
                item = inbox.get()
                assert isinstance(item, SnapshotEnded)
                self.ended.append(item)

    def stop_all_at(self, boundary: int) -> None:
        """Before `run`: where to stop."""
        for inbox in self.inboxes:
            inbox.put(boundary)

    def _batch_ended(self, batch: int) -> None:
        if batch == self.stop_after_batch:
            self.inboxes[0].put("choose")
        if batch == self.abort_after_batch:
            for inbox in self.inboxes:
                inbox.put("abort")

    def _handler(self, stage: int) -> Callable[[object], None]:
        def handle(item: object) -> None:
            executor = self.executors[stage]
            if isinstance(item, SnapshotEnded):
                self.ended.append(item)
            elif item == "abort":
                executor.abort("the test")
            elif item == "choose":
                self.stop = executor.choose_stop()
                for inbox in self.inboxes[1:]:
                    inbox.put(self.stop)
            else:
                assert isinstance(item, int)
                executor.stop_at(Boundary(item))

        return handle


def save_all(folder: Path, job: JobSpec, layers: Mapping[str, LayerState], journal: Journal) -> Boundary:
    """Every layer and the journal as files; returns their boundary."""
    boundary = next(iter(layers.values())).boundary
    for name, layer in layers.items():
        write_layer(
            folder / f"{name}{SUFFIX}",
            layer,
            job=job.job.name,
            train=job.train,
            timeline=Timeline(1),
        )
    write_journal(
        folder / f"journal{SUFFIX}",
        journal,
        job=job.job.name,
        boundary=boundary,
        train=job.train,
        timeline=Timeline(1),
    )
    return boundary


def load_all(folder: Path, job: JobSpec, boundary: Boundary) -> tuple[dict[str, LayerState], Journal]:
    """The inverse."""
    layers = {
        name: read_layer(
            folder / f"{name}{SUFFIX}",
            LayerName(name),
            job=job.job.name,
            boundary=boundary,
            model=job.model,
            train=job.train,
            device="cpu",
            optimizer_factory=factory_of(job),
        )
        for name in job.layers
    }
    return layers, read_journal(folder / f"journal{SUFFIX}", job=job.job.name, boundary=boundary)


def with_train(**changes: object) -> TrainSpec:
    """The tiny job's `[train]`, changed."""
    return replace(TRAIN, **changes)  # type: ignore[arg-type]
