"""What a worker does about a device that cannot be measured."""

import pytest
import torch

from headway.daemon.records.measurements import DeviceSpeed
from headway.daemon.worker import device as module
from headway.daemon.worker.device import WorkerDevice


def test_a_device_that_has_no_memory_left_to_be_measured_stays_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's process fills it just now: the speed is unknown, nothing fails, and it is not tried again."""

    def fail(_: torch.device) -> DeviceSpeed:
        raise torch.OutOfMemoryError("out of memory\nadvice")

    monkeypatch.setattr(module, "measure_speed", fail)
    device = WorkerDevice("cpu", is_to_be_measured=True)
    device.measure()
    assert (device.speed, device.is_to_be_measured) == (DeviceSpeed(), False)


@pytest.mark.parametrize(("num_sharers", "told"), [(1, []), (4, [0.25])])
def test_a_worker_on_a_shared_card_keeps_to_its_part_of_the_memory(
    num_sharers: int, told: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is told the fraction before anything is allocated; a card of its own has no limit."""
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, _: fractions.append(part))
    assert WorkerDevice("cuda", num_sharers=num_sharers).claim(0) == torch.device("cuda", 0)
    assert fractions == told
