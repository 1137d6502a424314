"""A whole pipeline in this process: one thread, one executor and its loop per worker, joined by local links."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.local.reference_loop import BatchResult, Weights, reference
from headway.daemon.worker.neighbours import update_shares
from headway.daemon.worker.stage_records import RunObserver
from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.data.microbatch import Microbatch
from headway.stages.data.shard_index import BEGINS_DOCUMENT, IS_TARGET
from headway.stages.data.tokens import Flags, mean_tokens, num_targets, positions, trained_targets
from headway.stages.device.cpu import CpuDevice
from headway.stages.device.device import StageDevice
from headway.stages.device.run_events import DeviceDone
from headway.stages.device.streamed import StreamedDevice
from headway.stages.errors import AbortedError
from headway.stages.ids import Boundary, Generation, LayerName, StageIndex, Timeline
from headway.stages.links.codec import Codec
from headway.stages.links.link import Frame, Link, LinkLost
from headway.stages.links.worker_link import WorkerLink
from headway.stages.schedule.operations import Op
from headway.stages.schedule.stage_schedule import depths_with_slack, replica_depth, schedule_depth
from headway.stages.spec import ModelSpec, Recompute, TrainSpec, whole_layer
from headway.stages.stage.content import MicrobatchSource, StageContent
from headway.stages.stage.context import StageContext, StageLinks
from headway.stages.stage.executor import Executor
from headway.stages.stage.launched_ops import StageObserver
from headway.stages.stage.loop import StageLoop
from headway.stages.stage.snapshots import Snapshots
from headway.stages.state.host_blocks import HostBlocks
from headway.stages.state.journal import Journal, JournalRow
from headway.stages.state.layer_file import SUFFIX, read_journal, read_layer, write_journal, write_layer
from headway.stages.state.layer_state import LayerState
from headway.stages.state.optimizer import OptimizerFactory
from headway.stages.state.snapshot_interval import SnapshotInterval
from headway.stages.state.snapshot_writer import Snapshot, SnapshotEnded, SnapshotWriter
from headway.stages.telemetry.goodput import Goodput, RecentOps
from tests.rigs.late_streams import LateStreams, late_device
from tests.rigs.local_link import LocalLink
from tests.rigs.unobserved import Unobserved

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
NARROW = OptimSpec(
    matrices=GroupSpec(name="muon", momentum_dtype="bfloat16"),
    rest=GroupSpec(name="adamw", momentum_dtype="bfloat16"),
    error_feedback_dtype="bfloat16",
    warmup_batches=2,
)
"""Momentum and Error Feedback in bfloat16."""
ADAMW = OptimSpec(matrices=GroupSpec(name="adamw"), error_feedback=0.0, lr_schedule="wsd", warmup_batches=1)


def make_job(train: TrainSpec = TRAIN, optim: OptimSpec = EF, *, seed: int = 7, model: ModelSpec = MODEL) -> JobSpec:
    """A job of the tiny model."""
    return JobSpec(job=JobSection(name="tiny", seed=seed), model=model, train=train, optim=optim)


def with_blocks(job: JobSpec, *, are_split: bool) -> JobSpec:
    """The same job, whose blocks are one layer each, or two."""
    return job.with_values({"placement.split_blocks": are_split})


class CountingTokens:
    """Tokens that are a function of (seed, batch, microbatch), as those of the shards are, perhaps with flags."""

    def microbatch(self, train: TrainSpec, *, seed: int, batch: int, microbatch: int) -> Microbatch:
        return self._rows(train, seed, batch, microbatch, train.microbatches)

    def held_out(self, train: TrainSpec, microbatch: int) -> Microbatch:
        return self._rows(train, 0, 10_000, microbatch, train.num_evaluated)

    def _rows(self, train: TrainSpec, seed: int, batch: int, microbatch: int, num_microbatches: int) -> Microbatch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + batch * 1009 + microbatch)
        window = torch.randint(
            MODEL.vocab_size, (train.microbatch_size, train.sequence_length + 1), generator=generator
        )
        inputs, targets = (
            part.clone(memory_format=torch.contiguous_format) for part in (window[:, :-1], window[:, 1:])
        )
        if not train.has_mask:
            return Microbatch(inputs, targets)
        flags = self.flags(train, batch, microbatch)
        number = sum(num_targets(self.flags(train, batch, i), train) for i in range(num_microbatches))
        return Microbatch(
            inputs,
            torch.from_numpy(trained_targets(targets.numpy(), flags, train)),
            torch.from_numpy(positions(flags)) if train.separates_documents else None,
            torch.tensor(mean_tokens(number, num_microbatches), dtype=torch.float32),
        )

    def flags(self, train: TrainSpec, batch: int, microbatch: int) -> Flags:
        """Of each microbatch another share of targets; batch 1 has none."""
        shape = (train.microbatch_size, train.sequence_length + 1)
        generator = np.random.default_rng(batch * 1009 + microbatch)
        is_target = generator.random(shape) < (0.0 if batch == 1 else 0.2 + 0.2 * microbatch)
        begins = generator.random(shape) < 0.3
        return is_target * IS_TARGET + begins * BEGINS_DOCUMENT


@dataclass
class Trace(Unobserved):
    """An observer that keeps the operations, with the version that each read and the number of live versions."""

    ops: list[tuple[Op, int, int]] = field(default_factory=list)

    def ended(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:
        assert started <= ended
        self.ops.append((op, version, num_versions_live))


def timed(goodput: Goodput) -> RunObserver:
    """What a worker's run is observed by, without a history and faults."""
    return RunObserver(goodput, RecentOps(), history=None, on_operation=None, on_batch=lambda _: None)


