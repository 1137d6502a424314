"""The Node service over real mTLS channels: files from a store, another node or a checkpoint; data; logs."""

import asyncio
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from headway.daemon.addresses import NodeEndpoint
from headway.daemon.certificates import CertificateAuthority
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.folder_access import folder_access
from headway.daemon.client.ways import examine_ways
from headway.daemon.coordination.cluster_view import ClusterView, JobView
from headway.daemon.data.library import DataLibrary
from headway.daemon.errors import ConfigError, RecoveryError
from headway.daemon.jobs import checkpoint_place
from headway.daemon.jobs.job import DataSpec, JobSection, JobSpec
from headway.daemon.node.dial_back import DialBack
from headway.daemon.node.outgoing import OutgoingTransfers, TransferKind
from headway.daemon.node.peer_client import NodeClient
from headway.daemon.node.probing import measure
from headway.daemon.node.reach_dial import dial
from headway.daemon.node.reach_target import Target
from headway.daemon.node.service import NodeDesk, add_node_service, bind_node_service
from headway.daemon.node.trace_source import measure_clock
from headway.daemon.records import (
    CheckpointFile,
    CheckpointRecord,
    NodeRecord,
    PlanRecord,
    SpecRecord,
    StagePlan,
    StateFile,
    StateRecord,
    WorkerPort,
)
from headway.daemon.storage import transfer
from headway.daemon.storage.checkpoint import copy_to_checkpoint
from headway.daemon.storage.file_threads import FileThreads
from headway.daemon.storage.state_key import StateKey
from headway.daemon.storage.state_store import StateStore
from headway.daemon.storage.transfer import fetch_checkpointed, fetch_from_nodes
from headway.proto import control_pb2
from headway.stages.errors import ProtocolError, UnavailableError
from headway.stages.shard_writer import writing_shards
from headway.stages.state_file import StateHeader, write_state
from headway.stages.tls_identity import TlsIdentity
from headway.stages.tokens import TokenShards
from tests.fakes.moody_file_system import moody

KEY = StateKey("j", 1, 5, "head")


