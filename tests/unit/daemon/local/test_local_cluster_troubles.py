"""One daemon of a local cluster that does not start: the others run on, it is told of, and tried again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.daemon.local import processes as node_process
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.processes import MAX_FALSE_STARTS, NodeProcess
from headway.stages.errors import UnavailableError


def fake(name: str, *, failure: str = "", has_left: bool = False) -> Any:
    return SimpleNamespace(name=name, failure=failure, has_left=has_left)


def test_one_daemon_that_does_not_start_does_not_end_the_others(tmp_path: Path) -> None:
    """It is logged once. When none starts, the command ends with the reason."""
    told: list[str] = []
    cluster = LocalCluster(tmp_path, num_nodes=2, on_trouble=told.append)
    cluster._etcd = object()  # type: ignore[assignment]
    cluster.nodes = [fake("node-1"), fake("node-2", failure="disk full")]
    cluster.check()
    cluster.check()
    assert told == ["node-2 does not start, and is retried: disk full"]
    cluster.nodes[0] = fake("node-1", failure="disk full too")
    with pytest.raises(UnavailableError, match="disk full too"):
        cluster.check()
    cluster.nodes[0] = fake("node-1", has_left=True)
    with pytest.raises(UnavailableError, match="disk full"):
        cluster.check()


def test_a_daemon_that_never_starts_is_retried_for_ever_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attempt ends with status 1: after five it counts as failing, and there is a sixth."""
    now = 0.0
    monkeypatch.setattr(node_process, "tethered", SimpleNamespace(__file__="-cimport sys; sys.exit(1)"))
    monkeypatch.setattr(node_process, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    node = NodeProcess(name="node-1", flags={}, environment={}, log_path=tmp_path / "log")
    for attempt in range(1, MAX_FALSE_STARTS + 2):
        node.process.wait(30)
        assert node.process.returncode == 1
        assert not node.keep_up(), "it rests first"
        assert bool(node.failure) is (attempt >= MAX_FALSE_STARTS)
        now += node_process.SELDOM_S
        assert node.keep_up()
    node.process.wait(30)
    assert node.num_restarts == MAX_FALSE_STARTS + 1
