"""Files that come from other nodes: whom to ask next, how long to wait, what is taken, and how fast it is sent."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import ConfigError, RecoveryError
from headway.daemon.blobs import peer_client
from headway.daemon.blobs.checkpoint import layer_at
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.blobs.peer_client import holder, layer_request
from headway.daemon.client import export
from headway.daemon.decide.job_view import JobView
from headway.daemon.net.rate_limit import OutgoingTransfers, TransferKind
from headway.proto.control_pb2 import ReadRequest
from headway.stages.errors import UnavailableError
from headway.stages.state.file_digest import FileDigest
from tests.rigs.node_network import DATA, FILE, HELD_BY_B, KEY, Network


async def fetch_from_nodes(
    network: Network, endpoints: list[NodeEndpoint], *, expected: FileDigest = FILE, **how: bool
) -> None:
    """Bring KEY's file from these nodes into the store of a."""
    sources = [holder(network.client, endpoint, KEY, expected, **how) for endpoint in endpoints]
    await network.a.store.bring(KEY, sources.copy, expected=expected)


async def test_a_fetch_resumes_at_the_next_holder_where_the_first_one_broke(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """b breaks off after its first chunk; the second holder is asked for the rest only."""
    await network.b.hold()
    asked: list[int] = []

    read = network.client.read

    async def breaking(endpoint: NodeEndpoint, request: ReadRequest) -> AsyncIterator[bytes]:
        """Loses the first answer after one chunk."""
        asked.append(request.offset)
        async for piece in read(network.b.endpoint, request):
            yield piece
            if endpoint.address == "broken":
                raise UnavailableError("broken", "is gone")

    monkeypatch.setattr(network.client, "read", breaking)
    await fetch_from_nodes(network, [NodeEndpoint("b", "broken"), network.b.endpoint])
    assert asked == [0, 1 << 20]
    assert b"".join(network.a.store.read(KEY)) == DATA
    assert network.a.store.awaited == frozenset()


async def test_a_silent_holder_is_given_up_for_the_next(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts the call and sends nothing, as a stopped process does: the next one gives the file."""
    monkeypatch.setattr(peer_client, "SILENCE_S", 0.3)
    await network.b.hold()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoints = [NodeEndpoint("b", f"127.0.0.1:{silent.getsockname()[1]}"), network.b.endpoint]
        await fetch_from_nodes(network, endpoints)
    assert network.a.store.get(KEY) is not None


async def test_a_file_that_waits_its_turn_on_a_slow_line_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of one address take turns, and each is silent for longer than is allowed while the other moves; one
    that moves no more is given up at last, and so is one whose whole connection is silent.
    """
    monkeypatch.setattr(peer_client, "SILENCE_S", 0.4)
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
            async for piece in peer_client.in_time(endpoint, pieces, heard=heard):
                got.append(piece)
        except UnavailableError:
            return got
        raise AssertionError("it ended")

    first, second = await asyncio.wait_for(asyncio.gather(take(steady()), take(late())), 30.0)
    assert (len(first), second) == (60, [b"y"])


async def test_a_holder_of_altered_bytes_finds_out_and_lets_them_go(network: Network) -> None:
    """b's file was altered after it was registered: a does not take it, and b holds it no more."""
    await network.b.hold(DATA[:-1] + b"!")
    with pytest.raises(RecoveryError, match="is damaged"):
        await fetch_from_nodes(network, [network.b.endpoint])
    assert network.a.store.get(KEY) is None
    assert network.b.store.get(KEY) is None
    await network.b.store.removed()
    assert not network.b.store.path_of(KEY).exists()


async def test_a_file_beyond_the_quota_is_not_fetched(network: Network, tmp_path: Path) -> None:
    """The store has room for one such file: a larger one is refused before a byte moves, from wherever."""
    large = FileDigest(size_bytes=2 * len(DATA), checksum=FILE.checksum)
    with pytest.raises(RecoveryError, match="store_quota_bytes allows"):
        await fetch_from_nodes(network, [network.b.endpoint], expected=large)
    source = layer_at(str(tmp_path), KEY.layer, large, FileThreads("reads"))
    with pytest.raises(RecoveryError, match="store_quota_bytes allows"):
        await network.a.store.bring(KEY, lambda: [source], expected=large)


async def test_a_copy_is_slowed_down_and_a_recovery_is_not(network: Network) -> None:
    """b may send 16 Mbit/s of copies: 2.5 MB of one take over a second, those that a worker waits for are not held."""
    outgoing = network.desks["b"].outgoing = OutgoingTransfers(16.0)
    await network.b.hold()
    began = time.monotonic()
    for unhurried in (True, False):
        endpoints = [network.b.endpoint]
        await fetch_from_nodes(network, endpoints, unhurried=unhurried)
        assert b"".join(network.a.store.read(KEY)) == DATA
        network.a.store.delete(KEY)
    assert time.monotonic() - began > 8 * len(DATA) / 16e6 - 0.2
    assert outgoing.sent[TransferKind.COPY].num_bytes == outgoing.sent[TransferKind.RECOVERY].num_bytes == len(DATA)
    assert outgoing.sent[TransferKind.COPY].held_s > 0.9
    assert outgoing.sent[TransferKind.RECOVERY].held_s == 0


async def test_a_forwarded_copy_is_slowed_down_too(network: Network) -> None:
    """a hands on what b holds, for an export: b is told that nobody waits for it."""
    outgoing = network.desks["b"].outgoing = OutgoingTransfers(1000.0)
    await network.b.hold()
    network.job.state[1, 5] = {"b": HELD_BY_B}
    pieces = network.client.read(network.a.endpoint, layer_request(KEY, forward=True, unhurried=True))
    assert b"".join([piece async for piece in pieces]) == DATA
    assert outgoing.sent[TransferKind.COPY].num_bytes == len(DATA)
    assert network.desks["a"].outgoing.sent[TransferKind.COPY].num_bytes == len(DATA)


async def test_an_export_fetches_from_any_node_and_says_what_it_cannot_write(network: Network, tmp_path: Path) -> None:
    """b holds the file and a does not: the export has its bytes. One line names a folder that cannot be written."""
    await network.b.hold()
    view = network.desks["a"].view
    view.jobs[KEY.job] = JobView(name=KEY.job)
    await export._fetch(network.client, view, KEY, tmp_path / "layer.safetensors", FILE)
    assert (tmp_path / "layer.safetensors").read_bytes() == DATA
    with pytest.raises(ConfigError, match="nowhere: cannot be written to: No such file"):
        await export._fetch(network.client, view, KEY, tmp_path / "nowhere" / "layer.safetensors", FILE)
