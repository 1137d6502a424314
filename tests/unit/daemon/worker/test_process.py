"""What is told of the end of a worker's process."""

import asyncio
import sys
from itertools import count
from pathlib import Path

import pytest

from headway.daemon.worker import process
from headway.daemon.worker.process import WorkerOptions, WorkerProcess

KILLS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("step", [0, 1])
async def test_a_process_that_the_kernel_killed_for_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The group's count of such kills rises in its life: its end names the limit and what helps. Otherwise a signal."""
    kills = count(7, step)
    monkeypatch.setattr(process, "num_memory_kills", lambda: next(kills))
    monkeypatch.setattr(process, "memory_limit_bytes", lambda: 2 << 30)
    monkeypatch.setattr(process, "command", lambda _: [sys.executable, "-c", KILLS_ITSELF])
    options = WorkerOptions(socket_path="", host="", certificates="", renewals="")
    worker = WorkerProcess("w", options, environment={}, output_dir=tmp_path, on_exit=lambda _: None)
    async with asyncio.timeout(30):
        await worker.exited.wait()
    why = ": the kernel kills processes for lack of memory within 2.0 GiB, a cgroup's limit; use fewer nodes here"
    assert worker.exit_reason.startswith(f"w (pid {worker.pid}) ended by signal SIGKILL{why * step}")
