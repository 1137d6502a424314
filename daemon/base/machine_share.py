"""What this process may take of its machine: memory, cores, and a folder in memory. Containers leave it less.

They limit it by cgroups 1 or 2. A limit counts for its group and for all groups inside it, so the smallest one on the
way up holds. A container often sees its own group alone, at the top of what is mounted.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

LEAST_SHARE: Final = 0.25
"""Part of the memory that a folder in memory has to hold: a usual one holds half, that of a container often 64 MB."""
_FOLDERS: Final = ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"))
_ROOT: Final = Path("/")


def memory_bytes() -> int:
    """Return the memory of the machine, or the part of it that a container leaves this process."""
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine_bytes, memory_limit_bytes() or machine_bytes)


def folder_in_memory() -> Path | None:
    """Return a folder in memory with room for layer files, where this user may write; None: there is none."""
    for folder in map(Path, _FOLDERS):
        if os.access(folder, os.W_OK | os.X_OK) and shutil.disk_usage(folder).total >= LEAST_SHARE * memory_bytes():
            return folder
    return None


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """Return the least memory that a group of this process may take; None: no limit is seen."""
    texts = _settings("memory", "memory.max", "memory.limit_in_bytes", root)
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def num_memory_kills(root: Path = _ROOT) -> int:
    """Return how many processes of this process's group the kernel has killed for lack of memory; 0: none is seen."""
    for text in _settings("memory", "memory.events", "memory.oom_control", root):
        told = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
        return int(told.get("oom_kill", 0))
    return 0


def num_cores(root: Path = _ROOT) -> float:
    """Return how many cores this process may keep busy: those that it may run on, or the time that it gets of them."""
    shares = [float(len(os.sched_getaffinity(0)))]
    for text in _settings("cpu", "cpu.max", "cpu.cfs_quota_us", root):
        with suppress(ValueError):  # `max`: no limit
            quota_us, period_us = map(int, text.split())
            if quota_us > 0 and period_us > 0:
                shares.append(quota_us / period_us)
    return min(shares)


def _settings(controller: str, of_v2: str, of_v1: str, root: Path) -> Iterator[str]:
    """Yield a setting's text in each group of this process. The period of cgroups 1 follows its quota, as in 2."""
    for folder, is_v2 in _groups(controller, root):
        with suppress(OSError):
            text = (folder / (of_v2 if is_v2 else of_v1)).read_text().strip()
            if of_v1 == "cpu.cfs_quota_us" and not is_v2:
                text += " " + (folder / "cpu.cfs_period_us").read_text().strip()
            yield text


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each group that this process is in, inner ones first, and whether it is one of cgroups 2."""
    try:
        entries = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    own = {name: path for _, controllers, path in entries for name in controllers.split(",")}
    for mount in mounts:
        place, _, kind = mount.partition(" - ")
        top, folder = place.split()[3:5]
        is_v2 = kind.startswith("cgroup2 ")
        is_v1 = kind.startswith("cgroup ") and controller in kind.split()[-1].split(",")
        path = own.get("" if is_v2 else controller)
        if path is None or not (is_v1 or is_v2):
            continue
        inside = PurePosixPath(path)
        # A mount that lies elsewhere shows this process's group as its top.
        inside = inside.relative_to(top) if inside.is_relative_to(top) and ".." not in inside.parts else PurePosixPath()
        for group in (inside, *inside.parents):
            yield root / folder.lstrip("/") / group, is_v2
