"""The speeds of a card: both dtypes of jobs have their own, and measuring stays short."""

from time import perf_counter

import pytest
import torch

from headway.daemon.plan.layer_costs import CUDA_FLOPS
from headway.daemon.worker.device import CUDA_SIZE, _products, measure_speed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


def test_a_card_has_a_speed_in_each_dtype() -> None:
    """Tensor cores multiply in bfloat16 more than twice as fast as in float32 without TF32, at full size."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this card emulates bfloat16")
    assert not torch.backends.cuda.matmul.allow_tf32
    card = torch.device("cuda", 0)
    measure_speed(card)  # one-time work: the context, cuBLAS
    began = perf_counter()
    measured = measure_speed(card)
    assert perf_counter() - began < 10.0
    assert min(measured.float32, measured.bfloat16) > 0.01
    flops = {
        dtype: _products(card, dtype) * CUDA_FLOPS[str(dtype).removeprefix("torch.")]
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert flops[torch.bfloat16] > 2.0 * flops[torch.float32], f"at {CUDA_SIZE} rows: {flops}"
