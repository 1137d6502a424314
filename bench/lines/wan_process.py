"""An emulated line in a process of its own, and what its owner tells it: JSON lines both ways over its pipes."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from lines.wan_line import Line

TIMEOUT_S = 10.0


class LineProcess:
    """Runs a script of this folder; the standard input's end is the process's. `told` has the first line it says."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._name = Path(script).stem
        self._process = subprocess.Popen(
            [sys.executable, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=own_environment(),
        )
        self._asking = threading.Lock()
        self.told = self._read().strip()

    def set(self, line: Line) -> None:
        """Change the line for everything that is sent from now on."""
        self._tell({"line": asdict(line)})

    def cut(self, seconds: float) -> None:
        """Let nothing pass for so long, beginning now."""
        self._tell({"cut_s": seconds})

    def cpu_s(self) -> float:
        """Processor seconds so far."""
        return float(self._tell({})["cpu_s"])

    def end(self) -> None:
        """Let it clear away what it made, and make sure that it is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.stdout.close()

    def _tell(self, what: dict[str, object]) -> dict[str, float]:
        assert self._process.stdin is not None
        with self._asking:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            told: dict[str, float] = json.loads(self._read())
        return told

    def _read(self) -> str:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise RuntimeError(f"the process of {self._name} has ended")
        return text


def own_environment() -> dict[str, str]:
    """Return the environment of an emulator's process, which imports its neighbours from any working directory."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
