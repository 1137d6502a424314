"""A node's memory across restarts: its last incarnation and the highest generation it saw of each job.

Generations are kept by name, and by submission: see NodeRecord.generations. A job that etcd no longer has may come back
with a backup. So the newest such jobs are remembered, and no others: a node whose etcd went back writes them to its
record.
"""

import fcntl
import json
import os
import shlex
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from headway.daemon.base.errors import ConfigError, InvariantLostError
from headway.stages.sockets.open_files import ReservedFiles

NUM_JOBS_REMEMBERED: Final = 100
"""Number of names remembered, in addition to those that etcd has."""
NUM_SUBMISSIONS_REMEMBERED: Final = 4
"""Number of submissions of one name remembered, in addition to those that etcd has."""
GENERATIONS_FILE = "generations.json"
INCARNATION_FILE = "incarnation"
LOCK_FILE = "daemon.lock"


class NodeMemory:
    """The state folder of one daemon, locked for as long as it is open. One thread at a time may use it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = -1
        self._reserve = ReservedFiles(0)
        self.generations: dict[str, int] = {}
        """Highest generations; the last that rose comes last."""
        self.last_incarnation = ""

    def open(self) -> None:
        """Make the folder, lock it and read it. Raises ConfigError, naming the folder or the file."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._reserve = ReservedFiles()
            self.generations = self._read_generations()
            incarnation = self._directory / INCARNATION_FILE
            self.last_incarnation = incarnation.read_text().strip() if incarnation.exists() else ""
        except BlockingIOError as error:
            raise ConfigError("another daemon runs on this state_dir", str(self._directory)) from error
        except OSError as error:
            raise ConfigError(f"cannot be used as state_dir: {error.strerror}", str(self._directory)) from error

    def check_lock(self) -> None:
        """Lock the folder again if it was deleted and made again under this daemon.

        Raises InvariantLostError when another daemon has locked it by then, and OSError.
        """
        path = self._directory / LOCK_FILE
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(self._lock).st_ino:
                return
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise InvariantLostError("another daemon runs on this state_dir", str(self._directory)) from error
        os.close(self._lock)
        self._lock = lock
        self._write(GENERATIONS_FILE, json.dumps(self.generations, indent=2))

    def close(self) -> None:
        """Let go of the folder."""
        self._reserve.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remember_incarnation(self, incarnation: str) -> None:
        """Remember the incarnation, so that the next daemon of this node knows its records. Raises OSError."""
        self.last_incarnation = incarnation
        self._write(INCARNATION_FILE, incarnation)

    def knows(self, seen: Mapping[str, int]) -> bool:
        """Return whether all these generations are stored, or higher ones."""
        return all(number <= self.generations.get(key, 0) for key, number in seen.items())

    def saw_generations(self, seen: Mapping[str, int]) -> bool:
        """Store higher generations durably, and forget old ones; return whether any was higher.

        seen: of all jobs that etcd has. Raises OSError when they cannot be written: then none is stored.
        """
        higher = {key: number for key, number in seen.items() if number > self.generations.get(key, 0)}
        if higher:
            unchanged = {key: number for key, number in self.generations.items() if key not in higher}
            remembered = _remembered(unchanged | higher, seen.keys())
            self._write(GENERATIONS_FILE, json.dumps(remembered, indent=2))
            self.generations = remembered
        return bool(higher)

    def _read_generations(self) -> dict[str, int]:
        path = self._directory / GENERATIONS_FILE
        if not path.exists():
            return {}
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
        except (ValueError, RecursionError) as error:
            aside = shlex.join(["mv", str(path), f"{path}.damaged"])
            lost = "lost is which plans this node has seen, which counts only if etcd was restored from an older copy"
            raise ConfigError(f"is damaged ({error}); `{aside}` sets it aside: {lost}", str(path)) from error

    def _write(self, name: str, text: str) -> None:
        self._reserve.run(lambda: self._write_now(name, text))

    def _write_now(self, name: str, text: str) -> None:
        path = self._directory / name
        partial = path.with_name(f".{name}.partial")
        with partial.open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def _remembered(generations: dict[str, int], present: Set[str]) -> dict[str, int]:
    """Return the generations without the oldest of many jobs and of many submissions of a name.

    A name goes with the last of its submissions: alone it would count for every job of that name.
    """
    newest_first: dict[str, list[str]] = {}
    for key in reversed(generations):
        newest_first.setdefault(key.partition("/")[0], []).append(key)
    kept = set(present)
    for rank, (name, keys) in enumerate(newest_first.items()):
        if rank < NUM_JOBS_REMEMBERED or name in present:
            kept |= {name, *[key for key in keys if key != name][:NUM_SUBMISSIONS_REMEMBERED]}
    return {key: number for key, number in generations.items() if key in kept}