class TellsBatches:
    """An observer of the worker that writes the journal: also tells of each batch."""

    def __init__(self, inner: StageObserver, on_batch: Callable[[int], None]) -> None:
        self._on_batch = on_batch
        self.waits, self.begins, self.ended = inner.waits, inner.begins, inner.ended

    def batch_done(self, row: JournalRow) -> None:
        self._on_batch(row.batch)


def factory_of(job: JobSpec) -> OptimizerFactory:
    return optimizer_factory(job.optim, **job.train.of_optimizers)


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


@dataclass(frozen=True)
class Place:
    """One worker of a pipeline."""

    stage: int
    replica: int
    groups: tuple[int, ...]

    def __str__(self) -> str:
        return f"stage {self.stage}" if not self.replica else f"stage {self.stage} worker {self.replica}"


def places(num_groups: int, replicas: Sequence[int]) -> list[Place]:
    """All workers of a pipeline, whose stages have so many replicas; groups are dealt out in turn, as in a plan."""
    return [
        Place(stage, replica, tuple(range(replica, num_groups, count)))
        for stage, count in enumerate(replicas)
        for replica in range(count)
    ]


BLOCK_BYTES = 5000
"""No tensor's size: most tensors of a snapshot lie in two blocks or more."""
Item = Frame | LinkLost | DeviceDone | SnapshotEnded | BaseException | str | int
"""What reaches a worker of a pipeline: `abort`, `choose` and a boundary to stop at stand for orders."""


class WatchedWriter(SnapshotWriter):
    """A writer that can be asked."""

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot's tensors are still being read."""
        return self._current is not None


@dataclass
class SnapshotPlan:
    """Where, and how often, a pipeline's stages write snapshots."""

    folder: Path
    every: int = 1
    on_file: Callable[[Snapshot, LayerName], None] = lambda _snapshot, _layer: None
    writers: list[WatchedWriter] = field(default_factory=list)
    live: tuple[LayerName, ...] = ()

    def open(self, context: StageContext, inbox: SimpleQueue[Item], device: StageDevice) -> Snapshots:
        """One stage's, with a writer of its own, and small blocks unless the device is immediate."""
        self.writers.append(WatchedWriter(inbox, on_file=self.on_file))
        interval = SnapshotInterval(self.every, 0)
        blocks = None if device.is_immediate else HostBlocks(device, block_bytes=BLOCK_BYTES)
        return Snapshots(self.writers[-1], interval, context, folder=self.folder, live=self.live, blocks=blocks)


