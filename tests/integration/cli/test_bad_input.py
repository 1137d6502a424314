"""Every slip gives one line that says what and where, the right exit code, no traceback, and leaves no process."""

import asyncio
import json
import math
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.client.cluster_access import ClusterSession, find_cluster
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import DesiredRecord, PhaseRecord, SpecRecord
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.stages.spec import ModelSpec

FOREIGN = "203.0.113.9"
"""An address of a range reserved for documentation: no machine has it."""


def refused(outcome: tuple[int, str, str], *, code: int, line: str, steps: int = 0) -> None:
    """The outcome is one line on stderr with this text, and this exit code; before it, so many lines tell steps."""
    found, _, err = outcome
    *begun, last = err.splitlines()
    assert line in last, err
    assert found == code
    assert "Traceback" not in err
    assert last.startswith("headway: ")
    assert len(begun) == steps, err


@pytest.mark.parametrize(
    ("command", "code", "line"),
    [
        ("init first >&-", 0, ""),
        ("study none.toml --out o 2>&-", 2, ""),
        ("init first >/dev/full", 2, "headway: stdout: cannot be written: No space left on device\n"),
    ],
)
def test_streams_that_the_caller_closed_or_that_are_full(program: Any, command: str, code: int, line: str) -> None:
    """What goes to a closed stream goes nowhere, and the exit code tells the rest."""
    shell = ["sh", "-c", f'exec "$0" -m headway.daemon.cli.main {command}', sys.executable]
    ended = subprocess.run(
        shell, cwd=program.folder, env=program.environment(), capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (code, line)


def test_port_in_use(program: Any) -> None:
    """--etcd-port is taken: `up` says which port, and leaves nothing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(program.run("up", "--etcd-port", str(port)), code=2, line=f"port {port} is in use", steps=1)
    assert program.leftovers() == []


def test_etcd_binary_that_is_not_there(program: Any) -> None:
    """--etcd-binary names nothing: one line with the flag."""
    refused(program.run("up", "--etcd-binary", "/nonexistent"), code=2, line="--etcd-binary")
    assert program.leftovers() == []


def test_a_running_cluster_and_its_bad_clients(standing: Any) -> None:
    """A name in use, a job that is not there, and a client without or with a foreign certificate: one line each."""
    program = standing
    etcd = json.loads((program.folder / ".headway" / "cluster.json").read_text())["etcd"][0]
    assert program.run("certs", "ca", "stranger")[0] == 0
    without = program.start("jobs", "--etcd", etcd)  # these two try for as long as they are let
    stranger = program.start("jobs", "--etcd", etcd, "--certs", "ca/stranger")
    job = program.job(min_nodes=3)  # it waits for a third node
    assert program.run("submit", str(job))[0] == 0
    refused(program.run("submit", str(job)), code=2, line="job tiny: this name is in use")
    refused(program.run("jobs", "rm", "tiny"), code=2, line="headway cancel tiny")
    refused(program.run("export", "tiny", "--out", "out"), code=2, line="nothing to export yet")
    refused(program.run("status", "other"), code=2, line="no such job; there are ")
    refused(program.run("drain", "node-9"), code=2, line="these nodes are up: node-1")
    refused(program.ended(without), code=3, line="no client certificate")
    refused(program.ended(stranger), code=3, line=etcd)
    assert program.run("cancel", "tiny")[0] == 0


def test_daemons_that_cannot_start(program: Any) -> None:
    """An etcd that is not there, a port that is taken, an address of elsewhere: one line, exit codes 3, 2 and 3."""
    assert program.run("certs", "ca", "node")[0] == 0
    common = ("daemon", "--certs", "ca/node", "--name", "node", "--log-level", "error")
    lonely = program.start(*common, "--etcd", "127.0.0.1:1", "--state-dir", "lonely")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused(program.run(*common, "--listen", f"127.0.0.1:{port}", "--state-dir", "late"), code=2, line=port)
    for host in (("--advertise-host", FOREIGN), ("--listen", f"{FOREIGN}:7070")):
        refused(program.run(*common, *host, "--state-dir", "far"), code=3, line="advertise_host: ")
    refused(program.ended(lonely), code=3, line="127.0.0.1:1")
    assert program.leftovers() == []


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


POISON = JobSpec(job=JobSection(name="poison"), model=ModelSpec(num_hidden_layers=50_000_000))
HEADLESS = JobSpec(job=JobSection(name="headless"), model=ModelSpec(num_attention_heads=0))


async def put(folder: Path, spec: JobSpec) -> None:
    """Write a job into etcd as a client of any other make could."""
    name = spec.job.name
    async with ClusterSession(find_cluster(cluster=folder / ".headway", environment={})) as session:
        for leaf, record in (
            ("spec", SpecRecord(spec=spec, uid="0123")),
            ("desired", DesiredRecord()),
            ("phase", PhaseRecord(reason="submitted")),
        ):
            await session.client.put(Keys.of(name, leaf), encode(record))


def test_a_store_that_no_node_can_write_to_is_refused(standing: Any) -> None:
    """The daemons lack its package: `submit` asks them, and says so in one line with the key; there is no job."""
    job = standing.job(name="stored", more='[fault]\ncheckpoint_dir = "oss://bucket/c"\n')
    code, out, err = standing.run("submit", str(job))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "stored.toml:fault.checkpoint_dir: no node has access to oss://bucket/c, among them node-1: " in err
    assert "stored" not in standing.run("jobs")[1]


@pytest.mark.slow
def test_a_job_that_went_past_submit_fails_alone(standing: Any, wait_until: Callable[..., None]) -> None:
    """Two poisoned jobs are written into etcd: both fail with the rule; the daemons live, and the next job trains.

    When it has ended, the loss that is shown is that of its last batch.
    """
    pids = json.loads((standing.folder / ".headway" / "cluster.json").read_text())["pids"]
    for spec in (POISON, HEADLESS):
        asyncio.run(put(standing.folder, spec))

    def told(job: str) -> dict[str, Any]:
        code, out, err = standing.run("status", job, "--json")
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    for job, rule in (("poison", "num_hidden_layers: must be at most 1024"), ("headless", "num_attention_heads: must")):
        wait_until(lambda job=job: told(job)["phase"] == "failed", f"{job} fails")
        assert rule in told(job)["reason"]
        code, _, err = standing.run("resume", job)
        assert code == 2
        assert rule in err
        assert standing.run("jobs", "rm", job)[0] == 0
    assert standing.run("submit", str(standing.job(name="healthy", batches=7)))[0] == 0
    wait_until(lambda: told("healthy")["phase"] == "finished", "the healthy job finishes")
    wait_until(lambda: told("healthy")["loss"] is not None, "its last loss is written")
    found = told("healthy")
    assert found["batch"] == 6
    assert found["loss"] == pytest.approx(math.log(256), rel=0.2)
    assert json.loads((standing.folder / ".headway" / "cluster.json").read_text())["pids"] == pids
    assert standing.run("jobs", "rm", "healthy")[0] == 0
