"""Measures the speed of a device, in well under a second: matrix products and memory, against a documented reference.

Speed 1 is the device of costs/layer_costs.py's estimates: on a CPU 60 GFLOP/s of float32 on one thread and 8 GB/s,
on CUDA 30 TFLOP/s and 2 TB/s. Nine tenths of a layer's time count as products, the rest as memory.
"""

from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Final

import torch

from headway.daemon.costs.layer_costs import CPU_BYTES_PER_S, CPU_FLOPS_PER_THREAD, CUDA_BYTES_PER_S, CUDA_FLOPS

PRODUCTS: Final = 0.9
"""Products' share of the reference's time."""
SECONDS: Final = 0.1
"""Seconds for each of the two, after the first run, which does one-time work."""
CPU_SIZE: Final = 256
"""Rows and columns, as small as a small model's: larger ones would reach more than the model does."""
CUDA_SIZE: Final = 4096
CPU_BYTES: Final = 32 << 20
CUDA_BYTES: Final = 512 << 20


def measure_speed(device: torch.device) -> float:
    """Return the speed relative to the reference. Uses the threads that are set for this process."""
    is_cuda = device.type == "cuda"
    size, num_bytes = (CUDA_SIZE, CUDA_BYTES) if is_cuda else (CPU_SIZE, CPU_BYTES)
    one, other = (torch.ones((size, size), device=device) for _ in range(2))
    product = torch.empty_like(one)
    flops = 2.0 * size**3 / _seconds(lambda: torch.mm(one, other, out=product), device)
    source = torch.ones(num_bytes // 4, device=device)
    copy = torch.empty_like(source)
    bandwidth = 2.0 * num_bytes / _seconds(lambda: copy.copy_(source), device)  # each byte is read and written
    if is_cuda:
        return speed(flops / CUDA_FLOPS["float32"], bandwidth / CUDA_BYTES_PER_S)
    return speed(flops / CPU_FLOPS_PER_THREAD["float32"] / torch.get_num_threads(), bandwidth / CPU_BYTES_PER_S)


def speed(products: float, memory: float) -> float:
    """Return the speed, from the two ratios to the reference."""
    return 1.0 / (PRODUCTS / products + (1.0 - PRODUCTS) / memory)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the quickest run, because other processes only slow it down. One thread uses its own CPU
    time.
    """
    clock = thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
    best, ends_at = float("inf"), perf_counter() + SECONDS
    work()
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
