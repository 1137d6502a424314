"""Stages are tested on one thread: torch's sums change with the thread count."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

cuda: Any = torch.backends.cuda  # its functions have no types


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread and a fixed seed; determinism as before when the test is over, and the same kernels of attention."""
    kernels = allowed_kernels()
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(is_deterministic)
    left = allowed_kernels()
    cuda.enable_flash_sdp(kernels[0])
    cuda.enable_mem_efficient_sdp(kernels[1])
    cuda.enable_math_sdp(kernels[2])
    assert left == kernels, "the test leaves other kernels of attention, so later tests would have other bits"


def allowed_kernels() -> tuple[bool, bool, bool]:
    """What `auto` may choose in this process: flash, efficient, math."""
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
