"""Says why torch finds no CUDA device: its build, a variable that hides the cards, or the driver."""

import os
import re
from pathlib import Path
from typing import Final

import torch

DRIVER_VERSION: Final = Path("/proc/driver/nvidia/version")
LEAST_DRIVERS: Final = {13: 580, 12: 525}
"""The oldest driver of a CUDA release, by NVIDIA's table of compatibility."""
_BUILDS: Final = "https://download.pytorch.org/whl"
_INDICES: Final = {13: "cu130", 12: "cu126"}


def why_no_card() -> str:
    """Return why torch finds no CUDA device, for people."""
    driver = _driver()
    if torch.version.cuda is None:
        return f"torch is built without CUDA; a card needs a build with it{_from_index(driver)}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES is {hidden!r}"
    least = LEAST_DRIVERS.get(int(torch.version.cuda.partition(".")[0]), 0)
    if driver and int(driver.partition(".")[0]) < least:
        needs = f"torch is built for CUDA {torch.version.cuda}, which needs driver {least}, and this one is {driver}"
        return f"{needs}: a newer driver, or another build{_from_index(driver)}"
    return f"torch is built for CUDA {torch.version.cuda}, and finds no device; `nvidia-smi` shows driver and cards"


def _driver() -> str:
    """Return the version of NVIDIA's driver; empty: none is loaded."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(\.\d+)+)\s", DRIVER_VERSION.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _from_index(driver: str) -> str:
    """Return how to get a build that a driver can run; empty: nobody knows."""
    release = next((cuda for cuda, least in LEAST_DRIVERS.items() if driver and int(driver.split(".")[0]) >= least), 0)
    if not release:
        return ""
    version = torch.__version__.partition("+")[0]
    return f": `pip install --force-reinstall --index-url {_BUILDS}/{_INDICES[release]} torch=={version}`"
