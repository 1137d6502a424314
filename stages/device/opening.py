"""Opens the device of a worker."""

from collections.abc import Callable

import torch

from headway.stages.device.cpu import CpuDevice
from headway.stages.device.cuda import CudaStreams
from headway.stages.device.device import StageDevice
from headway.stages.device.streamed import StreamedDevice


def open_device(device: torch.device, *, on_failure: Callable[[BaseException], None]) -> StageDevice:
    """Return the device. on_failure: is told of errors in the device's threads, and must not block."""
    if device.type == "cuda":
        return StreamedDevice(CudaStreams(device), on_failure=on_failure)
    return CpuDevice()
