"""Parts that tests of hub to adapter share."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

from headway.daemon.decide.job_view import JobView


async def headway(folder: Path, arguments: str) -> str:
    """Run a command as a user does, in a folder."""
    command = [sys.executable, "-m", "headway.daemon.cli.main", *arguments.split()]
    done = await asyncio.to_thread(subprocess.run, command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def workers_of(job: JobView) -> list[Any]:
    """The workers in force, from the first stage to the last."""
    assert job.plan is not None
    found = job.workers_of(job.plan)
    return [found[position] for position in sorted(found)]
