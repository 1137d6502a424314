"""Where the tests of this folder run: on the first card, or with HEADWAY_GPU_TESTS_ON=cpu on the CPU."""

import os
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

ENVIRONMENT = "HEADWAY_GPU_TESTS_ON"


@pytest.fixture
def kind() -> Literal["cpu", "cuda"]:
    """The kind of device for tests that a CPU can run too: so their code is run before a card has it."""
    if os.environ.get(ENVIRONMENT) == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return "cuda"


@pytest.fixture(autouse=True)
def own_arithmetic() -> Iterator[None]:
    """Precision, determinism and threads are a process's: what a test sets is undone."""
    precision, mode = torch.get_float32_matmul_precision(), torch.get_deterministic_debug_mode()
    threads = torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_deterministic_debug_mode(mode)
    torch.set_num_threads(threads)


@pytest.fixture
def card(kind: Literal["cpu", "cuda"]) -> torch.device:
    """The first device of that kind."""
    return torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
