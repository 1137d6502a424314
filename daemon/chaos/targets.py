"""The processes and files of a local cluster that faults can hit, found below the process that started the cluster.

Only processes that were just found there are signalled: a daemon is a child of the cluster's process, a worker is a
child of a daemon. A process with a reused number is neither.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headway.daemon.client.cluster_access import CLUSTER_FILE, read_cluster_file
from headway.daemon.errors import ConfigError

PROC = Path("/proc")
LAYER_FILES = "*.safetensors"


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the cluster."""

    name: str
    """`node-2` for its daemon, `worker of node-2`, `etcd`."""
    pid: int
    arguments: tuple[str, ...] = ()

    def flag(self, name: str) -> str | None:
        """Return the value of `--name=value` among its arguments."""
        start = f"--{name}="
        return next((word.removeprefix(start) for word in self.arguments if word.startswith(start)), None)


class LocalTargets:
    """The processes and files of the cluster that a process of this machine runs."""

    def __init__(self, cluster_pid: int) -> None:
        """cluster_pid: as in `cluster.json`. Raises ConfigError when this user may not signal the cluster's
        processes.
        """
        self._cluster_pid = cluster_pid
        if not self.daemons():
            raise ConfigError("has no daemon that this user may signal", f"the cluster of process {cluster_pid}")

    @classmethod
    def of(cls, state_dir: Path) -> Self:
        """Return the targets of the cluster on a state folder. Raises ConfigError."""
        if (found := read_cluster_file(state_dir)) is None:
            raise ConfigError("there is none: no cluster runs here", str(state_dir / CLUSTER_FILE))
        return cls(found.pid)

    def daemons(self) -> dict[str, Process]:
        """Return node name to daemon."""
        found = {}
        for pid in _children(self._cluster_pid):
            arguments = _arguments(pid)
            process = Process("", pid, arguments)
            name = process.flag("name")
            if name is not None and "daemon" in arguments:
                found[name] = Process(name, pid, arguments)
        return dict(sorted(found.items()))

    def etcd(self) -> Process | None:
        """Return the cluster's etcd."""
        for pid in _children(self._cluster_pid):
            process = Process("etcd", pid, _arguments(pid))
            if process.flag("listen-client-urls") is not None:
                return process
        return None

    def workers(self, node: str) -> list[Process]:
        """Return the workers of a node, with spares, oldest first."""
        daemon = self.daemons().get(node)
        if daemon is None:
            return []
        found = [Process(f"worker of {node}", pid, _arguments(pid)) for pid in sorted(_children(daemon.pid))]
        return [process for process in found if any("headway.daemon.worker" in word for word in process.arguments)]

    def layer_files(self) -> list[Path]:
        """Return the finished layer files of all nodes' stores, in order of their names."""
        found = []
        for daemon in self.daemons().values():
            if (folder := daemon.flag("store-dir")) is not None:
                found += sorted(Path(folder).rglob(LAYER_FILES))
        return found

    def checkpoint_folder(self, checkpoint_dir: str) -> Path | None:
        """Return a job's checkpoint folder on this machine; None: it lies elsewhere."""
        roots = [root for daemon in self.daemons().values() if (root := daemon.flag("checkpoint-root")) is not None]
        if "://" in checkpoint_dir or not (roots or Path(checkpoint_dir).is_absolute()):
            return None
        return Path(*roots[:1], checkpoint_dir)


def _children(parent: int) -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit() and _parent(entry) == parent]


def _parent(entry: Path) -> int | None:
    """Return the parent of a process; None when it is gone, or dead and not yet waited for."""
    try:
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return int(parent) if state not in "ZX" else None


def _arguments(pid: int) -> tuple[str, ...]:
    try:
        return tuple((PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
    except OSError:
        return ()
