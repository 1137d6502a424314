"""Measures the speed of a device, in less than a second: matrix products in each dtype of jobs, and memory.

Speed 1 is the device of costs/layer_costs.py's estimates: on a CPU 60 GFLOP/s of float32 or 120 of bfloat16 on one
thread and 8 GB/s, on CUDA 30 or 300 TFLOP/s and 2 TB/s. Nine tenths of a layer's time count as products, the rest as
memory.
"""

from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Final

import structlog
import torch

from headway.daemon.costs.layer_costs import CPU_BYTES_PER_S, CPU_FLOPS_PER_THREAD, CUDA_BYTES_PER_S, CUDA_FLOPS
from headway.daemon.records.measurements import DeviceSpeed

log = structlog.get_logger()

PRODUCTS: Final = 0.9
"""Products' share of the reference's time."""
SECONDS: Final = 0.1
"""Seconds for each measurement, after the first run, which does one-time work."""
CPU_SIZE: Final = 256
"""Rows and columns, as small as a small model's: larger ones would reach more than the model does."""
CUDA_SIZE: Final = 4096
SMALLER: Final = 4
"""A product of so many times fewer rows and columns comes first. It tells whether the full size is too slow."""
CPU_BYTES: Final = 32 << 20
CUDA_BYTES: Final = 512 << 20


def measure_speed(device: torch.device) -> DeviceSpeed:
    """Return the speeds relative to the reference. Uses the threads that are set for this process.

    A dtype whose products the device lacks has speed 0. Raises RuntimeError if float32 products fail.
    """
    memory = _bytes_per_s(device) / (CUDA_BYTES_PER_S if device.type == "cuda" else CPU_BYTES_PER_S)
    float32 = speed(_products(device, torch.float32), memory)
    try:
        bfloat16 = speed(_products(device, torch.bfloat16), memory)
    except RuntimeError as error:
        log.warning("dtype_not_measured", dtype="bfloat16", device=str(device), reason=str(error).partition("\n")[0])
        bfloat16 = 0.0
    return DeviceSpeed(float32=float32, bfloat16=bfloat16)


def speed(products: float, memory: float) -> float:
    """Return the speed, from the two ratios to the reference."""
    return 1.0 / (PRODUCTS / products + (1.0 - PRODUCTS) / memory)


def flops_per_s(seconds_of: Callable[[int, float], float], size: int) -> tuple[float, int]:
    """Return the operations a second of matrix products of a size, and the size that was measured.

    seconds_of: times products of a size for at most some seconds, and for one product at least. Where one product of
    the full size would take longer than its time, the rate of the smaller size is the estimate. Such a device emulates
    the dtype: it reaches little more with larger products.
    """
    small = size // SMALLER
    small_s = seconds_of(small, 0.0)
    if small_s * SMALLER**3 > SECONDS:
        return 2.0 * small**3 / small_s, small
    return 2.0 * size**3 / seconds_of(size, SECONDS), size


def _products(device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of a dtype's products, relative to the reference."""
    name = str(dtype).removeprefix("torch.")

    def seconds_of(size: int, within_s: float) -> float:
        one, other = (torch.ones((size, size), device=device, dtype=dtype) for _ in range(2))
        product = torch.empty_like(one)
        return _seconds(lambda: torch.mm(one, other, out=product), device, within_s)

    is_cuda = device.type == "cuda"
    wanted = CUDA_SIZE if is_cuda else CPU_SIZE
    rate, size = flops_per_s(seconds_of, wanted)
    if size < wanted:
        log.info("speed_estimated", dtype=name, device=str(device), size=size, reason="larger products take too long")
    return rate / (CUDA_FLOPS[name] if is_cuda else CPU_FLOPS_PER_THREAD[name] * torch.get_num_threads())


def _bytes_per_s(device: torch.device) -> float:
    """Return the bytes a second of a copy: each byte is read and written."""
    num_bytes = CUDA_BYTES if device.type == "cuda" else CPU_BYTES
    source = torch.ones(num_bytes // 4, device=device)
    copy = torch.empty_like(source)
    return 2.0 * num_bytes / _seconds(lambda: copy.copy_(source), device, SECONDS)


def _seconds(work: Callable[[], object], device: torch.device, within_s: float) -> float:
    """Return the seconds of the quickest run, because other processes only slow it down. One thread uses its own CPU
    time.
    """
    clock = thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
    work()
    best, ends_at = float("inf"), perf_counter() + within_s
    while True:
        _wait_for(device)
        began = clock()
        work()
        _wait_for(device)
        best = min(best, clock() - began)
        if perf_counter() >= ends_at:
            return max(best, 1e-9)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
