"""Compares the resources of processes while a cluster runs, and what is left on the machine after its stop."""

import asyncio
import gc
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from headway.daemon.local.injector import LocalTargets, Process
from tests.chaos.checker import Sample

PROC, IN_MEMORY = Path("/proc"), Path("/dev/shm")
INTERVAL_S = 1.0
GONE_TIMEOUT_S = 10.0


async def sample_for_ever(targets: LocalTargets, samples: list[Sample]) -> None:
    """Adds a sample of every process and every store about once a second, until cancelled."""
    while True:
        samples += await asyncio.to_thread(_samples, targets)
        await asyncio.sleep(INTERVAL_S)


def _samples(targets: LocalTargets) -> list[Sample]:
    at = time.monotonic()
    found = []
    for name, daemon in targets.daemons().items():
        for process in (daemon, *targets.workers(name)):
            if amounts := _amounts(process):
                found.append(Sample(at=at, subject=f"{process.name} (pid {process.pid})", amounts=amounts))
        if (store := daemon.flag("store-dir")) is not None:
            num_files = sum(len(names) for _, _, names in os.walk(store))
            found.append(Sample(at=at, subject=f"store of {name}", amounts={"files": num_files}))
    return found


def _amounts(process: Process) -> dict[str, int]:
    folder = PROC / str(process.pid)
    try:
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        num_fds = len(list((folder / "fd").iterdir()))
    except OSError:
        return {}
    if "VmRSS" not in fields:
        return {}  # dead, and not yet waited for
    return {"fds": num_fds, "threads": int(fields["Threads"]), "rss_bytes": int(fields["VmRSS"].split()[0]) << 10}


class Residue:
    """The state of the machine before the cluster, so that new objects can be found afterwards."""

    def __init__(self, folder: Path) -> None:
        """folder: of the cluster that is about to start in this process."""
        self._marks = (f"headway-{os.getpid()}-", str(folder))
        self._before = self._things()
        self._files = _open_files()

    async def found(self) -> list[str]:
        """Sentences about everything that a stopped cluster has left, after some time to go away."""
        deadline = time.monotonic() + GONE_TIMEOUT_S
        while (left := self._left()) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return left

    def _left(self) -> list[str]:
        gc.collect()  # what nobody holds any more is no leak, though a cycle keeps its files open for a while
        sentences = [f"{thing} is left" for thing in sorted(self._things() - self._before)]
        new = _open_files() - self._files  # a number that was closed and taken again counts as well
        if len(_open_files()) > len(self._files):
            kinds = ", ".join(sorted(what for _, what in new))
            sentences.append(f"more files are open in this process than before the cluster, of these: {kinds}")
        return sentences

    def _things(self) -> set[str]:
        """Folders in memory and for temporary files, and living processes, that are this process's or the cluster's."""
        parents = (IN_MEMORY, Path(tempfile.gettempdir()))
        found = {str(path) for parent in parents for path in parent.glob(f"{self._marks[0]}*")}
        for entry in PROC.iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state not in "ZX" and any(mark in command for mark in self._marks):
                found.add(f"process {entry.name} ({command[:160]})")
        return found


def _open_files() -> set[tuple[str, str]]:
    """(number, what it is) of every open file of this process."""
    found = set()
    for entry in (PROC / "self" / "fd").iterdir():
        with suppress(OSError):
            found.add((entry.name, str(entry.readlink())))
    return found
