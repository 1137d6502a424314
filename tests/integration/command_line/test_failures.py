"""A job that fails says so: exit code 4, one line, the traceback kept, nothing left running."""

import json
import os
import signal
from typing import Any

import pytest

# What Python runs at the start of every process: in workers, the journal raises at the third batch.
PLANTED = """
import sys
if "headway.daemon.worker" in sys.orig_argv:
    from headway.stages.journal import Journal
    append = Journal.append
    def failing(self, row):
        if row.batch == 2:
            raise RuntimeError("planted in batch 2")
        append(self, row)
    Journal.append = failing
"""


def test_an_exception_in_a_worker_reaches_the_user(program: Any) -> None:
    """A worker raises in the third batch: the exception is told in one line, the traceback is kept in a file."""
    (program.folder / "planted").mkdir()
    (program.folder / "planted" / "sitecustomize.py").write_text(PLANTED)
    variables = {"PYTHONPATH": str(program.folder / "planted")}
    run = program.start("run", str(program.job()), "--out", "run", variables=variables)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 4, err
    assert len(err.strip().splitlines()) == 1
    assert "RuntimeError: planted in batch 2" in err
    assert "failure.log" in err
    assert "Traceback (most recent call last)" in (program.folder / "run" / "failure.log").read_text()
    assert program.leftovers() == []


def test_a_worker_that_cannot_start_a_stage_says_why(program: Any) -> None:
    """The workers' history has no place to go: one line names it, and the workers live on until the run ends."""
    variables = {"HEADWAY_HISTORY_DIR": "/dev/null/history"}
    run = program.start("run", str(program.job()), "--out", "run", variables=variables)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 4, err
    assert len(err.strip().splitlines()) == 1
    assert "Not a directory: '/dev/null/history'" in err
    assert program.leftovers() == []


@pytest.mark.parametrize("victim", [0, pytest.param(-1, marks=pytest.mark.slow)])
def test_a_killed_worker_fails_the_job(program: Any, victim: int) -> None:
    """SIGKILL of one of two workers in the middle of a run: the job fails and names the node, and nothing hangs."""
    job = program.job(batches=100_000, min_nodes=2)
    run = program.start("run", str(job), "--nodes", "2", "--out", "run", "--json")
    assert run.stdout is not None
    for line in run.stdout:
        if (json.loads(line)["batch"] or 0) >= 3:
            break
    os.kill(sorted(program.workers())[victim], signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 4, err
    assert len(err.strip().splitlines()) == 1
    assert "node-" in err
    assert "SIGKILL" in err
    assert program.leftovers() == []
