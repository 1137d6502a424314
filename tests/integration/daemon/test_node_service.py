"""The Node service over real mTLS channels: files from a store, another node or a checkpoint; data; logs; ways."""

import asyncio
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headway.daemon.agent.probing import measure
from headway.daemon.base import places as checkpoint_place
from headway.daemon.base.errors import ConfigError, RecoveryError
from headway.daemon.blobs.checkpoint import copy_to_checkpoint
from headway.daemon.client.checkpoint_folder import ask_about_folder
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.doctor import examine_ways, examine_ways_from
from headway.daemon.cluster.records import CheckpointRecord, WorkerPort
from headway.daemon.jobs.job import DataSpec
from headway.daemon.net.reach_dial import dial
from headway.daemon.net.reach_target import Target
from headway.daemon.net.reaching import dial_ports
from headway.proto import control_pb2
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import ProtocolError
from tests.rigs.moody_file_system import moody
from tests.rigs.node_network import DATA, FILE, HELD_BY_B, Network


async def test_a_held_file_is_given_from_any_byte(network: Network) -> None:
    """The whole file, the rest of it, and its end."""
    await network.a.hold()
    assert await network.read(network.a) == DATA
    assert await network.read(network.a, offset=1_500_000) == DATA[1_500_000:]
    assert await network.read(network.a, offset=len(DATA)) == b""


async def test_a_node_that_has_it_not_looks_for_a_holder_only_when_asked(network: Network) -> None:
    """b holds the file and etcd says so; a gives it when it may forward, and says what is missing when not."""
    await network.b.hold()
    network.job.state[1, 5] = {"b": HELD_BY_B}
    assert await network.read(network.a, offset=77, forward=True) == DATA[77:]
    with pytest.raises(RecoveryError, match="head at boundary 5 of j, timeline 1: is not held by node a"):
        await network.read(network.a)


async def test_the_checkpoint_is_the_last_resort(network: Network, tmp_path: Path) -> None:
    """Nobody holds the file: it comes from the checkpoint folder; of another boundary there is none."""
    (tmp_path / "head").write_bytes(DATA)
    copy_to_checkpoint(tmp_path / "head", str(tmp_path / "c"), "head")
    network.job.checkpoint = CheckpointRecord(timeline=1, boundary=5, url="c", files={"head": FILE})
    assert await network.read(network.a, forward=True) == DATA
    network.job.checkpoint = CheckpointRecord(timeline=1, boundary=6, url="c", files={"head": FILE})
    with pytest.raises(RecoveryError, match="no node holds it, and it is not the newest checkpoint's"):
        await network.read(network.a, forward=True)


