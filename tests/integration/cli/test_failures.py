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
    from headway.stages.state.journal import Journal
    append = Journal.append
    def failing(self, row):
        if row.batch == 2:
            raise RuntimeError("planted in batch 2")
        append(self, row)
    Journal.append = failing
"""


@pytest.mark.timeout(200)  # it is tried three times, each with a new process
def test_an_exception_in_a_worker_reaches_the_user(program: Any) -> None:
    """A worker raises in the third batch: the exception is told in one line, the traceback is kept in a file."""
    (program.folder / "planted").mkdir()
    (program.folder / "planted" / "sitecustomize.py").write_text(PLANTED)
    variables = {"PYTHONPATH": str(program.folder / "planted")}
    run = program.start("run", str(program.job()), "--out", "run", variables=variables)
    _, err = run.communicate(timeout=180)
    assert run.returncode == 4, err
    assert len(err.strip().splitlines()) == 1
    assert "RuntimeError: planted in batch 2" in err
    assert "failure.log" in err
    assert "Traceback (most recent call last)" in (program.folder / "run" / "failure.log").read_text()
    assert program.leftovers() == []


@pytest.mark.slow
def test_a_history_that_has_no_place_is_named(program: Any) -> None:
    """A setting that no daemon can follow: one line names it, and nothing is left."""
    variables = {"HEADWAY_HISTORY_DIR": "/dev/null/history"}
    run = program.start("run", str(program.job()), "--out", "run", variables=variables)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 3, err
    assert len(err.strip().splitlines()) == 1
    assert "history_dir" in err
    assert "/dev/null/history" in err
    assert program.leftovers() == []


@pytest.mark.slow
def test_a_killed_worker_does_not_fail_the_job(program: Any) -> None:
    """SIGKILL of one of two workers in the middle of a run: it goes on by itself, and each batch is told once."""
    job = program.job(batches=400, min_nodes=1)
    run = program.start(
        "run", str(job), "--nodes", "2", "--out", "run", "--json", variables={"HEADWAY_NUM_SPARES": "1"}
    )
    assert run.stdout is not None
    for line in run.stdout:
        if (json.loads(line)["batch"] or 0) >= 3:
            break
    os.kill(min(program.workers()), signal.SIGKILL)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    lines = (program.folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in lines] == list(range(400))
    assert program.leftovers() == []
