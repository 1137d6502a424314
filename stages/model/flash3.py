"""`attention_backend = "flash3"`: FlashAttention 3 in place of torch's flash kernel, on cards of capability 9.x.

Its kernels are in a package beside torch, which people build themselves. There have been builds whose backward drops
the wish for repeatable sums (flash-attention, pull request 1766). So a process compares bits before a job computes with
it, and the build is part of the job's arithmetic class.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from typing import Final

import torch
from torch import Tensor
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from headway.stages.errors import KernelError
from headway.stages.spec import ModelSpec, TrainSpec

PACKAGE: Final = "flash_attn_3"
_TIMES: Final = 4
"""Times that each way of computing is compared with the first: sums in no order differ within a few."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values [microbatch, heads, sequence, head_dim] → what attention mixes, like the queries."""


def installed_build() -> str:
    """Return the version of the package, and what names its files; empty: it is not installed."""
    try:
        found = distribution(PACKAGE)
    except PackageNotFoundError:
        return ""
    return f"{found.version} {build_digest(found.read_text('RECORD') or '')}"


def build_digest(record: str) -> str:
    """Return what names the files that an installer has listed: builds of one version differ."""
    lines = (line for line in record.splitlines() if "sha256=" in line and ".dist-info/" not in line)
    return sha256("\n".join(sorted(lines)).encode()).hexdigest()[:12]


def choose_flash(model: ModelSpec, train: TrainSpec, device: torch.device) -> None:
    """Make this process's flash kernel that of the job: FlashAttention 3, or torch's own. Raises KernelError."""
    is_third = attention.current_flash_attention_impl() == "FA3"
    if train.attention_backend != "flash3":
        if is_third:
            attention.restore_flash_attention_impl()
        return
    if device.type != "cuda":
        raise KernelError("flash3 is for cards of compute capability 9.x alone; set it to auto")
    if not is_third:
        try:
            attention.activate_flash_attention_impl("FA3")
        except (ImportError, RuntimeError) as error:
            first = str(error).partition("\n")[0]
            raise KernelError(f"flash3 needs the package {PACKAGE}: {first}; install it, or set flash") from error
    heads = {(model.head_width_of(block), model.key_value_heads_of(block)) for block in range(model.num_hidden_layers)}
    for width, num_keys in sorted(heads):
        shapes = (model.num_attention_heads, num_keys, train.sequence_length, width)
        _check(train.microbatch_size, shapes, getattr(torch, train.dtype), device)


@lru_cache(maxsize=64)
def _check(rows: int, shapes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Raise KernelError unless the kernel repeats its bits for these shapes."""
    num_heads, num_keys, length, width = shapes
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn((rows, heads, length, width), generator=generator, dtype=dtype, device=device)
        for heads in (num_heads, num_keys, num_keys)
    )
    attend = partial(functional.scaled_dot_product_attention, is_causal=True, enable_gqa=num_keys < num_heads)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            differs = what_differs(attend, query, key, value)
    except RuntimeError as error:
        raise KernelError(f"flash3 fails on this card: {str(error).partition(chr(10))[0]}; set flash") from error
    if differs:
        raise KernelError(f"this build of flash3 does not repeat its bits here ({differs}); set flash")


def what_differs(attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> str:
    """Return what of equal attentions has other bits, also of one that its backward computes again; empty: nothing."""

    def again(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed: Tensor = checkpoint(attend, query, key, value, use_reentrant=False, preserve_rng_state=False)
        return mixed

    first = _run(attend, query, key, value)
    for compute in (attend, again) * _TIMES:
        for name, one, other in zip(_RESULTS, first, _run(compute, query, key, value), strict=True):
            if not torch.equal(one, other):
                return name
    return ""


_RESULTS: Final = ("the output", "the gradient of queries", "the gradient of keys", "the gradient of values")


def _run(attend: Attend, *heads: Tensor) -> tuple[Tensor, ...]:
    leaves = [each.detach().requires_grad_() for each in heads]
    mixed = attend(*leaves)
    return mixed.detach(), *torch.autograd.grad(mixed, leaves, heads[0])