async def test_ways_are_proven_from_the_other_side(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """a and b dial each other; then b's worker has registered a port where nobody listens: the way to it says so."""
    monkeypatch.setattr("headway.daemon.net.reach_dial.PAUSE_S", 0.01)
    for name, desk in network.desks.items():
        prove = partial(dial, identity=network.identity, source=name)
        desk.dial_peers = partial(dial_ports, network.view, name, prove=prove)
    session = cast(ClusterSession, SimpleNamespace(identity=network.identity))
    there, back, all_ways = await examine_ways(session, network.view)
    assert (there.what, back.what, there.is_fine, back.is_fine) == ("a → b", "b → a", True, True)
    assert re.fullmatch(rf"daemon at {network.b.address} answers in \d+ ms", there.found)
    assert all_ways.found == "2 of 2 answer"
    silent = WorkerPort(device_index=0, address="127.0.0.1:1", incarnation="w")
    network.view.nodes["b"] = replace(network.view.nodes["b"], workers=(silent,))
    there, back, all_ways = await examine_ways(session, network.view)
    assert (there.is_fine, back.is_fine, all_ways.is_fine) == (False, True, False)
    assert there.found == "its worker at 127.0.0.1:1: the connection was refused"
    assert "worker_ports" in there.advice


async def test_one_node_proves_that_another_can_be_reached(network: Network) -> None:
    """a dials b and nobody else; b's port is closed then: the line says so. A name that nobody has is the user's."""
    prove = partial(dial, identity=network.identity, source="a")
    network.desks["a"].dial_peers = partial(dial_ports, network.view, "a", prove=prove)
    session = cast(ClusterSession, SimpleNamespace(identity=network.identity))
    network.view.nodes["c"] = replace(network.view.nodes["b"], name="c")
    (way,) = await examine_ways_from(session, network.view, "a", ["b"])
    assert (way.what, way.is_fine) == ("a → b", True)
    ways = await examine_ways_from(session, network.view, "a", [])
    assert [(way.what, way.is_fine) for way in ways] == [("a → b", True), ("a → c", False)]
    assert "c" in ways[1].found
    network.view.nodes["b"] = replace(network.view.nodes["b"], address="127.0.0.1:1")
    (way,) = await examine_ways_from(session, network.view, "a", ["b"])
    assert "its daemon at 127.0.0.1:1: the connection was refused" in way.found
    for source, targets in (("x", ["b"]), ("a", ["x"])):
        with pytest.raises(ConfigError, match="x: no node has this name; the cluster has a, b, c"):
            await examine_ways_from(session, network.view, source, targets)


async def test_a_daemon_dials_nothing_that_is_not_registered(network: Network) -> None:
    """Addresses, strangers' names and its own: nobody's port is touched."""
    dialled: list[Target] = []

    async def prove(target: Target) -> str:
        dialled.append(target)
        return ""

    network.desks["a"].dial_peers = partial(dial_ports, network.view, "a", prove=prove)
    reply = await network.client.dial_peers(network.a.endpoint, ["127.0.0.1:22", network.b.address, "x", "a", "b", "b"])
    assert [port.address for port in reply.ports] == [network.b.address]
    assert [target.node for target in dialled] == ["b"]


async def test_nodes_say_whether_they_can_write_to_a_folder(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked before a job is submitted: no package, no credentials, out of reach, fine. Only stores are tried."""
    session = cast(ClusterSession, SimpleNamespace(identity=network.identity))
    with pytest.raises(ConfigError, match=r"^j\.toml: no node has access to oss://bucket/c, .*Install ossfs"):
        await ask_about_folder(session, network.view, "oss://bucket/c", "j.toml")
    monkeypatch.setattr(checkpoint_place, "STORES", ("moody",))
    with moody() as mood:
        mood.error = lambda: TimeoutError("no answer")
        (line,) = await ask_about_folder(session, network.view, "moody://bucket/c", "")
        assert line.startswith("a cannot write to moody://bucket/c now: ")
        assert "its server does not answer (no answer); the job trains" in line
        mood.error = None
        assert await ask_about_folder(session, network.view, "moody://bucket/c", "") == []
    for folder in ("checkpoints", "file:///tmp/c", "memory://c"):
        with pytest.raises(RecoveryError, match=r"not the URL of a store|not a store that every node"):
            await network.client.try_folder(network.a.endpoint, folder)
    assert await ask_about_folder(session, network.view, "file:///tmp/c", "") == []


async def test_data_comes_from_a_node_that_has_it(network: Network, tmp_path: Path) -> None:
    """b's folder has the data and a has none: a fetches index and shards, verifies them, and can serve them itself."""
    with writing_shards(tmp_path / "shards", DataForm(vocab_size=256)) as writer:
        writer.append(np.arange(5000, dtype=np.uint8))
    sha256 = TokenShards.open(tmp_path / "shards").index.sha256
    await network.b.library.open(DataSpec(source=str(tmp_path / "shards"), sha256=sha256))
    folder = await network.a.library.open(DataSpec(source="/nowhere", sha256=sha256))
    assert folder == network.a.folder / "data" / sha256
    assert TokenShards.open(folder, expected_sha256=sha256).num_tokens == 5000
    assert network.a.library.find(sha256) == folder / "shards.json"
    with pytest.raises(RecoveryError, match=r"/nowhere: no token shards here.*is not on node b"):
        await network.a.library.open(DataSpec(source="/nowhere", sha256="f" * 64))


async def test_a_damaged_copy_of_data_is_replaced_under_its_readers(network: Network, tmp_path: Path) -> None:
    """A shard in the cache was altered while a worker reads it: a new file takes its place, the open one stays.

    Two jobs that ask for it at once both get it.
    """
    with writing_shards(tmp_path / "shards", DataForm(vocab_size=256)) as writer:
        writer.append(np.arange(5000, dtype=np.uint8))
    sha256 = TokenShards.open(tmp_path / "shards").index.sha256
    await network.b.library.open(DataSpec(source=str(tmp_path / "shards"), sha256=sha256))
    elsewhere = DataSpec(source="/nowhere", sha256=sha256)
    folder = await network.a.library.open(elsewhere)
    shard = folder / TokenShards.open(folder).index.shards[0].file
    damaged = bytes(5000)
    shard.write_bytes(damaged)
    with shard.open("rb") as reader:
        opened = await asyncio.gather(network.a.library.open(elsewhere), network.a.library.open(elsewhere))
        assert set(opened) == {folder}
        assert reader.read() == damaged
    assert TokenShards.open(folder, expected_sha256=sha256).num_tokens == 5000
    assert sorted(path.name for path in folder.iterdir()) == sorted([shard.name, "shards.json"])


async def test_a_data_set_is_found_without_its_file_system(network: Network, tmp_path: Path) -> None:
    """Peers are answered in the daemon's one thread: what is served is known by heart, and not read from the folder."""
    with writing_shards(tmp_path / "shards", DataForm(vocab_size=256)) as writer:
        writer.append(np.arange(5000, dtype=np.uint8))
    index = TokenShards.open(tmp_path / "shards").index
    await network.b.library.open(DataSpec(source=str(tmp_path / "shards"), sha256=index.sha256))
    (tmp_path / "shards" / "shards.json").unlink()
    assert network.b.library.find(index.shards[0].sha256) == tmp_path / "shards" / index.shards[0].file
    assert network.b.library.find("f" * 64) is None


async def test_logs_come_from_every_node_that_has_some(network: Network) -> None:
    """Lines of both nodes, each under its name; of one node alone; the last ones only."""
    (network.a.folder / "j.log").write_text("a1\na2\n")
    (network.b.folder / "j.log.1").write_text("b1\n")
    (network.b.folder / "j.log").write_text("b2\n")

    async def ask(**request: Any) -> list[tuple[str, str]]:
        lines = network.client.logs(network.a.endpoint, control_pb2.LogsRequest(job="j", **request))
        return sorted([(line.node, line.text) async for line in lines])

    assert await ask() == [("a", "a1"), ("a", "a2"), ("b", "b1"), ("b", "b2")]
    assert await ask(node="b", last_lines=1) == [("b", "b2")]
    with pytest.raises(RecoveryError, match="node c: is not in the cluster"):
        await ask(node="c")


async def test_a_followed_log_goes_on_with_what_is_written_later(network: Network) -> None:
    """The reader has the first line and waits; a line is written on the other node: it comes."""
    log = network.b.folder / "j.log"
    log.write_text("first\n")
    lines = network.client.logs(network.a.endpoint, control_pb2.LogsRequest(job="j", node="b", follow=True))
    assert (await anext(lines)).text == "first"
    with log.open("a") as file:
        file.write("second\n")
    assert (await anext(lines)).text == "second"
    await lines.aclose()  # type: ignore[attr-defined]


async def test_a_name_that_is_a_path_is_refused(network: Network) -> None:
    """A job called ../x would read somebody else's file, and one with a zero byte would be an error of the daemon."""
    for name in ("../authority", "a\0b", "", "x" * 300):
        with pytest.raises(RecoveryError, match="is not a job's name"):
            [line async for line in network.client.logs(network.a.endpoint, control_pb2.LogsRequest(job=name))]


async def test_a_node_measures_the_way_to_another(network: Network) -> None:
    """Five pings and 4 MiB over mTLS: a round trip of less than a second, more than a MB/s; too much is refused."""
    probe = await measure(network.client, network.b.endpoint)
    assert 0 < probe.round_trip_s < 1.0
    assert probe.bytes_per_s > 1e6
    received = [chunk async for chunk in network.client.probe(network.b.endpoint, 2_500_000, timeout_s=10.0)]
    assert sum(len(chunk.data) for chunk in received) == 2_500_000
    assert probe.loss == 0.0
    counted = [chunk async for chunk in network.client.probe(network.b.endpoint, 10, timeout_s=10.0, counted=True)]
    assert [len(chunk.data) for chunk in counted] == [0, 10]
    assert counted[0].num_segments > 1  # what came before went over the same connection
    with pytest.raises(ProtocolError, match="at most"):
        _ = [chunk async for chunk in network.client.probe(network.b.endpoint, 1 << 30, timeout_s=10.0)]
