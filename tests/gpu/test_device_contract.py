"""The contract of every device, on a card."""

from collections.abc import Iterator

import pytest
import torch

from headway.stages.device.device import StageDevice
from headway.stages.device.opening import open_device
from tests.unit.stages.device.test_device_contract import *  # noqa: F403

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


@pytest.fixture  # type: ignore[no-redef]  # replaces the imported one
def device() -> Iterator[StageDevice]:
    """The first card; no error in its threads goes unheard."""
    failures: list[BaseException] = []
    opened = open_device(torch.device("cuda", 0), on_failure=failures.append)
    yield opened
    opened.close()
    assert failures == []
