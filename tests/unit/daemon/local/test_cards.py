"""The nodes of a local cluster get different cards, or say which they share."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from headway.daemon.base.errors import ConfigError
from headway.daemon.local import cards as module
from headway.daemon.local import processes as node_process
from headway.daemon.local.cards import machine_cards, share_cards, sharing
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.processes import MAX_FALSE_STARTS, NodeProcess
from headway.stages.errors import UnavailableError


@pytest.mark.parametrize("num_cards", range(1, 10))
@pytest.mark.parametrize("num_nodes", range(1, 10))
def test_every_card_is_used_and_as_evenly_as_possible(num_cards: int, num_nodes: int) -> None:
    """Each node has a card; loads differ by one at most; a card has several nodes only if there are more nodes."""
    names = tuple(f"GPU-{index}" for index in range(num_cards))
    shares = share_cards(names, num_nodes)
    assert len(shares) == num_nodes
    counts = Counter(card for share in shares for card in share.cards)
    assert set(counts) == set(names)
    assert max(counts.values()) - min(counts.values()) <= 1
    sizes = [len(share.cards) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert all(share.num_sharers == counts[card] for share in shares for card in share.cards)
    assert (max(counts.values()) > 1) is (num_nodes > num_cards)
    assert bool(sharing(shares)) is (num_nodes > num_cards)


def test_the_sentence_names_who_shares_which_card() -> None:
    """Three nodes on two cards."""
    told = sharing(share_cards(("0", "1"), 3))
    assert told.startswith("2 cards for 3 nodes: node-1 and node-2 share card 0; node-3 has card 1. Nodes")


def test_without_cards_nothing_is_dealt_out() -> None:
    """The nodes compute on the CPU."""
    assert share_cards((), 3) == ()
    assert sharing(()) == ""


def test_the_machines_cards_are_those_that_this_process_may_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list in CUDA_VISIBLE_DEVICES is dealt out; a machine without driver, or told to use the CPU, has none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert machine_cards({"HEADWAY_DEVICES": "cpu"}) == ()
    monkeypatch.setattr(module, "_DRIVER_FILES", (tmp_path / "none",))
    assert machine_cards({}) == ()
    monkeypatch.setattr(module, "_DRIVER_FILES", (tmp_path,))
    assert machine_cards({}) == ("0", "1")
    assert machine_cards({"CUDA_VISIBLE_DEVICES": "3, GPU-ab"}) == ("3", "GPU-ab")


def seat(cluster: LocalCluster, name: str) -> str:
    """The cards that a new node sees."""
    share = cluster._take_cards(name)
    assert share is not None
    cluster.nodes.append(cast(NodeProcess, SimpleNamespace(name=name)))
    return share.environment["CUDA_VISIBLE_DEVICES"]


async def test_each_daemon_of_a_local_cluster_sees_its_own_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four cards for three nodes and one that joins later: one each."""
    monkeypatch.setattr("headway.daemon.local.cluster.machine_cards", lambda _: ("0", "1", "2", "3"))
    cluster = LocalCluster(tmp_path, num_nodes=3, most_nodes=4)
    await cluster._share_cards()
    assert [seat(cluster, f"node-{number}") for number in range(1, 5)] == ["0", "1", "2", "3"]
    assert cluster.card_sharing == ""
    on_cpus = LocalCluster(tmp_path, num_nodes=3, node_settings={"devices": "cpu"})
    await on_cpus._share_cards()
    assert on_cpus._take_cards("node-1") is None


async def test_a_node_takes_the_cards_of_one_that_left_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cards for two nodes: a third would plan with memory that is promised to another, until that one is gone."""
    monkeypatch.setattr("headway.daemon.local.cluster.machine_cards", lambda _: ("0", "1"))
    cluster = LocalCluster(tmp_path, num_nodes=2)
    await cluster._share_cards()
    assert [seat(cluster, f"node-{number}") for number in (1, 2)] == ["0", "1"]
    with pytest.raises(ConfigError, match="cards are dealt out to 2 nodes"):
        seat(cluster, "node-3")
    cluster.nodes = [node for node in cluster.nodes if node.name != "node-1"]
    assert seat(cluster, "node-4") == "0"


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
    monkeypatch.setattr(node_process, "TETHER", "-cimport sys; sys.exit(1)")
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