def state_file() -> tuple[bytes, CheckpointFile]:
    """A state file of some 2.5 MB: three chunks."""
    header = StateHeader(job="j", layer="head", boundary=5, timeline=1, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        written = write_state(path, {"weight": torch.arange(640_000, dtype=torch.float32)}, header)
        return path.read_bytes(), CheckpointFile(size_bytes=written.size_bytes, checksum=written.checksum)


DATA, FILE = state_file()
HELD_BY_B = StateRecord(
    incarnation="b-1", generation=1, files={"head": StateFile(size_bytes=FILE.size_bytes, checksum=FILE.checksum)}
)


@dataclass
class Node:
    """A Node service in this process."""

    name: str
    address: str
    store: StateStore
    library: DataLibrary
    folder: Path

    @property
    def endpoint(self) -> NodeEndpoint:
        """Where it is dialled."""
        return NodeEndpoint(self.name, self.address)

    def hold(self, data: bytes = DATA) -> None:
        """Put KEY's file into its store."""
        path = self.store.path_of(KEY)
        path.write_bytes(data)
        self.store.adopt(KEY, path, size_bytes=len(data), checksum=FILE.checksum)


@dataclass
class Network:
    """Two nodes, `a` and `b`, that see one cluster."""

    a: Node
    b: Node
    desks: dict[str, NodeDesk]
    view: ClusterView
    client: NodeClient
    identity: TlsIdentity

    @property
    def job(self) -> JobView:
        return self.view.jobs["j"]

    async def read(self, node: Node, *, offset: int = 0, forward: bool = False) -> bytes:
        """KEY's file, as a node gives it."""
        pieces = self.client.fetch_state(node.endpoint, KEY, offset=offset, forward=forward)
        return b"".join([piece async for piece in pieces])


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    """Both services on the loopback, with certificates of one authority."""
    authority = CertificateAuthority.create(tmp_path / "authority")
    identity = TlsIdentity.read(authority.issue("test"))
    client = NodeClient(identity)
    job = JobView(name="j", submission=SpecRecord(spec=JobSpec(job=JobSection(name="j"))))
    view = ClusterView(jobs={"j": job})
    nodes, servers, desks = [], [], {}
    for name in "ab":
        folder = tmp_path / name
        store = StateStore(folder / "store", quota_bytes=len(DATA) + 1000)
        store.open()
        server, port = bind_node_service(TlsIdentity.read(authority.issue(name)), "127.0.0.1", 0)

        def others(name: str = name) -> list[NodeEndpoint]:
            return [record.endpoint for record in view.nodes.values() if record.name != name]

        library = DataLibrary(folder / "data", client, others)
        desks[name] = desk = NodeDesk(
            node=name,
            incarnation=f"{name}-1",
            view=view,
            store=store,
            library=library,
            client=client,
            logs_dir=folder,
            checkpoint_root=tmp_path,
            is_etcd_reachable=lambda: False,
        )
        add_node_service(server, desk)
        await server.start()
        servers.append(server)
        address = f"127.0.0.1:{port}"
        view.nodes[name] = NodeRecord(
            name=name,
            incarnation=f"{name}-1",
            address=address,
            host="127.0.0.1",
            site="",
            devices=(),
            memory_bytes=0,
            arithmetic_class="",
        )
        nodes.append(Node(name, address, store, library, folder))
    yield Network(nodes[0], nodes[1], desks, view, client, identity)
    await client.close()
    for server in servers:
        await server.stop(None)


async def test_a_held_file_is_given_from_any_byte(network: Network) -> None:
    """The whole file, the rest of it, and its end."""
    network.a.hold()
    assert await network.read(network.a) == DATA
    assert await network.read(network.a, offset=1_500_000) == DATA[1_500_000:]
    assert await network.read(network.a, offset=len(DATA)) == b""


async def test_a_node_that_has_it_not_looks_for_a_holder_only_when_asked(network: Network) -> None:
    """b holds the file and etcd says so; a gives it when it may forward, and says what is missing when not."""
    network.b.hold()
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


async def test_a_daemon_at_another_nodes_address_answers_for_nobody(network: Network) -> None:
    """a is asked for at b's address, as after a change of addresses: b's certificate is not a's."""
    with pytest.raises(UnavailableError, match="does not carry the expected name") as caught:
        await network.client.describe(NodeEndpoint("a", network.b.address))
    assert caught.value.peer == f"node a at {network.b.address}"


async def test_ways_are_proven_from_the_other_side(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """a and b dial each other; then b's worker has registered a port where nobody listens: the way to it says so."""
    monkeypatch.setattr("headway.daemon.node.reach_dial.PAUSE_S", 0.01)
    for name, desk in network.desks.items():
        prove = partial(dial, identity=network.identity, source=name)
        desk.dial_peers = DialBack(network.view, node=name, prove=prove).dial
    session = cast(ClusterSession, SimpleNamespace(identity=network.identity))
    there, back, all_ways = await examine_ways(session, network.view)
    assert (there.what, back.what, there.is_fine, back.is_fine) == ("a → b", "b → a", True, True)
    assert there.found == f"daemon at {network.b.address} answers"
    assert all_ways.found == "2 of 2 answer"
    silent = WorkerPort(device_index=0, address="127.0.0.1:1", incarnation="w")
    network.view.nodes["b"] = replace(network.view.nodes["b"], workers=(silent,))
    there, back, all_ways = await examine_ways(session, network.view)
    assert (there.is_fine, back.is_fine, all_ways.is_fine) == (False, True, False)
    assert there.found == "its worker at 127.0.0.1:1: the connection was refused"
    assert "worker_ports" in there.advice


async def test_a_daemon_dials_nothing_that_is_not_registered(network: Network) -> None:
    """Addresses, strangers' names and its own: nobody's port is touched."""
    dialled: list[Target] = []

    async def prove(target: Target) -> str:
        dialled.append(target)
        return ""

    network.desks["a"].dial_peers = DialBack(network.view, node="a", prove=prove).dial
    reply = await network.client.dial_peers(network.a.endpoint, ["127.0.0.1:22", network.b.address, "x", "a", "b", "b"])
    assert [port.address for port in reply.ports] == [network.b.address]
    assert [target.node for target in dialled] == ["b"]


async def test_nodes_say_whether_they_can_write_to_a_folder(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked before a job is submitted: no package, no credentials, out of reach, fine. Only stores are tried."""
    session = cast(ClusterSession, SimpleNamespace(identity=network.identity))
    found = await folder_access(session, network.view, "oss://bucket/c")
    assert found.lacking.keys() == {"a", "b"}
    with pytest.raises(ConfigError, match=r"^j\.toml: no node has access to oss://bucket/c, .*Install ossfs"):
        found.check("j.toml")
    monkeypatch.setattr(checkpoint_place, "_SHARED", ("moody",))
    with moody() as mood:
        mood.error = lambda: TimeoutError("no answer")
        found = await folder_access(session, network.view, "moody://bucket/c")
        found.check("")
        (line,) = found.warnings
        assert line.startswith("a cannot write to moody://bucket/c now: ")
        assert "its server does not answer (no answer); the job trains" in line
        mood.error = None
        found = await folder_access(session, network.view, "moody://bucket/c")
        assert (found.num_able, found.warnings) == (2, [])
    for folder in ("checkpoints", "file:///tmp/c", "memory://c"):
        with pytest.raises(RecoveryError, match=r"no URL of a store|no store that every node"):
            await network.client.try_folder(network.a.endpoint, folder)
    assert (await folder_access(session, network.view, "file:///tmp/c")).num_able == 0


async def test_a_fetch_goes_on_at_the_next_holder(network: Network) -> None:
    """The first holder is gone, the second gives it: the file is in the store, verified."""
    network.b.hold()
    endpoints = [NodeEndpoint("b", "127.0.0.1:1"), network.b.endpoint]
    await fetch_from_nodes(network.a.store, network.client, KEY, endpoints=endpoints, expected=FILE)
    assert b"".join(network.a.store.read(KEY)) == DATA


async def test_a_fetch_resumes_at_the_next_holder_where_the_first_one_broke(network: Network) -> None:
    """b breaks off after its first chunk; the second holder is asked for the rest only."""
    network.b.hold()
    asked: list[int] = []

    class Breaking(NodeClient):
        """Loses the first answer after one chunk."""

        async def fetch_state(
            self, endpoint: NodeEndpoint, key: StateKey, *, offset: int = 0, **_: Any
        ) -> AsyncIterator[Any]:
            asked.append(offset)
            async for piece in network.client.fetch_state(network.b.endpoint, key, offset=offset):
                yield piece
                if endpoint.address == "broken":
                    raise UnavailableError("broken", "is gone")

    client = Breaking.__new__(Breaking)
    client.heard = {}
    endpoints = [NodeEndpoint("b", "broken"), network.b.endpoint]
    await fetch_from_nodes(network.a.store, client, KEY, endpoints=endpoints, expected=FILE)
    assert asked == [0, 1 << 20]
    assert b"".join(network.a.store.read(KEY)) == DATA
    assert network.a.store.awaited == frozenset()


async def test_a_silent_holder_is_given_up_for_the_next(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts the call and sends nothing, as a stopped process does: the next one gives the file."""
    monkeypatch.setattr(transfer, "SILENCE_S", 0.3)
    network.b.hold()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoints = [NodeEndpoint("b", f"127.0.0.1:{silent.getsockname()[1]}"), network.b.endpoint]
        await fetch_from_nodes(network.a.store, network.client, KEY, endpoints=endpoints, expected=FILE)
    assert network.a.store.get(KEY) is not None


async def test_a_file_that_waits_its_turn_on_a_slow_line_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of one address take turns, and each is silent for longer than is allowed while the other moves; one
    that moves no more is given up at last, and so is one whose whole connection is silent.
    """
    monkeypatch.setattr(transfer, "SILENCE_S", 0.4)
    endpoint, heard, moved = NodeEndpoint("b", "b:1"), {}, asyncio.Event()  # type: ignore[var-annotated]

    async def steady() -> AsyncIterator[bytes]:
        for _ in range(60):
            await asyncio.sleep(0.02)
            yield b"x"
        moved.set()
        await asyncio.Event().wait()

    async def late() -> AsyncIterator[bytes]:
        await moved.wait()
        yield b"y"
        await asyncio.Event().wait()

    async def take(pieces: AsyncIterator[bytes]) -> list[bytes]:
        got: list[bytes] = []
        try:
            async for piece in transfer.in_time(endpoint, pieces, heard=heard):
                got.append(piece)
        except UnavailableError:
            return got
        raise AssertionError("it ended")

    first, second = await asyncio.wait_for(asyncio.gather(take(steady()), take(late())), 30.0)
    assert (len(first), second) == (60, [b"y"])


async def test_a_checkpoint_is_read_by_way_of_another_node(network: Network, tmp_path: Path) -> None:
    """a cannot read the checkpoint folder and b can: b reads it, a has the file, verified."""
    network.b.hold()
    held = network.b.store.get(KEY)
    assert held is not None
    folder = str(tmp_path / "checkpoints")
    copy_to_checkpoint(held.path, folder, "head")
    network.b.store.delete(KEY)
    job = JobView(name=KEY.job, checkpoint=CheckpointRecord(timeline=1, boundary=5, url=folder, files={"head": FILE}))
    network.desks["b"].view.jobs[KEY.job] = job
    endpoints = [network.b.endpoint]
    with pytest.raises(RecoveryError, match="is not held by node b"):
        await fetch_from_nodes(network.a.store, network.client, KEY, endpoints=endpoints, expected=FILE)
    await fetch_from_nodes(network.a.store, network.client, KEY, endpoints=endpoints, expected=FILE, is_forwarded=True)
    assert b"".join(network.a.store.read(KEY)) == DATA


async def test_a_holder_of_altered_bytes_finds_out_and_lets_them_go(network: Network) -> None:
    """b's file was altered after it was registered: a does not take it, and b holds it no more."""
    network.b.hold(DATA[:-1] + b"!")
    with pytest.raises(RecoveryError, match="arrived damaged"):
        await fetch_from_nodes(network.a.store, network.client, KEY, endpoints=[network.b.endpoint], expected=FILE)
    assert network.a.store.get(KEY) is None
    assert network.b.store.get(KEY) is None
    assert not network.b.store.path_of(KEY).exists()


async def test_a_file_beyond_the_quota_is_not_fetched(network: Network, tmp_path: Path) -> None:
    """The store has room for one such file: a larger one is refused before a byte moves, from wherever."""
    large = CheckpointFile(size_bytes=2 * len(DATA), checksum=FILE.checksum)
    with pytest.raises(RecoveryError, match="store_quota_bytes allows"):
        await fetch_from_nodes(network.a.store, network.client, KEY, endpoints=[network.b.endpoint], expected=large)
    with pytest.raises(RecoveryError, match="store_quota_bytes allows"):
        await fetch_checkpointed(network.a.store, FileThreads("reads"), KEY, url=str(tmp_path), expected=large)


async def test_a_copy_is_slowed_down_and_a_recovery_is_not(network: Network) -> None:
    """b may send 16 Mbit/s of copies: 2.5 MB of one take over a second, those that a worker waits for are not held."""
    outgoing = network.desks["b"].outgoing = OutgoingTransfers(16.0)
    network.b.hold()
    began = time.monotonic()
    for unhurried in (True, False):
        endpoints = [network.b.endpoint]
        await fetch_from_nodes(
            network.a.store, network.client, KEY, endpoints=endpoints, expected=FILE, unhurried=unhurried
        )
        assert b"".join(network.a.store.read(KEY)) == DATA
        network.a.store.delete(KEY)
    assert time.monotonic() - began > 8 * len(DATA) / 16e6 - 0.2
    assert outgoing.sent[TransferKind.COPY].num_bytes == outgoing.sent[TransferKind.RECOVERY].num_bytes == len(DATA)
    assert outgoing.sent[TransferKind.COPY].held_s > 0.9
    assert outgoing.sent[TransferKind.RECOVERY].held_s == 0


async def test_a_forwarded_copy_is_slowed_down_too(network: Network) -> None:
    """a hands on what b holds, for an export: b is told that nobody waits for it."""
    outgoing = network.desks["b"].outgoing = OutgoingTransfers(1000.0)
    network.b.hold()
    network.job.state[1, 5] = {"b": HELD_BY_B}
    pieces = network.client.fetch_state(network.a.endpoint, KEY, forward=True, unhurried=True)
    assert b"".join([piece async for piece in pieces]) == DATA
    assert outgoing.sent[TransferKind.COPY].num_bytes == len(DATA)
    assert network.desks["a"].outgoing.sent[TransferKind.COPY].num_bytes == len(DATA)


async def test_data_comes_from_a_node_that_has_it(network: Network, tmp_path: Path) -> None:
    """b's folder has the data and a has none: a fetches index and shards, verifies them, and can serve them itself."""
    with writing_shards(tmp_path / "shards", vocab_size=256) as writer:
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
    with writing_shards(tmp_path / "shards", vocab_size=256) as writer:
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
    with writing_shards(tmp_path / "shards", vocab_size=256) as writer:
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
    """A job called ../x would read somebody else's file."""
    with pytest.raises(RecoveryError, match="is no name of a job"):
        [line async for line in network.client.logs(network.a.endpoint, control_pb2.LogsRequest(job="../authority"))]


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


def plan_on(*nodes: str) -> PlanRecord:
    """One stage per node."""
    stages = [
        StagePlan(node=node, node_incarnation=f"{node}-1", device_index=0, layers=(f"block.{index}",), depth=1)
        for index, node in enumerate(nodes)
    ]
    return PlanRecord(generation=3, timeline=1, stages=tuple(stages))


def operations_at(clock_s: float, *, worker: int, generation: int = 3) -> control_pb2.RecentOperations:
    """One forward that has just ended by some clock."""
    return control_pb2.RecentOperations(
        job="j",
        generation=generation,
        worker=worker,
        kinds=b"F",
        batches=[7],
        microbatches=[0],
        versions=[6],
        started_s=[clock_s - 0.5],
        ended_s=[clock_s],
    )


async def test_a_trace_tells_how_far_the_clocks_are_apart(network: Network) -> None:
    """b's clock is a thousand seconds ahead: whichever node is asked says so, to within half a round trip."""
    network.job.plan = plan_on("a", "b")
    ahead_s = {"a": 0.0, "b": 1000.0}
    for position, (name, desk) in enumerate(network.desks.items()):
        desk.clock = lambda ahead_s=ahead_s[name]: time.perf_counter() + ahead_s  # type: ignore[misc]

        async def told(device_index: int, desk: NodeDesk = desk, worker: int = position) -> Any:
            assert device_index == 0
            return operations_at(desk.clock(), worker=worker)

        desk.recent_operations = told
    for asked in (network.a, network.b):
        traces = {trace.node: trace async for trace in network.client.trace(asked.endpoint, "j")}
        assert [traces[name].worker for name in "ab"] == [0, 1]
        own, other = (traces[name] for name in (asked.name, "b" if asked is network.a else "a"))
        assert (own.clock_ahead_s, own.clock_error_s) == (0.0, 0.0)
        expected = ahead_s[other.node] - ahead_s[asked.name]
        assert abs(other.clock_ahead_s - expected) <= other.clock_error_s < 1.0
        assert other.operations.batches == [7]


async def test_two_daemons_of_one_machine_have_one_clock(network: Network) -> None:
    """No offset that could be told from none: none is applied."""
    assert await measure_clock(network.client, network.b.endpoint, clock=time.perf_counter) == (0.0, 0.0)


async def test_a_trace_says_who_is_missing_from_it(network: Network) -> None:
    """a has workers of a generation that is over, b none yet, c is gone: three sentences and no operation."""
    network.job.plan = plan_on("a", "b", "c")

    async def of_before(device_index: int) -> Any:
        return operations_at(1.0, worker=device_index, generation=2)

    network.desks["a"].recent_operations = of_before
    traces = {trace.node: trace.trouble async for trace in network.client.trace(network.a.endpoint, "j")}
    assert traces == {
        "a": "the worker on node a has not begun generation 3",
        "b": "worker 0: is not up yet",
        "c": "node c: is gone",
    }
    network.job.plan = None
    with pytest.raises(RecoveryError, match="job j: is queued: nothing runs that could be traced"):
        _ = [trace async for trace in network.client.trace(network.a.endpoint, "j")]
    with pytest.raises(RecoveryError, match="job k: there is no such job"):
        _ = [trace async for trace in network.client.trace(network.a.endpoint, "k")]
