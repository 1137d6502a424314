"""A client of the Node service over time: streams without a word live on, and channels that nobody uses go."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.node.stream_limits import bind_node_service
from headway.proto import control_pb2, control_pb2_grpc
from headway.stages.errors import UnavailableError
from headway.stages.sockets.tls_identity import TlsIdentity

KEEPALIVE_S = 1.0
"""gRPC pings no more often than this."""
PINGS = 4
"""The first is allowed, two are forgiven."""
DEADLINE_S = 30.0


class Quiet(control_pb2_grpc.NodeServicer):
    """Says one word on a stream and then nothing."""

    async def Accompany(self, request: Any, context: Any) -> AsyncIterator[control_pb2.AccompanyReply]:  # noqa: ARG002, N802
        yield control_pb2.AccompanyReply(incarnation="one")
        await asyncio.Event().wait()

    async def Describe(self, request: Any, context: Any) -> control_pb2.DescribeReply:  # noqa: ARG002, N802
        return control_pb2.DescribeReply(node="quiet")


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path / "authority")


@asynccontextmanager
async def quiet_server(authority: CertificateAuthority) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    """Start a server as a daemon does, with its keepalive ten times as fast."""
    identity = TlsIdentity.read(authority.issue("node"))
    server, port = bind_node_service(identity, "127.0.0.1", 0, keepalive_s=KEEPALIVE_S)
    control_pb2_grpc.add_NodeServicer_to_server(Quiet(), server)
    await server.start()
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def node_client(authority: CertificateAuthority, **options: float) -> AsyncIterator[NodeClient]:
    client = NodeClient(TlsIdentity.read(authority.issue("client")), **options)
    try:
        yield client
    finally:
        await client.close()


async def test_a_stream_without_a_word_outlives_many_pings(authority: CertificateAuthority) -> None:
    """More pings go by than a server that was told nothing forgives: the stream is still there."""
    async with quiet_server(authority) as (_, address), node_client(authority, keepalive_s=KEEPALIVE_S) as client:
        stream = client.accompany(NodeEndpoint("", address), "me")
        assert (await asyncio.wait_for(anext(stream), DEADLINE_S)).incarnation == "one"
        waiting = asyncio.ensure_future(anext(stream))
        done, _ = await asyncio.wait({waiting}, timeout=(PINGS + 0.5) * KEEPALIVE_S)
        assert not done, waiting.exception()
        waiting.cancel()
        await asyncio.wait({waiting})


async def test_an_address_that_does_not_answer_is_dialled_by_calls_alone(authority: CertificateAuthority) -> None:
    """Whoever listens there hangs up each time: two calls are two dials or a retry more, and then there is peace."""
    num_dials = 0
    dialled = asyncio.Event()

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_dials
        num_dials += 1
        dialled.set()
        writer.close()

    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener, node_client(authority) as client:
        for _ in range(2):
            with pytest.raises(UnavailableError):
                await client.describe(NodeEndpoint("", address))
        assert client.addresses == ()
        await asyncio.sleep(0)
        dialled.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(dialled.wait(), 1.5)  # gRPC's next attempt would come within a second


async def test_a_channel_that_nobody_uses_goes_and_one_in_use_stays(authority: CertificateAuthority) -> None:
    """Three nodes answer; a stream to one goes on. The next call, much later, leaves the two that are in use."""
    async with (
        quiet_server(authority) as (_, followed),
        quiet_server(authority) as (_, left),
        quiet_server(authority) as (_, asked),
        node_client(authority, idle_s=0.0) as client,
    ):
        stream = client.accompany(NodeEndpoint("", followed), "me")
        await asyncio.wait_for(anext(stream), DEADLINE_S)
        await client.describe(NodeEndpoint("", left))
        assert client.addresses == (followed, left)
        client._heard.update(dict.fromkeys((followed, left), 1.0))
        await client.describe(NodeEndpoint("", asked))
        assert client.addresses == (followed, asked)
        assert client._heard.keys() == {followed}
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait({waiting})


async def test_a_cancelled_call_that_was_never_answered_leaves_no_channel(authority: CertificateAuthority) -> None:
    """Nobody accepts: whoever gives up waiting takes the channel with him."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with node_client(authority) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(client.accompany(NodeEndpoint("", address), "me")), 0.2)
            assert client.addresses == ()
