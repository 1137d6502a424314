"""A running cluster is handed jobs that no job file may hold, past `submit` and through it: none costs it anything."""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.client.cluster_access import ClusterSession, find_cluster
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.records.format import encode, to_builtins
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import CheckpointRecord, DesiredRecord, PhaseRecord, SpecRecord
from headway.stages.spec import ModelSpec
from headway.stages.state.file_digest import FileDigest

POISON = JobSpec(job=JobSection(name="poison"), model=ModelSpec(num_hidden_layers=50_000_000))
HEADLESS = JobSpec(job=JobSection(name="headless"), model=ModelSpec(num_attention_heads=0))


def manifest(folder: Path, spec: JobSpec) -> Path:
    """A checkpoint's folder that says it is of this job."""
    place = folder / "00000001-0000000004"
    place.mkdir(parents=True)
    record = CheckpointRecord(timeline=1, boundary=4, url="u", files={"embed": FileDigest(size_bytes=1, checksum="ab")})
    told = {"job": spec.job.name, "generation": 1, "spec": to_builtins(spec), **to_builtins(record)}
    (place / "manifest.json").write_bytes(encode(told))
    return place


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


def test_a_checkpoint_without_a_job_file_is_checked(standing: Any) -> None:
    """`submit --from` alone: no attention heads, the name `..`, a name that draws: one line each, exit code 2."""
    for number, (spec, line) in enumerate(
        (
            (HEADLESS, "model.num_attention_heads: must be at least 1, is 0"),
            (replace(HEADLESS, job=JobSection(name=".."), model=ModelSpec()), "job.name: '..' is not 1 to 63"),
            (replace(HEADLESS, job=JobSection(name="a\x1b[2J"), model=ModelSpec()), "job.name: 'a\\x1b[2J' is not"),
            (POISON, "model.num_hidden_layers: must be at most 1024, is 50000000"),
        )
    ):
        place = manifest(standing.folder / f"crafted-{number}", spec)
        code, out, err = standing.run("submit", "--from", str(place))
        assert (code, out) == (2, "")
        assert line in err
        assert err.count("\n") == 1
        assert "\x1b" not in err


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
