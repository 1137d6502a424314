"""Makes arithmetic repeatable in one process, and names the hardware that gives equal bits."""

import os
from importlib.metadata import version

import torch

from headway.stages.spec import TrainSpec


def configure(train: TrainSpec, device: torch.device) -> None:
    """Fix this process's threads, algorithms and precision as the job requires. Call it before the first CUDA
    operation.
    """
    torch.set_num_threads(train.threads)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if train.compile:
        torch.use_deterministic_algorithms(True)
    else:
        torch.set_deterministic_debug_mode("error")  # this sets the mode without importing the compiler
    # Deterministic mode would also fill every new buffer with NaN first. We read no buffer before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # TF32 concerns CUDA: on a CPU "high" may mean sums of bfloat16 products.
    torch.set_float32_matmul_precision("high" if train.allow_tf32 and device.type == "cuda" else "highest")


# Libraries below torch also read these when they choose a kernel and its blocking.
_CPU_FEATURES = ("avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16", "amx_fp16")


def arithmetic_class(device: torch.device) -> str:
    """Return a string; equal strings give equal bits: versions of torch, numpy (initial weights) and Headway, and
    hardware.
    """
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    versions = f"torch {torch.__version__}, numpy {version('numpy')}, headway {version('headway')}"
    return f"{versions}, {hardware}"


def _cpu() -> str:
    found = torch.cpu.get_capabilities()
    features = [name for name in _CPU_FEATURES if found.get(name)]
    cache_kib = int(found.get("l2_cache_size", 0)) // 1024
    name = found.get("cpu_name") or found.get("architecture", "cpu")
    return " ".join([f"{name}, {torch.backends.cpu.get_cpu_capability()}", *features, f"L2 {cache_kib} KiB"])