class Pipeline:
    """One generation of a job: `run()` takes every stage to the stop boundary."""

    def __init__(
        self,
        job: JobSpec,
        layers: Mapping[str, LayerState],
        journal: Journal,
        *,
        num_stages: int,
        replicas: Sequence[int] = (),
        codecs: Sequence[Codec] = (),
        more_layers: Callable[[], Mapping[str, LayerState]] | None = None,
        generation: int = 1,
        stop_after_batch: int | None = None,
        snapshots: SnapshotPlan | None = None,
        abort_after_batch: int | None = None,
        observers: Sequence[StageObserver] | None = None,
        tokens: MicrobatchSource | None = None,
        late_seed: int | None = None,
        recompute: Sequence[Recompute] = (),
        shares_updates: bool = False,
    ) -> None:
        """late_seed: of devices whose copies are late; none: the CPU. tokens: what the first stage reads; none:
        CountingTokens. recompute: what each stage computes again; none: what the job says. shares_updates: replicas
        orthogonalise a share each.

        replicas: of each stage; none: one each. more_layers: another copy of the layers, for replicas that do not
        lead; none: initial ones. codecs: of the cuts, the first ones first; further ones have none.
        """
        self.job, self.codecs = job, (Codec.NONE, *codecs, *[Codec.NONE] * num_stages)
        self.places = places(job.train.reduction_groups, replicas or (1,) * num_stages)
        of_stages = [[place for place in self.places if place.stage == s] for s in range(num_stages)]
        self.copies = [(more_layers or (lambda: initial_layers(job)))() for _ in range(max(map(len, of_stages)) - 1)]
        """Per replica that does not lead, all layers; each stage's workers use their own."""
        self.abort_after_batch = abort_after_batch
        self.snapshots = snapshots
        self.ended: list[SnapshotEnded] = []
        """What became of the snapshots, of all stages."""
        self.inboxes: list[SimpleQueue[Item]] = [SimpleQueue() for _ in self.places]
        self.devices = [self._device(worker, late_seed) for worker in range(len(self.places))]
        self.journal = journal
        self.stop: Boundary | None = None
        self.stop_after_batch = stop_after_batch
        self.loops: list[StageLoop[Item]] = []
        slices = self.slices = cut(job.layers, num_stages)
        for worker, place in enumerate(self.places):
            held = layers if place.replica == 0 else self.copies[place.replica - 1]
            context = self._context(job, place, [other.groups for other in of_stages[place.stage]], slices)
            if shares_updates:
                shares = update_shares(job, context.layers, len(context.replica_groups))
                context = replace(context, update_shares=shares)
            is_alone = len(self.places) == num_stages
            if recompute:
                context = replace(context, train=replace(job.train, recompute=recompute[place.stage]))
            context = replace(context, group_by_group=is_alone, generation=Generation(generation))
            context = replace(context, boundary=held[slices[0][0]].boundary)
            is_first, is_last = place.stage == 0, place.stage == num_stages - 1
            has_journal = is_last and place.replica == 0
            content = StageContent(
                layers=[held[name] for name in context.layers],
                tokens=(tokens or CountingTokens()) if is_first else None,
                journal=journal if has_journal else None,
                snapshots=snapshots.open(context, self.inboxes[worker], self.devices[worker]) if snapshots else None,
            )
            observer: StageObserver = observers[worker] if observers else Unobserved()
            if has_journal:
                observer = TellsBatches(observer, self._batch_ended)
            executor = Executor(
                context,
                content,
                self._links(place),
                observer=observer,
                device=self.devices[worker],
                inbox=self.inboxes[worker],
            )
            self.loops.append(StageLoop(executor, self.inboxes[worker], self._taker(worker)))

    def _context(
        self, job: JobSpec, place: Place, replica_groups: list[tuple[int, ...]], slices: list[tuple[LayerName, ...]]
    ) -> StageContext:
        num_microbatches = job.train.microbatches
        schedule, p = job.train.schedule, len(slices)
        needed = [schedule_depth(schedule, num_microbatches, p, s) for s in range(p)]
        depth = depths_with_slack(schedule, needed, num_microbatches)[place.stage]
        num_held = sum(i % job.train.reduction_groups in place.groups for i in range(num_microbatches))
        return StageContext(
            model=job.model,
            train=job.train,
            seed=job.job.seed,
            job=job.job.name,
            generation=Generation(1),
            timeline=Timeline(1),
            stage_index=StageIndex(place.stage),
            num_stages=len(slices),
            layers=slices[place.stage],
            depth=replica_depth(depth, num_held=num_held, num_microbatches=num_microbatches),
            boundary=Boundary(0),
            device=torch.device("cpu"),
            replica_groups=tuple(replica_groups) if len(replica_groups) > 1 else (),
            replica_index=place.replica,
            upstream_codec=self.codecs[place.stage],
            downstream_codec=self.codecs[place.stage + 1],
            patience_s=20.0,
        )

    def _device(self, worker: int, late_seed: int | None) -> StageDevice:
        if late_seed is None:
            return CpuDevice()
        return late_device(1009 * late_seed + worker, on_failure=self.inboxes[worker].put)

    def _links(self, place: Place) -> StageLinks:
        """To every inbox that the worker has something to say to."""
        device = self.devices[self.places.index(place)]

        def to_stage(stage: int) -> dict[int, Link]:
            neighbours = [(worker, other) for worker, other in enumerate(self.places) if other.stage == stage]
            codec = self.codecs[max(stage, place.stage)]
            links: list[tuple[Link, tuple[int, ...]]] = []
            for worker, other in neighbours:
                local = LocalLink(str(other), self.inboxes[worker])
                links.append((WorkerLink(local, device, codec, self.job.train), other.groups))
            return {group: link for link, groups in links for group in groups if group in place.groups}

        siblings = [(worker, other) for worker, other in enumerate(self.places) if other.stage == place.stage]
        last = self.places[-1].stage
        other_end = {0: last, last: 0}.get(place.stage, -1) if self.job.model.trains_tie and last else -1
        return StageLinks(
            tied=to_stage(other_end),
            upstream=to_stage(place.stage - 1),
            downstream=to_stage(place.stage + 1),
            siblings={
                other.replica: WorkerLink(LocalLink(str(other), self.inboxes[worker]), device)
                for worker, other in siblings
                if other != place
            },
        )

    def run(self) -> list[Boundary]:
        with ThreadPoolExecutor(len(self.loops)) as threads:
            futures = [threads.submit(self._run_one, worker) for worker in range(len(self.loops))]
            boundaries = [future.result(timeout=60) for future in futures]
        self.finish_snapshots()
        for device in self.devices:
            if isinstance(device, StreamedDevice) and isinstance(device.streams, LateStreams):
                assert device.streams.faults == []
        return boundaries

    def _run_one(self, worker: int) -> Boundary:
        """What its device has not done when the run ends never happens."""
        try:
            return self.loops[worker].run()
        finally:
            self.devices[worker].close()

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

    def _taker(self, worker: int) -> Callable[[Item], None]:
        def take(item: Item) -> None:
            executor = self.loops[worker].executor
            match item:
                case Frame() | LinkLost() | DeviceDone():
                    executor.accept(item)
                case SnapshotEnded():
                    executor.snapshot_ended(item)
                    self.ended.append(item)
                case BaseException():
                    raise item
                case "abort":
                    raise AbortedError("the test")
                case int():
                    executor.stop_at(Boundary(item))
                case _:
                    assert item == "choose"
                    self.stop = executor.choose_stop()
                    for place, inbox in zip(self.places, self.inboxes, strict=True):
                        if place.stage:  # the lead's own siblings must know it from the lead
                            inbox.put(self.stop)

        return take


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


