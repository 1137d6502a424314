"""Nodes try a job's checkpoint folder when it is submitted."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headway.daemon.cli import options, submission
from headway.daemon.client import job_requests
from headway.daemon.rpc import peer_client
from headway.daemon.storage import checkpoint
from headway.daemon.view.cluster_view import ClusterView
from headway.stages.data.shard_writer import writing_shards

JOB = """
[job]
name = "j"
[data]
source = "data"
[fault]
checkpoint_dir = "s3://bucket/c"
"""


@pytest.mark.parametrize("identity", [None, "a certificate"])
def test_a_store_that_no_node_can_be_asked_about_is_tried_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: str | None
) -> None:
    """A local cluster without certificates: this machine tries the store. With them its nodes do."""
    with writing_shards(tmp_path / "data", vocab_size=256) as writer:
        writer.append(np.arange(10_000, dtype=np.int64) % 256)
    (tmp_path / "job.toml").write_text(JOB)
    submitted: list[str] = []
    tried: list[str] = []

    async def view() -> ClusterView:
        return ClusterView()

    async def submit(_: object, spec: Any, **__: object) -> None:
        submitted.append(spec.job.name)

    class Where(options.Where):
        def run(self, work: Callable[[Any], Coroutine[Any, Any, Any]], **_: object) -> Any:
            session = SimpleNamespace(view=view, identity=identity, address=SimpleNamespace(state_dir=tmp_path))
            return asyncio.run(work(session))

    class Client:
        def __init__(self, _: object) -> None:
            """There are no nodes."""

        async def close(self) -> None:
            """There is nothing to close."""

    monkeypatch.setattr(job_requests, "submit", submit)
    monkeypatch.setattr(peer_client, "NodeClient", Client)
    monkeypatch.setattr(checkpoint, "probe", tried.append)
    submission.submit(tmp_path / "job.toml", where=Where())
    assert submitted == ["j"]
    assert tried == ([] if identity else ["s3://bucket/c"])
