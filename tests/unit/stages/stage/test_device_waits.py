"""A stage on a device that works later: what waits for what, who is named, and what becomes of errors."""

from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from headway.stages.data.microbatch import Microbatch
from headway.stages.device.device import DeviceLateError
from headway.stages.device.run_events import DeviceDone, RunEvents
from headway.stages.device.streamed import StreamedDevice
from headway.stages.errors import DataError, NonFiniteLossError
from headway.stages.links.link import Frame, FrameKind
from headway.stages.schedule.next_op import Awaited, awaited
from headway.stages.schedule.operations import Op
from headway.stages.schedule.schedule_state import ScheduleState
from headway.stages.schedule.stage_schedule import StageSchedule
from headway.stages.spec import TrainSpec
from headway.stages.stage.launched_ops import MOST_AHEAD
from headway.stages.state.journal import Journal
from tests.rigs.late_streams import LateStreams, late_device
from tests.rigs.local_link import LocalLink
from tests.rigs.pipeline import (
    ADAMW,
    EF,
    CountingTokens,
    Pipeline,
    assert_exact,
    initial_layers,
    make_job,
    with_train,
)
from tests.rigs.unobserved import Unobserved

PATIENCE_S = 20.0


def streams_of(pipeline: Pipeline) -> list[LateStreams]:
    """The streams of all devices."""
    of_devices = [device.streams for device in pipeline.devices if isinstance(device, StreamedDevice)]
    return [streams for streams in of_devices if isinstance(streams, LateStreams)]


def test_an_update_waits_for_the_losses_of_its_batch() -> None:
    """The journal's stage has all sums of a batch, and its losses are still on the device → it waits, and says so."""
    job = make_job(with_train(clip_norm=0.0, batches=1))
    schedule = StageSchedule.of(job.train, stage_index=0, num_stages=1, depth=1)
    state = ScheduleState(schedule)
    state.awaits_losses = True
    for microbatch in range(job.train.microbatches):
        state.forwarded(0, microbatch)
        state.backwarded(0, microbatch)
    state.groups_reduced(0)
    assert not state.is_update_ready
    assert awaited(state) is Awaited.LOSSES
    state.losses_known(0)
    assert state.is_update_ready


def test_a_loss_that_is_not_finite_stops_before_the_update() -> None:
    """The head's weights are NaN, the losses come late → the run ends, and no layer of that stage was updated."""
    job = make_job(with_train(clip_norm=0.0), EF)
    layers, journal = initial_layers(job), Journal()
    with torch.no_grad():
        for tensor in layers["head"].weights().values():
            tensor.fill_(float("nan"))
    pipeline = Pipeline(job, layers, journal, num_stages=1, late_seed=3)
    streams_of(pipeline)[0].slow_out_s = 0.1
    with pytest.raises(NonFiniteLossError, match="batch 0, microbatch 0"):
        pipeline.run()
    assert {layer.boundary for layer in layers.values()} == {0}


