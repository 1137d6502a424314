"""What makes arithmetic repeatable in one process, and the name of the hardware that gives equal bits."""

import os
from importlib.metadata import version

import torch

from headway.stages.spec import TrainSpec


def configure(train: TrainSpec, device: torch.device) -> None:
    """Fix this process's threads, algorithms and precision as the job says. Call it before the first CUDA operation."""
    torch.set_num_threads(train.threads)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # Deterministic mode would also fill every new buffer with NaN first. We read no buffer before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # TF32 is a matter of CUDA: on a CPU "high" may mean sums of bfloat16 products.
    torch.set_float32_matmul_precision("high" if train.allow_tf32 and device.type == "cuda" else "highest")


def arithmetic_class(device: torch.device) -> str:
    """Equal strings give equal bits: torch's version, Headway's, and the device's model or the CPU's capability."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    return f"torch {torch.__version__}, headway {version('headway')}, {hardware}"
