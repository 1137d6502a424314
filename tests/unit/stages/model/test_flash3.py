"""FlashAttention 3: whether its bits are looked at before they are trusted, and what names a build."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import attention, functional

from headway.stages.errors import KernelError
from headway.stages.model import flash3
from headway.stages.model.flash3 import build_digest, choose_flash, installed_build, what_differs
from headway.stages.spec import ModelSpec, TrainSpec

CARD = torch.device("cuda", 0)
MODEL = ModelSpec()
FLASH, FLASH3 = (TrainSpec(attention_backend=name, dtype="bfloat16") for name in ("flash", "flash3"))
HEADS = torch.randn(3, 2, 2, 9, 8, generator=torch.Generator().manual_seed(1)).unbind()


def kernel(wrong_call: int = 0, *, in_backward: bool = False) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention whose values, or whose gradient of queries, are a little larger in one of its calls."""
    num_calls = 0

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        is_wrong = num_calls == wrong_call
        if is_wrong and in_backward:
            query = query * 1.0
            larger = torch.tensor(9.0)
            query.register_hook(lambda gradient: gradient.nextafter(larger))  # type: ignore[no-untyped-call]
        value = value + (1e-6 if is_wrong and not in_backward else 0.0)
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    return attend


def test_torchs_own_attention_repeats_its_bits() -> None:
    """Forward, backward and attention computed again, on this CPU."""
    assert what_differs(kernel(), *HEADS) == ""


@pytest.mark.parametrize(
    ("wrong_call", "in_backward", "what"),
    [
        (2, False, "the output"),
        (2, True, "the gradient of queries"),
        (5, True, "the gradient of queries"),
        (4, False, "the gradient of queries"),
    ],
)
def test_one_other_bit_is_seen(wrong_call: int, in_backward: bool, what: str) -> None:
    """In a second or a later call; call 4 is the one that a backward makes to compute attention again."""
    assert what_differs(kernel(wrong_call, in_backward=in_backward), *HEADS) == what


def test_builds_of_one_version_have_two_names() -> None:
    """By the digests of their files, in any order; what an installer writes beside them does not count."""
    record = "flash_attn_3/_C.abi3.so,sha256=aa,9\nflash_attn_interface.py,sha256=bb,7\n"
    moved = "flash_attn_interface.py,sha256=bb,7\nflash_attn_3/_C.abi3.so,sha256=aa,9\n"
    beside = "flash_attn_3-3.0.dist-info/INSTALLER,sha256=cc,4\n__pycache__/flash_attn_interface.cpython-311.pyc,,\n"
    assert build_digest(record) == build_digest(moved + beside)
    assert build_digest(record) != build_digest(record.replace("aa", "ab"))


def test_a_machine_without_the_package_has_no_build() -> None:
    """As in this environment."""
    assert installed_build() == ""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch would be told; the kernel itself passes its comparison."""
    told: list[str] = []
    monkeypatch.setattr(flash3, "_check", lambda *_: told.append("compared"))
    monkeypatch.setattr(attention, "activate_flash_attention_impl", told.append)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: told.append("restored"))
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: "FA3" if "FA3" in told else None)
    return told


def test_a_process_has_the_kernel_of_its_present_job(registry: list[str]) -> None:
    """Nothing for `flash`; then FA3, compared before the job computes; a later job with `flash` gets torch's own."""
    choose_flash(MODEL, FLASH, CARD)
    assert registry == []
    choose_flash(MODEL, FLASH3, CARD)
    choose_flash(MODEL, FLASH, CARD)
    assert registry == ["FA3", "compared", "restored"]


def test_each_width_of_heads_is_compared(monkeypatch: pytest.MonkeyPatch, registry: list[str]) -> None:
    """Rows, heads, sequence and width are those of the job."""
    seen: list[object] = []
    monkeypatch.setattr(flash3, "_check", lambda rows, shapes, dtype, _: seen.append((rows, *shapes, dtype)))
    choose_flash(replace(MODEL, num_attention_heads=4, num_key_value_heads=2), FLASH3, CARD)
    width = MODEL.hidden_size // 4
    assert seen == [(FLASH3.microbatch_size, 4, 2, FLASH3.sequence_length, width, torch.bfloat16)]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU, and a machine without the package."""
    with pytest.raises(KernelError, match=r"^train.attention_backend: flash3 is for cards of compute capability 9"):
        choose_flash(MODEL, FLASH3, torch.device("cpu"))

    def fails(_: str) -> None:
        raise ModuleNotFoundError("No module named 'flash_attn_interface'")

    monkeypatch.setattr(attention, "activate_flash_attention_impl", fails)
    with pytest.raises(KernelError, match=r"needs the package flash_attn_3: No module .*; install it, or set flash$"):
        choose_flash(MODEL, FLASH3, CARD)


def test_a_build_that_does_not_repeat_its_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is that of the job's shapes, and its answer is one line."""
    monkeypatch.setattr(flash3, "what_differs", lambda *_: "the gradient of keys")
    with pytest.raises(KernelError, match=r"does not repeat its bits here \(the gradient of keys\); set flash"):
        flash3._check(1, (2, 1, 16, 8), torch.float32, torch.device("cpu"))