@cache
def oracle_results(job: JobSpec) -> tuple[list[BatchResult], Weights]:
    """The reference's batches and final weights; each job is computed once, with whole blocks or halves."""
    if job.placement.split_blocks:
        return oracle_results(with_blocks(job, are_split=False))
    results: list[BatchResult] = []
    weights = reference(job, CountingTokens(), on_batch=results.append)  # type: ignore[arg-type]
    return results, weights


def oracle(job: JobSpec) -> tuple[list[float], Weights]:
    """The reference's losses and final weights."""
    results, weights = oracle_results(job)
    return [result.loss for result in results], weights


def assert_exact(job: JobSpec, layers: dict[str, LayerState], journal: Journal) -> None:
    """Every loss, every norm and every weight, to the bit."""
    losses, weights = oracle(job)
    results = oracle_results(job)[0]
    assert [row.loss for row in journal.rows] == losses
    assert [row.eval_loss for row in journal.rows] == [result.eval_loss for result in results]
    assert [row.gradient_norm for row in journal.rows] == [result.gradient_norm for result in results]
    assert [row.final_eval_loss for row in journal.rows] == [result.final_eval_loss for result in results]
    assert (results[-1].final_eval_loss is not None) == (job.train.eval_every > 0)
    assert layers.keys() == set(job.layers)
    places = {
        (whole_layer(name), key): tensor for name, each in layers.items() for key, tensor in each.weights().items()
    }
    assert places.keys() == {(name, parameter) for name, each in weights.items() for parameter in each}
    for (name, parameter), tensor in places.items():
        assert torch.equal(tensor, weights[name][parameter]), f"{name}.{parameter}"


