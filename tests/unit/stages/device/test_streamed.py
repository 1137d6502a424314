"""How a device with streams waits, and what it does when a copy is too late."""

from queue import SimpleQueue

import pytest
import torch

from headway.stages.device.device import DeviceLateError
from headway.stages.device.streamed import StreamedDevice
from tests.rigs.late_streams import LateStreams, late_device

PATIENCE_S = 20.0


def test_a_wait_for_a_late_device_ends_and_names_it() -> None:
    """A copy and a mark that do not end → an error that names the device, what it was, and the time."""
    streams = LateStreams(1)
    streams.is_stopped = True
    device = StreamedDevice(streams, on_failure=lambda _: None)
    copy = device.copy_out([torch.ones(1)])
    with pytest.raises(DeviceLateError, match=r"late device: a copy to the host is not done after 0\.01 s"):
        copy.wait(0.01)
    mark = device.mark()
    with pytest.raises(DeviceLateError, match="late device: computation is not done"):
        mark.wait(0.01)


def test_a_copy_under_way_is_poison() -> None:
    """Before a copy to the host is done its target is NaN → a reader that does not wait is found out."""
    streams = LateStreams(1)
    streams.is_stopped = True
    device = StreamedDevice(streams, on_failure=lambda _: None)
    buffer = device.host_buffer(torch.float32, (4,)).zero_()
    device.copy_out([torch.ones(4)], into=[buffer])
    assert buffer.isnan().all()


def test_an_error_in_an_act_is_told() -> None:
    """An act raises in the device's thread → `on_failure` hears of it, and later acts still run."""
    heard: SimpleQueue[object] = SimpleQueue()
    device = late_device(1, on_failure=heard.put)

    def fail() -> None:
        raise ValueError("the link is closed")

    device.after(device.mark(), fail)
    device.after(device.mark(), lambda: heard.put("next"))
    assert isinstance(heard.get(timeout=PATIENCE_S), ValueError)
    assert heard.get(timeout=PATIENCE_S) == "next"
    device.close()


def test_memory_that_the_computation_reads_is_guarded() -> None:
    """Copies are taken, used and freed → the copying stream never gets memory that the computation may still read."""
    streams = LateStreams(1)
    device = StreamedDevice(streams, on_failure=lambda _: None)
    for _ in range(10):
        assert device.copy_in([torch.ones(16)]).take()[0].sum() == 16
    assert streams.faults == []
