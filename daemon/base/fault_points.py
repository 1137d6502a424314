"""Places where a test may let this process fail: off unless a faults file is named, and then struck exactly as it says.

The file has one JSON object a line:

    {"id": "a", "at": "operation", "when": {"stage": 1, "batch": 7, "op": "backward"}, "do": "kill", "times": 1}

`at` names the place, `when` the facts that must all be equal there, `do` what happens: `kill` (SIGKILL) or `stop`
(SIGSTOP) this process, `kill_parent` or `stop_parent` its daemon, `raise`, `out_of_memory`, `hang`, `exit`; `flip_bit`
or `truncate` the file that the place is about; or an action that this process has registered, for `seconds`. A strike
is noted in the folder `<file>.struck` before it happens, so that it is not repeated by the process that comes after,
and so that a test can see that it happened. `"times": 0` strikes every time and notes nothing.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENVIRONMENT = "HEADWAY_FAULTS_FILE"
LAYER_PLACE = "layer"
"""Reached after each layer's forward and before its backward. A stage has it only if the file names it at the start."""
PACE = "pace"
"""The action at that place: the layer takes at least so many seconds."""


@dataclass
class InjectedFaultError(Exception):
    """A test requested this failure."""

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
    seconds: float = 0.0
    after: str = ""
    """Id of a fault that must have struck before."""


class FaultPoints:
    """The faults that are armed in this process. The file may change at any time; replace it, do not write into it."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._read_at = 0
        self._armed: list[Fault] = []
        self.actions: dict[str, Callable[[float], None]] = {}
        """Further actions of this process, by name."""

    @property
    def is_armed(self) -> bool:
        """Return whether any fault could strike: a hot path asks this first."""
        return self._path is not None

    def names(self, place: str) -> bool:
        """Return whether the file has a fault for this place now."""
        if self._path is not None:
            self._refresh()
        return any(fault.at == place for fault in self._armed)

    def at(self, place: str, **facts: object) -> None:
        """Strike if a fault is armed for this place and these facts. Raises ValueError for an invalid file."""
        self._refresh()
        for fault in self._armed:
            is_here = fault.at == place and all(facts.get(name) == value for name, value in fault.when.items())
            if is_here and (not fault.after or (self._struck_folder / f"{fault.after}.0").exists()):
                self._strike(fault, facts)

    @property
    def _struck_folder(self) -> Path:
        assert self._path is not None, "nothing is armed"
        return self._path.with_name(f"{self._path.name}.struck")

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
            case "kill_parent":
                os.kill(os.getppid(), signal.SIGKILL)
            case "stop_parent":
                os.kill(os.getppid(), signal.SIGSTOP)
            case "flip_bit":
                _flip_bit(Path(str(facts["path"])))
            case "truncate":
                os.truncate(str(facts["path"]), Path(str(facts["path"])).stat().st_size // 2)
            case "raise":
                raise InjectedFaultError(fault.id)
            case "out_of_memory":
                raise MemoryError(f"injected fault {fault.id}")
            case "hang":
                while True:
                    time.sleep(3600)
            case "exit":
                os._exit(1)
            case other if other in self.actions:
                self.actions[other](fault.seconds)
            case other:
                raise ValueError(f"a fault cannot {other!r}")

    def _claim(self, fault: Fault, facts: dict[str, object]) -> bool:
        """Note the strike, durably; return False when it has struck often enough, in any process."""
        if fault.times == 0:
            return True
        folder = self._struck_folder
        folder.mkdir(exist_ok=True)
        for number in range(fault.times):
            try:
                descriptor = os.open(folder / f"{fault.id}.{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            now = {"time": time.time(), "monotonic": time.monotonic()}
            note = {"id": fault.id, "at": fault.at, "do": fault.do, "pid": os.getpid(), **now, **facts}
            os.write(descriptor, json.dumps(note, default=str).encode() + b"\n")
            os.fsync(descriptor)
            os.close(descriptor)
            return True
        return False


def _flip_bit(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


_points = FaultPoints()


def arm() -> None:
    """Watch the file that the environment names, if it names one."""
    global _points
    path = os.environ.get(ENVIRONMENT)
    actions = _points.actions
    _points = FaultPoints(Path(path)) if path else FaultPoints()
    _points.actions = actions


def is_armed(place: str = "") -> bool:
    """Return whether any fault could strike in this process or, given a place, is armed at that place."""
    return _points.names(place) if place else _points.is_armed


def fault_point(place: str, **facts: object) -> None:
    """Mark a place where a test may let this process fail."""
    if _points.is_armed:
        _points.at(place, **facts)


def register_action(name: str, action: Callable[[float], None]) -> None:
    """Let a fault of this name call `action` with its seconds."""
    _points.actions[name] = action
