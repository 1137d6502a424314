"""A job's journal on its way into the metrics file."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from headway.daemon.addresses import NodeEndpoint
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_watch import JournalCopy
from headway.daemon.view.cluster_view import ClusterView
from headway.proto.control_pb2 import JournalEntry
from headway.stages.errors import UnavailableError
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.unit.daemon.cli.fake_cluster import cluster_view


class Session:
    """Always sees the same cluster."""

    identity = TlsIdentity(ca=b"", certificate=b"", key=b"")

    async def view(self) -> ClusterView:
        return cluster_view()


class Daemons:
    """Answers of each node, call after call; the last answer stays. -1: no answer."""

    def __init__(self, **known: list[int]) -> None:
        self._known = known

    async def journal(self, endpoint: NodeEndpoint, job: str, *, from_batch: int) -> AsyncIterator[JournalEntry]:
        """Rows below what the daemon knows of."""
        assert job == "demo"
        answers = self._known[endpoint.address[0]]
        below = answers.pop(0) if len(answers) > 1 else answers[0]
        if below < 0:
            raise UnavailableError(str(endpoint), "refused")
        for batch in range(from_batch, below):
            yield JournalEntry(batch=batch, loss=1.0, tokens=1, seconds=0.1, generation=1)

    async def close(self) -> None:
        """Nothing is open."""


async def copied(tmp_path: Path, num_batches: int, *, timeout_s: float = 5.0, **known: list[int]) -> list[int]:
    """The batches in the file."""
    copy = JournalCopy(cast(ClusterSession, Session()), "demo", tmp_path / "metrics.jsonl")
    copy._client = cast(Any, Daemons(**known))
    try:
        await copy.copy_whole(num_batches, timeout_s=timeout_s)
    finally:
        await copy.close()
    return [json.loads(line)["batch"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


async def test_a_daemon_that_lags_does_not_end_the_copy(tmp_path: Path) -> None:
    """The first daemon knows an older boundary only; the second gives the rest."""
    assert await copied(tmp_path, 24, a=[20], b=[24]) == list(range(24))


async def test_all_daemons_lag_and_are_asked_again(tmp_path: Path) -> None:
    """Nobody knows of the end at first, one does not answer at all."""
    assert await copied(tmp_path, 24, a=[20, 20, 24], b=[-1]) == list(range(24))


async def test_a_journal_that_never_comes_is_named(tmp_path: Path) -> None:
    """The deadline ends the wait, and says how far it came and what the last daemon said."""
    with pytest.raises(TimeoutError, match=r"20 of 24 batches came within 0.3 s .*refused"):
        await copied(tmp_path, 24, timeout_s=0.3, a=[20], b=[-1])
