"""Says why torch finds no CUDA device, or has no code for one: its build, a variable that hides the cards, the driver.

`python -m headway.stages.no_card` says so after `make setup` on a machine that has a card's driver.
"""

import os
import re
import sys
from collections.abc import Iterable
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
    if torch.version.hip is not None:
        return f"torch is built for ROCm {torch.version.hip}, and finds no device; `rocminfo` shows driver and cards"
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


def remark_after_setup(num_cards: int) -> str:
    """Return why torch finds none of the cards whose driver is here; empty: it finds some, or no driver is here."""
    return "" if num_cards or not _driver() else why_no_card()


def why_no_code(capability: tuple[int, int], built_for: Iterable[str]) -> str:
    """Return why a build of torch has no code for a card that it finds, for people; empty: it has.

    built_for: as `torch.cuda.get_arch_list()`. Code for `sm_86` also runs on later cards of capability 8.x, code for
    `compute_90` on all later ones.
    """
    known = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", each) for each in built_for]
    for kind, major, minor, only in (found.groups() for found in known if found):
        least = int(major), int(minor)
        is_alike = capability[0] == least[0] or (kind == "compute" and not only)
        if least <= capability and is_alike and (only != "a" or least == capability):
            return ""
    major, minor = capability
    needed = "CUDA 12.8 or newer, such as PyPI's" if major >= 10 else f"CUDA 12, from {_BUILDS}/{_INDICES[12]}"
    return f"this build of torch has no code for compute capability {major}.{minor}; it takes one for {needed}"


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


if __name__ == "__main__" and (remark := remark_after_setup(torch.cuda.device_count())):
    sys.stderr.write(f"This machine has a card, and {remark}\n")
