"""A stop is over when every file that it is for is where it must be, and not one file earlier."""

from dataclasses import replace

import pytest

from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Desired, Phase, PhaseRecord, StateFile, StateRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.commands import Command, Transaction, WriteManifest
from headway.daemon.decide.coordinator import decide
from headway.daemon.jobs.job import FaultSpec
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec


def stopping(save: str) -> SimulatedCluster:
    """Two nodes whose workers have all stopped and saved, for a third node or a pause; no leader has looked yet."""
    cluster = SimulatedCluster()
    for name in ("a", "b"):
        cluster.add_node(name)
    cluster.submit(small_spec("first", batches=200, fault=FaultSpec(copies=1, snapshot_every=0, checkpoint_every=0)))
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
    records = {key: raw for key, raw in cluster.store.values.items() if key.startswith(Keys.job("first") + "state/")}
    num_files = 0
    for key, raw in records.items():
        record = decode(raw, StateRecord)
        for part in record.files:
            boundary = cluster.truth().jobs["first"].stop
            if boundary is None or f"/{boundary.boundary:010d}/" not in key or len(_holders(cluster, key, part)) > 1:
                continue
            num_files += 1
            less = replace(record, files={name: file for name, file in record.files.items() if name != part})
            assert decided(cluster, shown(cluster, key, less)) == [], (key, part)
    assert num_files >= 2


@pytest.mark.parametrize("save", ["checkpoint"])
def test_a_checkpoint_waits_until_every_file_is_durable(save: str) -> None:
    """A file that only its node holds → no manifest."""
    cluster = stopping(save)
    for key, raw in list(cluster.store.values.items()):
        if key.startswith(Keys.job("first") + "state/"):
            record = decode(raw, StateRecord)
            for part, file in record.files.items():
                if len(_holders(cluster, key, part)) == 1:
                    files = record.files | {part: replace(file, is_durable=False)}
                    assert decided(cluster, shown(cluster, key, replace(record, files=files))) == [], (key, part)


@pytest.mark.parametrize(
    ("trouble", "after_s", "is_failed"), [("", 200, True), ("away", 200, False), ("away", 800, True)]
)
def test_a_checkpoint_folder_that_is_away_is_waited_for(trouble: str, after_s: float, is_failed: bool) -> None:
    """The stop waits ten more minutes for a file whose node reports the outage; without a report it is late."""
    cluster = stopping("checkpoint")
    boundary = cluster.truth().jobs["first"].stop
    assert boundary is not None
    key = next(
        key
        for key in cluster.store.values
        if key.startswith(Keys.job("first") + "state/") and f"/{boundary.boundary:010d}/" in key
    )
    record = decode(cluster.store.values[key], StateRecord)
    files = {part: replace(file, is_durable=False) for part, file in record.files.items()}
    view = shown(cluster, key, replace(record, files=files, trouble=trouble))
    phases = [
        decode(raw, PhaseRecord)
        for command in decide(view, now=cluster.now + after_s).commands
        if isinstance(command, Transaction) and (raw := command.puts.get(Keys.of("first", "phase")))
    ]
    assert [phase.phase for phase in phases] == [Phase.FAILED if is_failed else Phase.STOPPING], (
        "an event tells of an outage"
    )
    assert trouble in phases[0].reason or not is_failed


def shown(cluster: SimulatedCluster, key: str, record: StateRecord) -> ClusterView:
    """Return etcd's content with another record there."""
    view = cluster.truth()
    revision = cluster.store.revision + 1
    view.apply(key, encode(record), mod_revision=revision, create_revision=revision, now=cluster.now)
    return view


def _holders(cluster: SimulatedCluster, key: str, part: str) -> dict[str, StateFile]:
    timeline, boundary = (int(piece) for piece in key.split("/")[-3:-1])
    return cluster.truth().jobs["first"].holders(timeline, boundary, part)
