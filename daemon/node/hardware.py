"""Finds this machine's devices and memory."""

from pathlib import Path
from typing import Literal

import torch

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.machine_share import memory_bytes, num_cores
from headway.daemon.cluster.records import Device
from headway.daemon.plan.devices import cuda_reserve
from headway.stages.attention_kernels import why_no_flash3
from headway.stages.model.determinism import arithmetic_class
from headway.stages.model.flash3 import installed_build
from headway.stages.no_card import why_no_card


def find_devices(
    kind: Literal["auto", "cpu", "cuda"], num_devices: int, *, num_sharers: int = 1, reserve_gib: float | None = None
) -> tuple[Device, ...]:
    """Return one Device per worker. num_devices 0: every CUDA device, or one worker on the CPU.

    num_sharers: number of nodes that share each card; a card's memory is divided among them. reserve_gib: part of
    a card that plans leave free, for each node; None: the default.

    Raises ConfigError when the machine has fewer CUDA devices than requested.
    """
    num_cuda = torch.cuda.device_count() if kind != "cpu" else 0
    if kind == "cuda" and not num_cuda:
        raise ConfigError(f"no CUDA device here: {why_no_card()}; or say `cpu` or `auto`", "devices")
    if not num_cuda:
        model = f"{_cpu_name()} {torch.backends.cpu.get_cpu_capability()}".strip()
        share_bytes = memory_bytes() // max(num_devices, 1)
        name = arithmetic_class(torch.device("cpu"))
        return tuple(
            Device(
                kind="cpu",
                index=index,
                model=model,
                memory_bytes=share_bytes,
                num_cores=num_cores(),
                arithmetic_class=name,
            )
            for index in range(num_devices or 1)
        )
    if num_devices > num_cuda:
        raise ConfigError(f"{num_devices} workers for {num_cuda} CUDA devices", "num_devices")
    return tuple(_cuda_device(index, num_sharers, reserve_gib) for index in range(num_devices or num_cuda))


def class_of(devices: tuple[Device, ...]) -> str:
    """Return the arithmetic class of a node: that of its devices, joined if they are unlike."""
    return " and ".join(sorted({device.arithmetic_class for device in devices}))


def _cpu_name() -> str:
    """Return the kernel's name of the CPU; empty if it has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _cuda_device(index: int, num_sharers: int, reserve_gib: float | None) -> Device:
    properties = torch.cuda.get_device_properties(index)
    share_bytes = properties.total_memory // num_sharers
    capability, build = f"{properties.major}.{properties.minor}", installed_build()
    return Device(
        kind="cuda",
        index=index,
        model=properties.name,
        memory_bytes=share_bytes,
        reserve_bytes=cuda_reserve(share_bytes, reserve_gib),
        arithmetic_class=arithmetic_class(torch.device("cuda", index)),
        capability=capability,
        flash3="" if why_no_flash3("cuda", capability, build) else build,
        num_sharers=num_sharers,
    )
