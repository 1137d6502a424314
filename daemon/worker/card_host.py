"""What a card wants of the process that uses it: settings of CUDA and torch, and the cores that are near it."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog

from headway.daemon.base.interfaces import NCCL_INTERFACES, interface_addresses, interface_of

log = structlog.get_logger()

MAX_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOC_CONF: Final = "PYTORCH_ALLOC_CONF"
_SETTINGS: Final = {
    # Streams beyond CUDA's own 8 share a queue: a transfer would wait behind one that spins until its peer comes.
    MAX_CONNECTIONS: "32",
    # Freed memory of any size can be used again. Blocks of fixed size leave fragments.
    ALLOC_CONF: "expandable_segments:True",
}
_OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    ALLOC_CONF: ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
}
"""Names by which torch reads a setting too."""

LEAST_CORES: Final = 4
"""A worker that would have fewer near its card keeps all cores."""
SYSFS: Final = Path("/sys")
_TASKS: Final = Path("/proc/self/task")


def card_settings(environment: Mapping[str, str], host: str) -> dict[str, str]:
    """Return additions to the environment of a new worker of a card: they are read before torch is there.

    environment: the process's environment; its own settings stay. host: where others dial the worker; NCCL meets them
    on that interface, and not on the first one that it finds.
    """
    settings = dict(_SETTINGS)
    with suppress(OSError):
        if name := interface_of(host, interface_addresses()):
            settings[NCCL_INTERFACES] = f"={name}"
    return {
        name: value for name, value in settings.items() if not environment.keys() & {name, *_OTHER_NAMES.get(name, ())}
    }


def pci_address(properties: Any) -> str:
    """Return where a card is, as the kernel names it: `0000:1b:00.0`."""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def near_cores(address: str, allowed: frozenset[int], *, sysfs: Path = SYSFS) -> frozenset[int]:
    """Return the cores beside a card's memory controller, of those that this process may use.

    Empty where the kernel does not tell, where all are near, and where fewer than LEAST_CORES are.
    """
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (sysfs / f"devices/system/node/node{node}/cpulist").read_text()
        near = allowed & _cores_in(listed)
    except (OSError, ValueError):  # no such card, a container without it, or node -1: there is one memory
        return frozenset()
    return near if LEAST_CORES <= len(near) < len(allowed) else frozenset()


def move_near(address: str, *, sysfs: Path = SYSFS) -> None:
    """Let all threads of this process run beside a card, and so have their memory there."""
    near = near_cores(address, frozenset(os.sched_getaffinity(0)), sysfs=sysfs)
    if not near:
        return
    for thread in _TASKS.iterdir():
        with suppress(OSError):  # it has ended, or the cgroup has changed
            os.sched_setaffinity(int(thread.name), near)
    log.info("cores_chosen", card=address, cores=len(near))


def _cores_in(listed: str) -> frozenset[int]:
    """Return the numbers of the kernel's form `0-15,32-47`."""
    cores: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
