"""Stages on devices with set times, in the threads of this process, joined by queues: what the host does is real."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.device.device import StageDevice
from headway.stages.device.streamed import StreamedDevice
from headway.stages.ids import Boundary, Generation, LayerName, StageIndex, Timeline
from headway.stages.links.link import Frame, Link
from headway.stages.links.worker_link import WorkerLink
from headway.stages.schedule.operations import Backward, Forward, Op
from headway.stages.schedule.stage_schedule import depths_with_slack, schedule_depth
from headway.stages.spec import ModelSpec, TrainSpec, layer_names
from headway.stages.stage.content import StageContent
from headway.stages.stage.context import StageContext, StageLinks
from headway.stages.stage.executor import Executor
from headway.stages.stage.loop import StageLoop
from headway.stages.state.journal import Journal
from headway.stages.state.layer_state import LayerState
from rigs.emulated_stage import ZeroGraph
from rigs.pipeline_processes import Operations, RandomTokens, cut
from rigs.timed_streams import BlockingDevice, BlockingLink, Computed, TimedStreams

OPTIM = OptimSpec(matrices=GroupSpec(name="adamw"), error_feedback=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of each operation, and of a copy of hidden states in either direction."""

    forward_s: float
    backward_s: float
    update_s: float
    copy_s: float


class QueueLink:
    """A `Link` to the inbox of a stage in this process."""

    def __init__(self, peer: str, inbox: "SimpleQueue[Any]") -> None:
        self.peer = peer
        self._inbox = inbox

    def send(self, frame: Frame) -> None:
        self._inbox.put(frame)

    def close(self) -> None:
        return


class TimedGraph(ZeroGraph):
    """The operations take their time on the device's clock."""

    def __init__(self, seconds: Times, streams: TimedStreams, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._seconds = seconds
        self._streams = streams

    def takes(self, op: Op, began: float) -> None:  # noqa: ARG002
        """Launch it."""
        match op:
            case Forward():
                self._streams.compute(op, self._seconds.forward_s)
            case Backward():
                self._streams.compute(op, self._seconds.backward_s)
            case _:
                self._streams.compute(op, self._seconds.update_s)


def run_stages(
    model: ModelSpec, train: TrainSpec, times: Times, *, num_stages: int, is_blocking: bool
) -> list[list[Computed]]:
    """Run a job. Returns what each stage's device has computed, and when."""
    hidden_bytes = 4 * train.microbatch_size * train.sequence_length * model.hidden_size
    streams = [TimedStreams(hidden_bytes / times.copy_s) for _ in range(num_stages)]
    inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(num_stages)]
    loops = [
        _loop(model, train, times, stage, streams=streams[stage], inboxes=inboxes, is_blocking=is_blocking)
        for stage in range(num_stages)
    ]
    with ThreadPoolExecutor(num_stages) as threads:
        for future in as_completed([threads.submit(loop.run) for loop in loops]):
            future.result()
    for loop in loops:
        loop.executor.device.close()
    return [of_stage.computed for of_stage in streams]


def _loop(
    model: ModelSpec,
    train: TrainSpec,
    times: Times,
    stage: int,
    *,
    streams: TimedStreams,
    inboxes: Sequence["SimpleQueue[Any]"],
    is_blocking: bool,
) -> StageLoop[Any]:
    device: StageDevice
    blocking = BlockingDevice(streams)
    device = blocking if is_blocking else StreamedDevice(streams, on_failure=inboxes[stage].put)

    def link(peer: int) -> Link:
        bare = QueueLink(f"stage {peer}", inboxes[peer])
        return BlockingLink(bare, blocking) if is_blocking else WorkerLink(bare, device)

    context = _context(model, train, times, stage, len(inboxes))
    make = optimizer_factory(OPTIM, num_batches=train.batches, delay=train.delay)
    layers = [
        LayerState.initial(name, model, train, seed=1, device="cpu", optimizer_factory=make) for name in context.layers
    ]
    content = StageContent(
        layers=layers,
        tokens=RandomTokens(model.vocab_size) if stage == 0 else None,
        journal=Journal() if context.is_last else None,
    )
    links = StageLinks(
        upstream={0: link(stage - 1)} if stage else {},
        downstream={0: link(stage + 1)} if stage + 1 < len(inboxes) else {},
    )
    executor = Executor(
        context,
        content,
        links,
        observer=Operations(),
        make_graph=partial(TimedGraph, times, streams),
        device=device,
        inbox=inboxes[stage],
    )

    def take(item: Any) -> None:
        if isinstance(item, BaseException):
            raise item
        executor.accept(item)

    return StageLoop(executor, inboxes[stage], take)


def _context(model: ModelSpec, train: TrainSpec, times: Times, stage: int, num_stages: int) -> StageContext:
    slices = cut(list(layer_names(model)), num_stages)
    microbatch_s, round_trip_s = times.forward_s + times.backward_s, 4 * times.copy_s
    needed = [
        schedule_depth(
            train.schedule, train.microbatches, num_stages, s, (num_stages - 1 - s) * round_trip_s / microbatch_s
        )
        for s in range(num_stages)
    ]
    return StageContext(
        model=model,
        train=replace(train),
        seed=1,
        job="timed",
        generation=Generation(1),
        timeline=Timeline(1),
        stage_index=StageIndex(stage),
        num_stages=num_stages,
        layers=tuple(LayerName(name) for name in slices[stage]),
        depth=depths_with_slack(train.schedule, needed, train.microbatches)[stage],
        boundary=Boundary(0),
        device=torch.device("cpu"),
        patience_s=20.0,
    )
