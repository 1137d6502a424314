"""Says which of torch's kernels of attention a device has for a job's heads and dtype. Pure, without torch.

The rules are those of torch 2.13 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). With one kernel named, torch
takes no other in its place, so a wrong choice ends the worker.
"""

from typing import Final, Literal, Protocol

from headway.stages.spec import ModelSpec, TrainSpec

Kernel = Literal["flash", "flash3", "efficient", "math"]

FASTEST_FIRST: Final[tuple[Kernel, ...]] = ("flash", "efficient", "math")
"""What `auto` chooses from. `flash3` has to be named: its package is not torch's."""

_AMPERE: Final = (8, 0)
_LARGEST_FLASH_HEAD: Final = 256


class KernelDevice(Protocol):
    """What decides which kernels a device has."""

    @property
    def kind(self) -> str:
        """Return `cpu` or `cuda`."""

    @property
    def capability(self) -> str:
        """Return the compute capability of a CUDA device, such as `9.0`; empty: not known."""

    @property
    def flash3(self) -> str:
        """Return the build of FlashAttention 3 that the device has; empty: none."""


def computes_bfloat16(device: KernelDevice) -> bool:
    """Return whether a device is a card with products in bfloat16. One that does not say its capability may be none."""
    compute = _numbers(device.capability)
    return device.kind == "cuda" and compute is not None and compute >= _AMPERE


def why_not(
    kernel: Kernel, model: ModelSpec, train: TrainSpec, *, device_kind: str, capability: str = "", flash3: str = ""
) -> str:
    """Return why a device has no such kernel for a job; empty: it has one.

    capability: of a CUDA device, such as "9.0"; empty: not known, and it counts as Ampere or newer. flash3: as in
    KernelDevice.
    """
    if kernel == "math":
        return ""
    if model.attn_logit_softcapping:
        return "it has no attn_logit_softcapping"
    if model.attention_sinks and device_kind != "cpu":
        return "on a card it has no attention_sinks"
    if kernel == "flash3" and (why := why_no_flash3(device_kind, capability, flash3)):
        return why
    if device_kind != "cuda":
        return "" if kernel == "flash" else "a CPU has no memory-efficient kernel"
    compute = _numbers(capability)
    if train.dtype == "bfloat16" and compute is not None and compute < _AMPERE:
        return f"in bfloat16 it needs a card of compute capability 8.0 or newer, and this one has {capability}"
    is_flash = kernel in ("flash", "flash3")
    if is_flash and train.separates_documents:
        return "on a card it takes no mask, which separate documents need"
    if is_flash and 0 < model.sliding_window < train.sequence_length:
        return "on a card it takes no sliding window that is shorter than a sequence"
    why_not_head = _why_not_efficient if kernel == "efficient" else _why_not_flash
    widths = {model.head_width_of(block) for block in range(len(model.layer_types) or 1)}
    return next(filter(None, (why_not_head(width, train.dtype, compute) for width in sorted(widths))), "")


def why_no_flash3(device_kind: str, capability: str, build: str) -> str:
    """Return why a device has no FlashAttention 3; empty: it has the given build."""
    if device_kind != "cuda":
        return "a CPU has no FlashAttention 3"
    compute = _numbers(capability)
    if compute is None or compute[0] != 9:
        return f"it needs a card of compute capability 9.x, and this one has {capability or 'none that is known'}"
    return "" if build else "its machine has no package flash_attn_3, which has to be built for torch's release"


def _why_not_efficient(head_dim: int, dtype: str, compute: tuple[int, int] | None) -> str:
    is_any_width = dtype == "float32" and compute is not None and compute < _AMPERE
    multiple = 8 if dtype == "bfloat16" else 4
    if head_dim % multiple and not is_any_width:
        return f"on a card in {dtype} it needs heads of a multiple of {multiple}, and these have {head_dim}"
    return ""


def _why_not_flash(head_dim: int, dtype: str, compute: tuple[int, int] | None) -> str:
    if dtype == "float32":
        return "on a card it takes bfloat16 only, and the job's dtype is float32"
    if head_dim > _LARGEST_FLASH_HEAD:
        return f"on a card it takes heads up to {_LARGEST_FLASH_HEAD}, and these have {head_dim}"
    # Its backward pass needs more shared memory than these cards have. A card that is not known may be one of them.
    is_small = compute is None or (8, 6) <= compute <= (8, 9) or compute[0] == 12
    if is_small and 192 < head_dim <= 224:
        return f"a card of compute capability 8.6 to 8.9 or 12 has no backward pass for heads of {head_dim}"
    return ""


def _numbers(capability: str) -> tuple[int, int] | None:
    major, _, minor = capability.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
