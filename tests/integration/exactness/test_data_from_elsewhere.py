"""Jobs whose data lies at a URL, or on the submitter's machine alone, end in the bits of the plain loop."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.submission import send_missing
from headway.daemon.jobs.job import DataSpec
from headway.daemon.jobs.resolve import default_cache_dir
from headway.daemon.local.cluster import LocalCluster
from headway.stages.data.shard_index import read_index
from headway.stages.data.shard_writer import DataForm, writing_shards
from tests.integration.exactness.training import (
    Oracle,
    Result,
    assert_same_bits,
    finished,
    read_weights,
    small_job,
    train,
)
from tests.rigs.file_server import serving

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

JOB = """\
[job]
name = "{name}"
seed = 5
[model]
num_hidden_layers = 2
hidden_size = 32
intermediate_size = 48
num_attention_heads = 4
num_key_value_heads = 2
[data]
source = "{source}"
[train]
batches = 6
microbatches = 4
microbatch_size = 2
sequence_length = 16
[placement]
min_nodes = 2
max_nodes = 2
[fault]
checkpoint_dir = "{checkpoints}"
"""


def made(folder: Path) -> str:
    """Write tokens that no test has, nor had: the nodes' cache outlives them. Returns the data's name."""
    with writing_shards(folder, DataForm(vocab_size=256, most_tokens=4000)) as writer:
        writer.append(np.random.default_rng().integers(0, 256, 10_000))
    return read_index(folder).sha256


@pytest.fixture(autouse=True)
def _cache_is_left_as_it_was() -> Iterator[None]:
    """Delete the data that a test brings into the nodes' cache."""
    before = set(default_cache_dir().glob("*"))
    yield
    for folder in set(default_cache_dir().glob("*")) - before:
        if len(folder.name) == 64:
            shutil.rmtree(folder, ignore_errors=True)


async def headway(folder: Path, *arguments: str) -> str:
    """Run a command line as its user would. Returns what it printed."""
    command = [sys.executable, "-m", "headway.daemon.cli.main", *arguments]
    environment = os.environ | {"HEADWAY_CACHE_DIR": str(folder / "cache")}
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def reached(cluster: LocalCluster) -> list[str]:
    """Return the options that name a cluster."""
    return ["--etcd", ",".join(cluster.address.etcd), "--certs", str(cluster.address.certificates)]


async def test_a_job_trains_on_data_at_a_url(cluster: LocalCluster, tmp_path: Path) -> None:
    """`submit`, `reference` and two nodes read one URL, and have one result."""
    made(tmp_path / "served" / "shards")
    with serving(tmp_path / "served") as server:
        (tmp_path / "url.toml").write_text(
            JOB.format(name="at-a-url", source=f"{server.url}/shards/", checkpoints=tmp_path)
        )
        await headway(tmp_path, "submit", "url.toml", *reached(cluster))
        async with ClusterSession(cluster.address) as session:
            piped = await finished(session, "at-a-url", tmp_path / "piped")
        await headway(tmp_path, "reference", "url.toml", "--out", "plain")
    lines = (tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()
    losses = tuple(json.loads(line)["loss"] for line in lines)
    assert_same_bits(piped, Result(losses, read_weights(tmp_path / "plain" / "model")))


async def test_a_job_trains_on_data_that_was_sent(
    cluster: LocalCluster, tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node takes the data into its cache, the folder is gone, and a job on two nodes finds it by its name."""
    sha256 = made(tmp_path / "mine")
    assert "a node has it already" in await headway(tmp_path, "data", "send", "mine", *reached(cluster))
    spec = small_job("sent", batches=6)
    plain = oracle(replace(spec, data=DataSpec(source=str(tmp_path / "mine"), sha256=sha256)))
    # These nodes see the submitter's folder, so the question leaves its name out.
    has_data = NodeClient.has_data
    monkeypatch.setattr(NodeClient, "has_data", lambda client, node, sha256, _: has_data(client, node, sha256, ""))
    data = DataSpec(source=str(tmp_path / "mine"), sha256=sha256)
    async with ClusterSession(cluster.address) as session:
        (sent,) = await send_missing(session, data, warn=lambda _: None)
        assert sent.node in (await session.view()).nodes
    (tmp_path / "mine").rename(tmp_path / "gone")
    assert_same_bits(await train(cluster, replace(spec, data=data), tmp_path / "piped", num_nodes=2), plain)
