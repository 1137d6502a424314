"""A stop is over when every file that it is for is where it must be, and not one file earlier."""

from dataclasses import replace

import pytest

from headway.daemon.coordination.cluster_view import ClusterView
from headway.daemon.coordination.commands import Command, Transaction, WriteManifest
from headway.daemon.coordination.coordinator import decide
from headway.daemon.records import Desired, Keys, Phase, StateRecord, decode, encode
from tests.fakes.simulated_cluster import SimulatedCluster, small_spec


def stopping(save: str) -> SimulatedCluster:
    """Two nodes whose workers have all stopped and saved, for a third node or a pause; no leader has looked yet."""
    cluster = SimulatedCluster()
    for name in ("a", "b"):
        cluster.add_node(name)
    cluster.submit(small_spec("first", batches=200))
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RUNNING)
    cluster.calm(max_rounds=3)
    if save == "moves":
        cluster.add_node("c")
    else:
        cluster.want("first", Desired.PAUSED)
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.STOPPING)
    for _ in range(20):
        for name in sorted(cluster.nodes):
            cluster.deliver(cluster.nodes[name])
            cluster.act(cluster.nodes[name])
        cluster.train()
    return cluster


def decided(cluster: SimulatedCluster, view: ClusterView) -> list[Command]:
    return list(decide(view, now=cluster.now).commands)


@pytest.mark.parametrize("save", ["moves", "checkpoint"])
def test_a_stop_waits_for_every_file(save: str) -> None:
    """All stopped and all saved → the next step. One file missing, whichever → nothing, until it is there."""
    cluster = stopping(save)
    [command] = decided(cluster, cluster.truth())
    assert isinstance(command, Transaction if save == "moves" else WriteManifest)
    files = sorted(key for key in cluster.store.values if key.startswith(Keys.job("first") + "state/"))
    assert any(key.split("/")[-2] == "journal" for key in files)
    assert len(files) >= 2
    for key in files:
        view = cluster.truth()
        view.apply(key, None, mod_revision=cluster.store.revision + 1, create_revision=0, now=cluster.now)
        assert decided(cluster, view) == [], key


def test_a_checkpoint_waits_until_every_file_is_durable() -> None:
    """A file that only its node holds → no manifest."""
    cluster = stopping("checkpoint")
    for key in [key for key in cluster.store.values if key.startswith(Keys.job("first") + "state/")]:
        view = cluster.truth()
        held = replace(decode(cluster.store.values[key], StateRecord), is_durable=False)
        revision = cluster.store.revision + 1
        view.apply(key, encode(held), mod_revision=revision, create_revision=revision, now=cluster.now)
        assert decided(cluster, view) == [], key
