"""Which kernel of attention a device has for a job: torch's rules, as a table and against torch itself on this CPU."""

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from headway.stages.attention_kernels import Kernel, why_not
from headway.stages.spec import ModelSpec, TrainSpec


def reason(
    kernel: Kernel, head_dim: int, dtype: str, capability: str, device_kind: str = "cuda", flash3: str = ""
) -> str:
    """Why a device has no such kernel for heads of a width."""
    model = ModelSpec(hidden_size=8 * head_dim, num_attention_heads=8)
    return why_not(
        kernel,
        model,
        TrainSpec(dtype=dtype),  # type: ignore[arg-type]
        device_kind=device_kind,
        capability=capability,
        flash3=flash3,
    )


@pytest.mark.parametrize(
    ("kernel", "dtype", "head_dim", "capability", "fits"),
    [
        ("efficient", "float32", 22, "8.0", False),
        ("efficient", "float32", 22, "9.0", False),
        ("efficient", "float32", 24, "8.0", True),
        ("efficient", "float32", 44, "9.0", True),
        ("efficient", "float32", 22, "7.5", True),
        ("efficient", "float32", 22, "", False),
        ("efficient", "bfloat16", 44, "9.0", False),
        ("efficient", "bfloat16", 48, "9.0", True),
        ("efficient", "bfloat16", 48, "7.5", False),
        ("flash", "float32", 64, "9.0", False),
        ("flash", "bfloat16", 22, "9.0", True),
        ("flash", "bfloat16", 64, "7.0", False),
        ("flash", "bfloat16", 256, "8.9", True),
        ("flash", "bfloat16", 258, "9.0", False),
        ("flash", "bfloat16", 208, "9.0", True),
        ("flash", "bfloat16", 208, "8.9", False),
        ("flash", "bfloat16", 208, "12.0", False),
        ("flash", "bfloat16", 208, "", False),
        ("flash", "bfloat16", 192, "8.6", True),
        ("math", "bfloat16", 1022, "7.0", True),
    ],
)
def test_a_card_has_the_kernels_that_torch_has_for_it(
    kernel: Kernel, dtype: str, head_dim: int, capability: str, fits: bool
) -> None:
    """By dtype, width of a head and compute capability; a card that is not known gets the strictest rule."""
    assert (not reason(kernel, head_dim, dtype, capability)) is fits


@pytest.mark.parametrize(
    ("dtype", "device_kind", "capability", "build", "why"),
    [
        ("bfloat16", "cuda", "9.0", "3.0 ab", ""),
        ("bfloat16", "cuda", "9.0", "", "its machine has no package flash_attn_3, which has to be built for torch's"),
        ("bfloat16", "cuda", "8.9", "3.0 ab", "it needs a card of compute capability 9.x, and this one has 8.9"),
        ("bfloat16", "cuda", "10.0", "3.0 ab", "it needs a card of compute capability 9.x, and this one has 10.0"),
        ("bfloat16", "cuda", "", "3.0 ab", "it needs a card of compute capability 9.x, and this one has none that is"),
        ("bfloat16", "cpu", "", "", "a CPU has no FlashAttention 3"),
        ("float32", "cuda", "9.0", "3.0 ab", "on a card it takes bfloat16 only, and the job's dtype is float32"),
    ],
)
def test_flash3_needs_a_hopper_card_and_a_package(
    dtype: str, device_kind: str, capability: str, build: str, why: str
) -> None:
    """And what `flash` needs too."""
    found = reason("flash3", 64, dtype, capability, device_kind, build)
    assert found.startswith(why)
    assert bool(found) is bool(why)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [2, 22, 64, 258])
def test_this_cpu_agrees_with_the_rules(dtype: str, head_dim: int) -> None:
    """Forward and backward run with the one kernel where the rule says so, and torch refuses it elsewhere."""
    heads = torch.randn(1, 2, 5, head_dim, dtype=getattr(torch, dtype), requires_grad=True)
    named: dict[Kernel, SDPBackend] = {
        "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH
    }  # fmt: skip
    for kernel, backend in named.items():
        runs = True
        try:
            with sdpa_kernel(backend):
                mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
                torch.autograd.grad(mixed.sum(), heads)
        except RuntimeError:
            runs = False
        assert (not reason(kernel, head_dim, dtype, "", "cpu")) is runs, kernel
