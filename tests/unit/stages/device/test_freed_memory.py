"""What a run has left behind does not keep its memory: the next stage needs the room on the card."""

import gc
import weakref
from queue import SimpleQueue
from types import MethodType

import pytest
import torch
from torch import Tensor

from headway.daemon.worker import device as worker_device
from headway.daemon.worker.device import WorkerDevice
from headway.stages.device.run_events import DeviceDone, RunEvents
from headway.stages.device.streamed import StreamedDevice
from headway.stages.state.host_blocks import HostBlocks
from tests.rigs.late_streams import late_device

PATIENCE_S = 20.0


def test_a_snapshot_of_the_last_run_keeps_no_layer_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is copied and its layers are dropped → the device's memory is free before other layers are loaded."""
    device = late_device(1)
    monkeypatch.setattr(worker_device, "open_device", lambda *_, **__: device)
    worker = WorkerDevice("cpu")
    worker.claim(0)
    worker.open(on_failure=lambda _: None)
    weights = torch.ones(100)
    memory = weakref.ref(weights.untyped_storage())
    held = weakref.ref(weights)
    copied = HostBlocks(device, block_bytes=128).begin_copy([weights])
    copied.copy.wait(PATIENCE_S)
    del weights, copied
    worker.release_memory()
    gc.collect()
    assert held() is None
    assert memory() is None
    assert not _held_sources(device)


def test_a_copy_on_one_stream_frees_what_others_have_read() -> None:
    """A bulk copy is done → the next copy on any stream lets go of its sources."""
    device = late_device(1)
    device.copy_out([torch.ones(100)], is_bulk=True).wait(PATIENCE_S)
    device.copy_in([torch.ones(1)])
    assert all(source.numel() == 1 for source in _held_sources(device))


class Layers:
    """What a run has on the device."""

    def use(self, _: tuple[Tensor, ...]) -> None:
        pytest.fail("of the earlier run")


def test_an_aborted_run_is_not_kept_by_what_it_waited_for() -> None:
    """A run ends while copies are under way, and nobody reads its inbox → its layers are freed at once."""
    inbox: SimpleQueue[DeviceDone] = SimpleQueue()
    device = late_device(1)
    run, layers = RunEvents(device, inbox), Layers()
    kept = weakref.ref(layers)
    run.when_copied([torch.ones(1)], MethodType(Layers.use, layers))
    run.close()
    del layers
    gc.collect()
    assert kept() is None
    run.heard(inbox.get(timeout=PATIENCE_S))
    assert run.num_pending == 0
    device.close()


def _held_sources(device: StreamedDevice) -> list[Tensor]:
    return [source for held in device._held.values() for _, sources in held for source in sources]
