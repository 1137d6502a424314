"""What a worker does about a device that cannot be measured."""

import pytest
import torch

from headway.daemon.worker import device as module
from headway.daemon.worker.device import WorkerDevice


def test_a_device_that_has_no_memory_left_to_be_measured_stays_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's process fills it just now: the speed is unknown, nothing fails, and it is not tried again."""

    def fail(_: torch.device) -> float:
        raise torch.OutOfMemoryError("out of memory\nadvice")

    monkeypatch.setattr(module, "measure_speed", fail)
    device = WorkerDevice("cpu", is_to_be_measured=True)
    device.measure()
    assert (device.speed, device.is_to_be_measured) == (0.0, False)
