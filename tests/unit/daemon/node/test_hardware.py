"""What a node finds in its machine: each card with its own name, memory and arithmetic class."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headway.daemon.base.errors import ConfigError
from headway.daemon.client import doctor as doctor
from headway.daemon.node.hardware import class_of, find_devices
from headway.stages import no_card
from headway.stages.no_card import remark_after_setup, why_no_card, why_no_code

GIB = 1 << 30
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models of the machine's cards: torch answers as if they were there."""
    models = [H100, A100, H100]

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(name=models[index], total_memory=80 * GIB, major=9, minor=0)

    def name(device: torch.device) -> str:
        return models[device.index or 0]  # torch takes the current device where no index is given

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(models))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", name)
    return models


def test_unlike_cards_of_one_node_have_their_own_classes(cards: list[str]) -> None:
    """Two models, two classes, each with its card's name; equal cards have equal ones."""
    first, second, third = find_devices("auto", 0)
    assert [device.model for device in (first, second, third)] == cards
    assert first.arithmetic_class == third.arithmetic_class != second.arithmetic_class
    assert H100 in first.arithmetic_class
    assert A100 in second.arithmetic_class


def test_a_node_of_unlike_cards_has_no_class_of_another_node(cards: list[str]) -> None:
    """A leader that reads only the node's class takes it for equal to neither kind of node."""
    mixed = find_devices("auto", 0)
    assert class_of(mixed) not in {device.arithmetic_class for device in mixed}
    assert class_of(mixed[:1]) == mixed[0].arithmetic_class


def test_nodes_that_share_a_card_share_its_memory(cards: list[str]) -> None:
    """Each plans with its part, and says with how many it shares; a card's compute capability is in the record."""
    (device,) = find_devices("cuda", 1, num_sharers=4)
    assert (device.memory_bytes, device.num_sharers, device.capability) == (20 * GIB, 4, "9.0")
    (whole,) = find_devices("cuda", 1)
    assert (whole.memory_bytes, whole.num_sharers) == (80 * GIB, 1)


@pytest.mark.parametrize(
    ("num_sharers", "reserve_gib", "reserved"),
    [
        (1, None, GIB + round(0.04 * 80 * GIB)),
        (4, None, GIB + round(0.04 * 20 * GIB)),
        (1, 6.5, round(6.5 * GIB)),
        (4, 6.5, round(6.5 * GIB)),
        (1, 0.0, 0),
        (1, 100.0, 80 * GIB - 1),
    ],
)
def test_a_card_keeps_its_reserve(cards: list[str], num_sharers: int, reserve_gib: float | None, reserved: int) -> None:
    """1 GiB and 4 % of what the node has of the card, or as the settings say, and never all of it."""
    for device in find_devices("cuda", 0, num_sharers=num_sharers, reserve_gib=reserve_gib):
        assert device.reserve_bytes == reserved
        assert device.usable_bytes == 80 * GIB // num_sharers - reserved


def test_a_cpu_keeps_no_reserve() -> None:
    """Its memory is the machine's, and the setting is about cards."""
    (device,) = find_devices("cpu", 1, reserve_gib=6.5)
    assert (device.reserve_bytes, device.usable_bytes) == (0, device.memory_bytes)


def test_workers_on_the_cpu_share_its_class_and_its_memory() -> None:
    """Each has its part of the machine's memory."""
    one, other = find_devices("cpu", 2)
    assert one.arithmetic_class == other.arithmetic_class == class_of((one, other)) != ""
    assert find_devices("cpu", 1)[0].memory_bytes // 2 == one.memory_bytes


INDEX = "`pip install --force-reinstall --index-url https://download.pytorch.org/whl/{} torch==2.13.0`"


