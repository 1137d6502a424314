"""Places where a test may let this process fail: off unless a faults file is named, and then struck exactly as it says.

The file has one JSON object a line:

    {"id": "a", "at": "operation", "when": {"stage": 1, "batch": 7, "op": "backward"}, "do": "kill", "times": 1}

`at` names the place, `when` the facts that must all be equal there, `do` what happens: `kill` (SIGKILL), `stop`
(SIGSTOP), `raise`, `out_of_memory`, `hang` or `exit`. A strike is noted in the folder `<file>.struck` before it
happens, so that it is not repeated by the process that comes after, and so that a test can see that it happened.
"""

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENVIRONMENT = "HEADWAY_FAULTS_FILE"


@dataclass
class InjectedFaultError(Exception):
    """Somebody asked for it."""

    fault: str

    def __str__(self) -> str:
        return f"injected fault {self.fault}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the file."""

    id: str
    at: str
    do: str
    when: dict[str, Any] = field(default_factory=dict)
    times: int = 1


class FaultPoints:
    """The faults that are armed in this process. The file may change at any time; replace it, do not write into it."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._read_at = 0
        self._armed: list[Fault] = []

    @property
    def is_armed(self) -> bool:
        """Whether any fault could strike: a hot path asks this first."""
        return self._path is not None

    def at(self, place: str, **facts: object) -> None:
        """Strike if a fault is armed for this place and these facts. Raises ValueError for a file that is no such."""
        self._refresh()
        for fault in self._armed:
            if fault.at == place and all(facts.get(name) == value for name, value in fault.when.items()):
                self._strike(fault, facts)

    def _refresh(self) -> None:
        assert self._path is not None, "nothing is armed"
        try:
            changed_at = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            self._armed, self._read_at = [], 0
            return
        if changed_at != self._read_at:
            lines = self._path.read_text().splitlines()
            self._armed, self._read_at = [Fault(**json.loads(line)) for line in lines if line.strip()], changed_at

    def _strike(self, fault: Fault, facts: dict[str, object]) -> None:
        if not self._claim(fault, facts):
            return
        match fault.do:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise InjectedFaultError(fault.id)
            case "out_of_memory":
                raise MemoryError(f"injected fault {fault.id}")
            case "hang":
                while True:
                    time.sleep(3600)
            case "exit":
                os._exit(1)
            case other:
                raise ValueError(f"a fault cannot {other!r}")

    def _claim(self, fault: Fault, facts: dict[str, object]) -> bool:
        """Note the strike, durably; False when it has struck often enough, in whatever process."""
        assert self._path is not None
        folder = self._path.with_name(f"{self._path.name}.struck")
        folder.mkdir(exist_ok=True)
        for number in range(fault.times):
            try:
                descriptor = os.open(folder / f"{fault.id}.{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            note = {"id": fault.id, "at": fault.at, "do": fault.do, "pid": os.getpid(), "time": time.time(), **facts}
            os.write(descriptor, json.dumps(note, default=str).encode() + b"\n")
            os.fsync(descriptor)
            os.close(descriptor)
            return True
        return False


_points = FaultPoints()


def arm() -> None:
    """Look out for the file that the environment names, if it names one."""
    global _points
    path = os.environ.get(ENVIRONMENT)
    _points = FaultPoints(Path(path)) if path else FaultPoints()


def is_armed() -> bool:
    """Whether any fault could strike in this process."""
    return _points.is_armed


def fault_point(place: str, **facts: object) -> None:
    """A place where a test may let this process fail."""
    if _points.is_armed:
        _points.at(place, **facts)
