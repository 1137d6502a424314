"""On a card: the table of attention kernels agrees with torch, forward and backward."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from headway.daemon.node.hardware import find_devices
from headway.stages.attention_kernels import FASTEST_FIRST, Kernel, why_not
from headway.stages.model.decoder import build_layer
from headway.stages.model.determinism import configure
from headway.stages.model.flash3 import choose_flash
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.spec import ModelSpec, TrainSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

CARD = torch.device("cuda", 0)


def runs(kernel: Kernel, model: ModelSpec, train: TrainSpec) -> bool:
    """Whether a block trains with this kernel and no other."""
    configure(train, CARD)
    dtype = getattr(torch, train.dtype)
    weights: dict[str, Tensor] = {
        name: tensor.to(CARD, dtype).requires_grad_()
        for name, tensor in initial_parameters("block.0", model, seed=2).items()
    }
    hidden = torch.randn(2, 33, model.hidden_size, device=CARD, dtype=dtype)
    try:
        output = functional_call(build_layer("block.0", model, attention_backend=kernel), weights, (hidden,))
        torch.autograd.grad(output.float().square().mean(), list(weights.values()))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [22, 24, 44, 64, 128, 192, 208, 256, 264])
def test_a_kernel_runs_where_the_table_says_so(dtype: str, head_dim: int) -> None:
    """Shared key/value heads, so that `efficient` gets its copies."""
    model = ModelSpec(hidden_size=4 * head_dim, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    train = TrainSpec(dtype=dtype)  # type: ignore[arg-type]
    (card, *_) = find_devices("cuda", 1)
    for kernel in FASTEST_FIRST:
        said = why_not(kernel, model, train, device_kind="cuda", capability=card.capability)
        assert runs(kernel, model, train) is (not said), (kernel, said)


def test_flash3_repeats_its_bits_or_is_refused() -> None:
    """With the package on a card of capability 9.x → a block trains; a build without repeatable sums is named."""
    (card, *_) = find_devices("cuda", 1)
    model = ModelSpec(hidden_size=512, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    train = TrainSpec(dtype="bfloat16", attention_backend="flash3", sequence_length=1024)
    if why := why_not("flash3", model, train, device_kind="cuda", capability=card.capability, flash3=card.flash3):
        pytest.skip(why)
    configure(train, CARD)
    choose_flash(model, train, CARD)
    try:
        assert runs("flash3", model, train)
    finally:
        choose_flash(model, TrainSpec(), CARD)