@pytest.mark.parametrize(
    ("cuda", "driver", "why"),
    [
        ("13.0", "580.159", "torch is built for CUDA 13.0, and finds no device; `nvidia-smi` shows driver and cards"),
        (
            "13.0",
            "550.54.14",
            "torch is built for CUDA 13.0, which needs driver 580, and this one is 550.54.14: a newer driver, or "
            f"another build: {INDEX.format('cu126')}",
        ),
        (
            "12.6",
            "470.82.01",
            "torch is built for CUDA 12.6, which needs driver 525, and this one is 470.82.01: a newer driver, or "
            "another build",
        ),
        (None, "535.1", f"torch is built without CUDA; a card needs a build with it: {INDEX.format('cu126')}"),
        (None, "590.1", f"torch is built without CUDA; a card needs a build with it: {INDEX.format('cu130')}"),
    ],
)
@pytest.mark.parametrize("what", ["NVIDIA UNIX x86_64 Kernel Module", "NVIDIA UNIX Open Kernel Module for x86_64"])
def test_a_driver_that_is_too_old_is_named_with_a_build_for_it(
    cuda: str | None, driver: str, why: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds of the driver tell their version, and `doctor` the index of pytorch.org that has a build for it."""
    told = tmp_path / "version"
    told.write_text(f"NVRM version: {what}  {driver}  Release Build\nGCC version:  gcc version 12.3.0\n")
    monkeypatch.setattr(no_card, "DRIVER_VERSION", told)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.__version__", "2.13.0+x")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert why_no_card() == why


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
CUDA_12 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
ELSEWHERE = "this build of torch has no code for compute capability {}; it takes one for CUDA {}"
FROM_12, FROM_13 = "12, from https://download.pytorch.org/whl/cu126", "12.8 or newer, such as PyPI's"


@pytest.mark.parametrize(
    ("card", "capability", "archs", "why"),
    [
        ("V100", (7, 0), CUDA_13, ELSEWHERE.format("7.0", FROM_12)),
        ("V100", (7, 0), CUDA_12, ""),
        ("RTX 4090", (8, 9), CUDA_13, ""),
        ("H100", (9, 0), ["sm_90a"], ""),
        ("B200", (10, 0), CUDA_12, ELSEWHERE.format("10.0", FROM_13)),
        ("B300", (10, 3), CUDA_13, ""),
        ("RTX 5090", (12, 0), CUDA_12, ELSEWHERE.format("12.0", FROM_13)),
        ("RTX 5090", (12, 0), [*CUDA_12, "compute_90"], ""),
        ("a later one", (12, 1), ["sm_120a"], ELSEWHERE.format("12.1", FROM_13)),
    ],
)
def test_a_build_without_code_for_a_card_is_named(
    card: str, capability: tuple[int, int], archs: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch finds such a card, and fails at its first operation: `doctor` says so before."""
    assert why_no_code(capability, archs) == why
    major, minor = capability
    found = SimpleNamespace(name=card, major=major, minor=minor)
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: archs)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: found)
    of_flash3 = " (flash3: its machine has no package flash_attn_3, which has to be built for torch's release)"
    assert doctor._torch().endswith(f"{card} ({why})" if why else card + of_flash3 * (major == 9))


def test_setup_says_what_hides_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver and no device → the reason; cards that torch finds, or no driver → nothing; ROCm is no missing CUDA."""
    told = tmp_path / "version"
    told.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu\n")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(no_card, "DRIVER_VERSION", told)
    assert "needs driver 580, and this one is 550.54.14" in remark_after_setup(0)
    assert remark_after_setup(1) == ""
    monkeypatch.setattr("torch.version.hip", "6.4")
    assert why_no_card().startswith("torch is built for ROCm 6.4, and finds no device")
    monkeypatch.setattr(no_card, "DRIVER_VERSION", tmp_path / "none")
    assert remark_after_setup(0) == ""


@pytest.mark.parametrize(
    ("cuda", "visible", "why"),
    [
        (None, "0", "torch is built without CUDA; a card needs a build with it"),
        ("12.8", "", "CUDA_VISIBLE_DEVICES is ''"),
        ("12.8", None, "torch is built for CUDA 12.8, and finds no device; `nvidia-smi` shows driver and cards"),
    ],
)
def test_why_there_is_no_card(cuda: str | None, visible: str | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build, the variable that hides cards, or the driver: `doctor` and `devices = "cuda"` name it."""
    monkeypatch.setattr(no_card, "DRIVER_VERSION", Path("/nothing/version"))
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert why_no_card() == why
    assert f"CPU only: {why}" in doctor._torch()
    with pytest.raises(ConfigError) as error:
        find_devices("cuda", 0)
    assert str(error.value) == f"devices: no CUDA device here: {why}; or say `cpu` or `auto`"