JOBS = {
    "2bw, Muon + EF": make_job(with_train(), EF),
    "2bw, Muon + EF, no clip, 3 groups": make_job(
        with_train(clip_norm=0.0, microbatches=8, reduction_groups=3, batches=3), EF
    ),
    "2bw, AdamW, clip, 3 groups": make_job(with_train(microbatches=8, reduction_groups=3, clip_norm=0.05), ADAMW),
    "2bw, bfloat16": make_job(with_train(dtype="bfloat16"), EF),
    "2bw, narrow optimizer, bfloat16": make_job(with_train(dtype="bfloat16"), NARROW),
    "2bw, loss in chunks, recomputation": make_job(with_train(loss_chunk=5, recompute="block"), EF),
    "1f1b, Muon + EF": make_job(with_train(schedule="1f1b"), EF),
    "1f1b, AdamW, no clip": make_job(with_train(schedule="1f1b", clip_norm=0.0), ADAMW),
    "gpipe, Muon + EF, bfloat16": make_job(with_train(schedule="gpipe", dtype="bfloat16"), EF),
    "2bw, recomputation": make_job(with_train(recompute="block"), EF),
    "2bw, recomputation, bfloat16": make_job(with_train(recompute="block", dtype="bfloat16"), EF),
    "gpipe, recomputation, no clip": make_job(with_train(schedule="gpipe", recompute="block", clip_norm=0.0), ADAMW),
    "gpipe, AdamW, 3 groups": make_job(with_train(schedule="gpipe", microbatches=8, reduction_groups=3), ADAMW),
}


def same_bits(one: Mapping[str, LayerState], other: Mapping[str, LayerState], names: tuple[LayerName, ...]) -> bool:
    """Weights and optimizer state, of these layers."""
    pairs = [(one[name].tensors(), other[name].tensors()) for name in names]
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)


def assert_replicas_agree(pipeline: Pipeline, layers: Mapping[str, LayerState]) -> None:
    """Every worker of a stage ended with the lead's bits."""
    for place in pipeline.places:
        if place.replica:
            assert same_bits(layers, pipeline.copies[place.replica - 1], pipeline.slices[place.stage]), str(place)


SHAPE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}


HYBRID = replace(
    MODEL,
    layer_types=("linear_attention", "full_attention"),
    qk_norm=True,
    attn_output_gate=True,
    zero_centered_norms=True,
    head_dim=8,
    partial_rotary_factor=0.25,
    **SHAPE,  # type: ignore[arg-type]
)


DOCUMENTS: dict[str, object] = {"loss_mask": "data", "documents": "separate"}


LONG: dict[str, object] = {"sequence_length": 66, "microbatch_size": 1}
"""More than a chunk."""
