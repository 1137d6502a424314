"""`headway run` says what it costs to start more nodes than the machine has cores."""

import re
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.cli.program import run
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.local import run as local_run
from headway.daemon.local.run import crowding

JOB = '[job]\nname = "j"\n[data]\nsource = "headway-docs"\n'
GIB = 1 << 30


def test_a_sentence_has_the_machine_and_both_predictions() -> None:
    """Nodes that share a core are slower, by the plan's own figures."""
    told = crowding(parse_job(JOB), 50, num_cores=2.0, memory_bytes=24 * GIB)
    found = re.fullmatch(
        r"50 nodes share 2 cores and 24 GiB of this machine: (\S+) s a batch predicted, (\S+) s with --nodes 2", told
    )
    assert found is not None, told
    assert float(found[1]) > 5 * float(found[2])
    assert "share 0.5 cores and" in crowding(parse_job(JOB), 2, num_cores=0.5, memory_bytes=GIB)


def test_a_job_that_does_not_fit_into_the_memory_of_so_many_nodes_is_refused() -> None:
    """The same memory is enough for two."""
    memory_bytes = GIB
    crowding(parse_job(JOB), 2, num_cores=1.0, memory_bytes=memory_bytes)
    with pytest.raises(ConfigError, match="does not fit: "):
        crowding(parse_job(JOB), 50, num_cores=1.0, memory_bytes=memory_bytes)


@pytest.mark.parametrize("placement", ["min_nodes = 3", "replicas = [2, 1]\n[train]\nreduction_groups = 2"])
def test_a_job_that_needs_more_nodes_than_there_are_cores_is_compared_with_no_fewer(placement: str) -> None:
    told = crowding(parse_job(f"{JOB}[placement]\n{placement}\n"), 3, num_cores=2.0, memory_bytes=24 * GIB)
    assert told.endswith("s a batch predicted")


@pytest.mark.parametrize(("nodes", "is_told"), [("2", False), ("3", True)])
def test_run_says_it_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nodes: str, is_told: bool
) -> None:
    """One line, before anything is started: here etcd is missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_run, "num_cores", lambda: 2.0)
    monkeypatch.setattr(local_run, "machine_cards", lambda _: ())
    Path("job.toml").write_text(JOB)
    assert run(["run", "job.toml", "--nodes", nodes, "--out", "out", "--etcd-binary", "missing"]) == 2
    told, *rest = capsys.readouterr().err.splitlines()
    assert told.startswith(f"headway: {nodes} nodes share 2 cores and ") == is_told
    assert "missing" in rest[0] if is_told else "missing" in told
