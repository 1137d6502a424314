"""Strangers at a daemon's port, with and without a certificate: limits that are small here, over real sockets."""

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.cluster.records import Phase
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.node.service import add_node_service
from headway.daemon.node.stream_limits import CallLimit, StreamLimits, bind_node_service
from headway.proto import control_pb2, control_pb2_grpc
from headway.stages.errors import UnavailableError
from headway.stages.sockets.open_files import server_limits
from headway.stages.sockets.tls_identity import TlsIdentity, expecting
from tests.rigs.node_network import desk_of

NUM_CONNECTIONS = 50
HANDSHAKE_S = 1.0
STALL_S = 0.5


@dataclass
class Guarded:
    """A daemon's service with small limits."""

    port: int
    identity: TlsIdentity
    client: NodeClient

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> NodeEndpoint:
        return NodeEndpoint("test", self.address)

    def channel(self) -> grpc.aio.Channel:
        """A connection of its own."""
        credentials = grpc.ssl_channel_credentials(self.identity.ca, self.identity.key, self.identity.certificate)
        options = (*expecting("test"), ("grpc.use_local_subchannel_pool", 1))
        return grpc.aio.secure_channel(self.address, credentials, options=options)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    """Up for one test."""
    authority = CertificateAuthority.create(tmp_path / "authority")
    identity = TlsIdentity.read(authority.issue("test"))
    limits = server_limits(streams_per_connection=100, num_connections=NUM_CONNECTIONS, handshake_timeout_s=HANDSHAKE_S)
    stream_limits = StreamLimits(limits={"Probe": CallLimit(in_all=4, per_connection=2)}, stall_s=STALL_S)
    server, port = bind_node_service(identity, "127.0.0.1", 0, limits=limits, stream_limits=stream_limits)
    client = NodeClient(identity)
    desk = desk_of("a", tmp_path, client)
    add_node_service(server, desk)
    await server.start()
    yield Guarded(port, identity, client)
    desk.ending.set()
    await client.close()
    await server.stop(None)


def num_open_files() -> int:
    """Return the number of open files of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def is_closed(one: socket.socket) -> bool:
    """Return whether the other end has closed it."""
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


async def until(claim: object, *, limit_s: float = 20.0) -> None:
    """Wait for a claim; fails after the limit."""
    assert callable(claim)
    deadline = time.monotonic() + limit_s
    while not claim():
        assert time.monotonic() < deadline, "not within the limit"
        await asyncio.sleep(0.02)


async def test_idle_connections_are_limited_by_number_and_time(guarded: Guarded) -> None:
    """A hundred connections say nothing: half are closed at once, half in time; who was there stays, others come."""
    before = await guarded.client.describe(guarded.endpoint)
    num_files = num_open_files()
    async with guarded.channel() as late:
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(socket.create_connection(("127.0.0.1", guarded.port))) for _ in range(100)]
            for one in idle:
                one.setblocking(False)
            await until(lambda: sum(map(is_closed, idle)) >= 50)
            assert num_open_files() <= num_files + 100 + NUM_CONNECTIONS
            assert (await guarded.client.describe(guarded.endpoint)).incarnation == before.incarnation
            await until(lambda: all(map(is_closed, idle)))
        stub = control_pb2_grpc.NodeStub(late)
        reply = await stub.Describe(control_pb2.DescribeRequest(), timeout=20, wait_for_ready=True)
        assert reply.node == "a"


async def test_probes_beyond_the_limit_are_busy(guarded: Guarded) -> None:
    """Four of twelve unread probes run; the others hear that the node is busy, which is no fault."""
    async with guarded.channel() as one, guarded.channel() as two, guarded.channel() as three:
        request = control_pb2.ProbeRequest(num_bytes=16 << 20)
        calls = [control_pb2_grpc.NodeStub(channel).Probe(request) for channel in (one, two, three) for _ in range(4)]
        found = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
        codes = [error.code() for error in found if isinstance(error, grpc.aio.AioRpcError)]
        assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 8
        with pytest.raises(UnavailableError, match="busy: 4 calls of Probe"):
            async for _ in guarded.client.probe(guarded.endpoint, 1000, timeout_s=10):
                pass
        # Other methods do not suffer from it.
        assert (await guarded.client.describe(guarded.endpoint)).node == "a"


async def test_who_does_not_read_loses_the_connection(guarded: Guarded) -> None:
    """Readers that take nothing hold their places for a while only: then others are answered."""
    async with guarded.channel() as one, guarded.channel() as two:
        request = control_pb2.ProbeRequest(num_bytes=16 << 20, counted=True)
        calls = [control_pb2_grpc.NodeStub(channel).Probe(request) for channel in (one, two) for _ in range(2)]
        sizes = [0]
        for call in calls:
            assert await call.read()
        deadline = time.monotonic() + 20
        while sum(sizes) < 1000:
            assert time.monotonic() < deadline
            with contextlib.suppress(UnavailableError):
                sizes = [len(reply.data) async for reply in guarded.client.probe(guarded.endpoint, 1000, timeout_s=10)]
            await asyncio.sleep(0.05)


async def test_a_daemon_with_few_files_outlives_more_idle_connections(playground: Any) -> None:
    """A daemon may open 600 files and 700 strangers connect and say nothing: it takes a job and runs it to its end."""
    playground.start("a")
    few = 600
    resource.prlimit(playground.daemons["a"].pid, resource.RLIMIT_NOFILE, (few, few))
    node = await playground.until(lambda view: view.nodes.get("a"), "node a")
    host, port = node.address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        for _ in range(few + 100):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        await playground.submit(batches=5)
        job = await playground.phase(Phase.FINISHED, Phase.FAILED)
        assert job.phase.phase is Phase.FINISHED, job.phase.error
        view = await playground.view()
    assert view.nodes["a"].incarnation == node.incarnation
    assert "Too many open files" not in playground.log_of("a").read_text()
