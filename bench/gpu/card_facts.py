"""What decides a card's speed and is no figure: drivers, libraries, clocks, power, topology, and the errors of cards.

Whatever cannot be asked here has a line that says so.
"""

import importlib.metadata
import shutil
import subprocess
from collections.abc import Sequence
from typing import Final

import torch

NOT_HERE: Final = "not here: "
ASK_S: Final = 20.0
_QUERIES: Final = {
    "driver": "driver_version",
    "clocks": "clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem",
    "power": "power.draw,power.limit,temperature.gpu",
    "throttled": "clocks_throttle_reasons.active",
    "ecc_errors": "ecc.errors.corrected.volatile.total,ecc.errors.uncorrected.volatile.total",
}
CHANGING: Final = ("clocks", "power", "throttled", "ecc_errors", "xid")
"""What is asked again after all probes."""


def card_facts(names: Sequence[str] = ()) -> dict[str, str]:
    """Return all facts, or those of these names; several lines where there are several cards."""
    commands: dict[str, Sequence[str]] = {
        name: ("nvidia-smi", f"--query-gpu=index,{keys}", "--format=csv") for name, keys in _QUERIES.items()
    }
    commands["topology"] = ("nvidia-smi", "topo", "-m")
    commands["xid"] = ("dmesg", "--ctime")
    commands = {name: command for name, command in commands.items() if not names or name in names}
    if shutil.which("nvidia-smi") is None:
        asked = dict.fromkeys(commands, f"{NOT_HERE}no nvidia-smi")
    else:
        asked = {name: said(command) for name, command in commands.items()}
    if "xid" in asked and not asked["xid"].startswith(NOT_HERE):
        errors = [line for line in asked["xid"].splitlines() if "Xid" in line]
        asked["xid"] = "\n".join(errors) or "the kernel's log has none"
    return asked if names else {**asked, **libraries()}


def said(command: Sequence[str]) -> str:
    """Return what a command prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{NOT_HERE}{error}"
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    return done.stdout.strip() if not done.returncode else f"{NOT_HERE}{' '.join([command[0], *last])}"


def libraries() -> dict[str, str]:
    """Return the versions of CUDA's libraries that torch uses."""
    if not torch.version.cuda:
        return dict.fromkeys(("cuda", "nccl", "cudnn", "cublas"), f"{NOT_HERE}torch is built without CUDA")
    nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    cublas = [
        f"{each.name} {each.version}"
        for each in importlib.metadata.distributions()
        if each.name.startswith("nvidia-cublas")
    ]
    return {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "cublas": ", ".join(cublas) or f"{NOT_HERE}no package of it; torch has its own, or the system's",
    }
