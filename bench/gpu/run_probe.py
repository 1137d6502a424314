"""Runs one probe in a process group of its own, with a time limit: whatever becomes of it, the next one runs."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from gpu.rows import ProbeResult

ENDING_S = 20.0
"""Time between SIGTERM and SIGKILL, in which a local cluster deletes what it started."""
DIED = 70
"""Exit status of a probe that an exception ended; it may have printed figures before."""
LAST_LINES = 12
"""Lines of a failed probe's errors that are kept."""


def run_probe(
    command: Sequence[str],
    *,
    limit_s: float,
    environment: Mapping[str, str],
    folder: Path | None = None,
    log: Path | None = None,
) -> ProbeResult:
    """Return what the probe's last JSON line says, and how it ended.

    A probe that missed a bar of its own exits with 1, and its figures still count. folder: where it runs. log: file for
    all its output.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env=dict(environment),
            start_new_session=True,
        )
        trouble = ""
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            trouble = f"not done after {limit_s:g} s"
        finally:
            _end(process)
        text, error_text = _text(out), _text(errors)
    if log is not None:
        log.write_text(f"$ {' '.join(command)}\n{text}\n{error_text}\nexit status {process.returncode}\n")
    figures = last_json(text)
    if not trouble and (figures is None or process.returncode == DIED):
        trouble = f"exit status {process.returncode}: {_last_line(error_text)}"
    return ProbeResult(figures=figures or {}, seconds=time.monotonic() - began, trouble=trouble)


def last_json(text: str) -> dict[str, object] | None:
    """Return the object of the last line that is one; None: there is none."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
    return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the whole group: politely first, because a cluster has files and children to take care of."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _last_line(text: str) -> str:
    """Return the last line that says something, for a table of one line each."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines:
        print("\n".join(lines[-LAST_LINES:]), file=sys.stderr, flush=True)
    return lines[-1][:200] if lines else "it printed no error"
