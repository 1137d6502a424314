"""`status` asks, while etcd is away, the daemons that were seen when it was there."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.daemon.addresses import NodeEndpoint
from headway.daemon.cli.program import run
from headway.daemon.client import cluster_access, job_requests
from headway.daemon.client.cluster_access import known, remember
from headway.daemon.errors import StoreUnreachableError
from tests.unit.daemon.cli.fake_cluster import node

ETCD = ("10.0.0.5:2379", "10.0.0.6:2379")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "cache"))


def test_known_daemons_are_found_by_etcd_members_in_any_order() -> None:
    """Each cluster has its own entry, and later observations replace earlier ones."""
    assert known(ETCD) == ()
    remember(ETCD, [node("a"), node("b")])
    assert known(ETCD[::-1]) == (NodeEndpoint("a", "a:4711"), NodeEndpoint("b", "b:4711"))
    assert known(("other:2379",)) == ()
    remember(ETCD, [replace(node("a"), address="a:1")])
    assert known(ETCD) == (NodeEndpoint("a", "a:1"),)
    remember(ETCD, [])
    assert known(ETCD) == (NodeEndpoint("a", "a:1"),), "an empty etcd says nothing of the daemons"


@pytest.mark.parametrize("content", [b"{", b"[1]", b'[{"name": "../x", "address": "a:1"}]', b"[" * 100_000])
def test_an_unreadable_cache_file_is_ignored(content: bytes) -> None:
    """A torn, foreign or deeply nested file gives no daemons."""
    remember(ETCD, [node("a")])
    cluster_access._path(ETCD).write_bytes(content)
    assert known(ETCD) == ()


def test_an_unwritable_cache_is_ignored(tmp_path: Path) -> None:
    """A file stands where the folder would be."""
    (tmp_path / "cache").write_text("")
    remember(ETCD, [node("a")])
    assert known(ETCD) == ()


def test_status_asks_them_while_etcd_is_away(
    fake_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status --etcd …` without an answer from etcd: the daemons that were seen there, and their words."""
    asked: list[Any] = []

    async def view(_self: object) -> object:
        raise StoreUnreachableError("etcd", "no answer")

    async def ask(addresses: Any, _identity: object) -> job_requests.DaemonStatus:
        asked.extend(addresses)
        return job_requests.DaemonStatus(node="a", etcd_reachable=False, etcd_away_s=7.0, waits_for="nothing", jobs={})

    address = cluster_access.ClusterAddress(etcd=ETCD)
    monkeypatch.setattr(cluster_access, "find_cluster", lambda **_: address)
    monkeypatch.setattr(fake_cluster.FakeSession, "view", view)
    monkeypatch.setattr(job_requests, "ask_daemons", ask)
    assert run(["status"]) == 3, "nobody is known yet"
    remember(ETCD, [node("a")])
    capsys.readouterr()
    assert run(["status"]) == 0
    assert asked == [NodeEndpoint("a", "a:4711")]
    assert "etcd has been away for 7 s, says node a" in capsys.readouterr().out