class Counting(Unobserved):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def begins(self, op: Op, now: float) -> None:  # noqa: ARG002
        self.heard.append(f"begins {op}")

    def ended(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:  # noqa: ARG002
        assert started <= ended
        self.heard.append(f"ended {op}")


def test_a_device_that_has_stopped_is_named() -> None:
    """Nothing that was launched is ever done → two operations are launched, and the error names the device."""
    job = make_job(with_train(), EF)
    observer = Counting()
    pipeline = Pipeline(job, initial_layers(job), Journal(), num_stages=1, observers=[observer], late_seed=1)
    executor = pipeline.loops[0].executor
    executor.context = replace(executor.context, patience_s=0.05)
    streams_of(pipeline)[0].is_stopped = True
    with pytest.raises(DeviceLateError, match="late device"):
        pipeline.loops[0].run()
    assert [line for line in observer.heard if line.startswith("begins")] == ["begins F0.0"]
    cursors = (executor.state.forwards, executor.state.backwards)
    assert sum(cursor.batch * job.train.microbatches + cursor.num_done for cursor in cursors) == MOST_AHEAD


def test_the_observer_hears_of_what_the_device_does() -> None:
    """A run on a late device → each operation begins when the one before has ended, in the order of launches."""
    job = make_job(with_train(batches=2), EF)
    observer = Counting()
    Pipeline(job, initial_layers(job), Journal(), num_stages=1, observers=[observer], late_seed=5).run()
    begins, ends = observer.heard[::2], observer.heard[1::2]
    assert [line.partition(" ")[2] for line in begins] == [line.partition(" ")[2] for line in ends]
    assert len(begins) == 2 * (2 * job.train.microbatches + 1)
    assert all(line.startswith("begins") for line in begins)


def test_what_an_earlier_run_waited_for_is_ignored() -> None:
    """A run is aborted while a copy is under way → the next run on the device hears nothing of it."""
    inbox: SimpleQueue[DeviceDone] = SimpleQueue()
    device = late_device(1)
    earlier, later = RunEvents(device, inbox), RunEvents(device, inbox)
    earlier.when_copied([torch.ones(1)], lambda _: pytest.fail("of the earlier run"))
    heard: list[Tensor] = []
    later.when_copied([torch.full((1,), 2.0)], lambda copied: heard.extend(copied))
    for _ in range(2):
        later.heard(inbox.get(timeout=PATIENCE_S))
    assert [tensor.tolist() for tensor in heard] == [[2.0]]
    assert later.num_pending == 0
    device.close()


def test_every_frame_has_left_when_a_run_ends() -> None:
    """A job without clipping: a stage's last gradients may leave after its last update → they still arrive."""
    job = make_job(with_train(clip_norm=0.0, batches=1, microbatches=2, schedule="1f1b"), ADAMW)
    layers, journal = initial_layers(job), Journal()
    pipeline = Pipeline(job, layers, journal, num_stages=3, late_seed=4)
    for streams in streams_of(pipeline):
        streams.slow_out_s = 0.3
    pipeline.run()
    assert_exact(job, layers, journal)


class EndingTokens(CountingTokens):
    """A folder of which a shard disappears."""

    def held_out(self, train: TrainSpec, microbatch: int) -> Microbatch:  # noqa: ARG002
        raise AssertionError("no batch is evaluated")

    def microbatch(self, train: TrainSpec, *, seed: int, batch: int, microbatch: int) -> Microbatch:
        if (batch, microbatch) == (1, 2):
            raise DataError("shard-3", "this shard is missing")
        return super().microbatch(train, seed=seed, batch=batch, microbatch=microbatch)


def test_an_error_of_the_data_ends_the_run_in_the_thread_of_the_stage() -> None:
    """A microbatch that is drawn ahead cannot be read → the stage's run raises that error."""
    job = make_job(with_train(), EF)
    tokens = EndingTokens()
    pipeline = Pipeline(job, initial_layers(job), Journal(), num_stages=1, tokens=tokens, late_seed=2)
    with pytest.raises(DataError, match="shard-3"):
        pipeline.run()


def test_losses_that_arrive_on_the_device_are_in_the_journal_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link between devices brings a replica's losses on the card, and copies out are slow → the reference's bits."""

    class LinkToDevice(LocalLink):
        """What replicas say of losses is on the receiver's device when it arrives."""

        def send(self, frame: Frame) -> None:
            if frame.kind is FrameKind.LOSSES:
                device = pipeline.devices[[id(inbox) for inbox in pipeline.inboxes].index(id(self._peer_inbox))]
                frame = replace(frame, tensors=device.copy_in(frame.tensors).take())
            super().send(frame)

    monkeypatch.setattr("tests.rigs.pipeline.LocalLink", LinkToDevice)
    job = make_job(with_train(batches=3, microbatches=4, reduction_groups=2, clip_norm=0.0), EF)
    layers, journal = initial_layers(job), Journal()
    pipeline = Pipeline(job, layers, journal, num_stages=1, replicas=(2,), late_seed=6)
    for streams in streams_of(pipeline):
        streams.slow_out_s = 0.02
    graph = pipeline.loops[0].executor._graph
    update, updated = graph.update, list[int]()

    def update_with_a_row(batch: int, gradients: Sequence[Tensor]) -> None:
        assert len(journal) > batch
        updated.append(batch)
        update(batch, gradients)

    monkeypatch.setattr(graph, "update", update_with_a_row)
    pipeline.run()
    assert_exact(job, layers, journal)
    assert updated == [0, 1, 2]
