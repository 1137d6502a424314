"""Every refusal at every door, over real TLS: docs/security.md names these tests in its table.

The doors are a daemon's RPCs and a worker's links, each at its own port, behind the node's one port, and behind the one
port of another node where it stands by; also the service of a relay, and etcd. Each door first answers who may come in.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.net.certificates import CA_KEY_FILE, CertificateAuthority, certificate_pem, key_pem
from headway.daemon.net.join_token import SIGNER_NAME, SIGNER_ROLE
from headway.daemon.net.port import Relay
from headway.daemon.net.port_process import PortProcess
from headway.daemon.net.signing_request import new_key
from headway.daemon.node.relay_host import RelayService
from headway.daemon.node.service import add_node_service
from headway.daemon.node.stream_limits import StreamLimits, bind_node_service
from headway.proto import control_pb2, control_pb2_grpc
from headway.proto.data_pb2 import Hello, HelloReply
from headway.stages.ids import Generation
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.streams import LocalPlace
from headway.stages.sockets.roles import Role
from headway.stages.sockets.shared_port import open_channel, shared_address
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.integration.conftest import Etcd
from tests.rigs.node_network import desk_of
from tests.rigs.two_sides import lower_terms

DEADLINE_S: Final = 20.0
SOON: Final = timedelta(seconds=DEADLINE_S)
GENERATION: Final = Generation(4)
ANSWERED: Final = ""
DAY: Final = timedelta(days=1)
WORKER: Final = "0123456789abcdef"
"""Incarnation of the worker behind each node's port."""
DAEMONS: Final = ("daemon", "one port", "standing by", "relay's service")
WORKERS: Final = ("worker", "worker at one port", "worker standing by")
DOORS: Final = (*DAEMONS, *WORKERS, "etcd")

Call = Callable[[grpc.aio.Channel, bytes], Awaitable[bytes]]


def _unary(method: str) -> Call:
    async def call(channel: grpc.aio.Channel, request: bytes) -> bytes:
        ask: Any = channel.unary_unary(method)
        found: bytes = await ask(request, timeout=DEADLINE_S)
        return found

    return call


def _first(method: str, *, is_stream: bool) -> Call:
    """Return what makes a call and reads the first message."""

    async def call(channel: grpc.aio.Channel, request: bytes) -> bytes:
        if is_stream:
            stream: Any = channel.stream_stream(method)(timeout=DEADLINE_S)
            await stream.write(request)
        else:
            ask: Any = channel.unary_stream(method)
            stream = ask(request, timeout=DEADLINE_S)
        found = await stream.read()
        stream.cancel()
        if found is grpc.aio.EOF:
            raise AssertionError("the call has ended without a word")
        return bytes(found)

    return call


DESCRIBE: Final = _unary("/headway.control.Node/Describe")
PROBE: Final = _first("/headway.control.Node/Probe", is_stream=False)
STAND_BY: Final = _first("/headway.control.Node/StandBy", is_stream=False)
LINK: Final = _first("/headway.data.Link/Stream", is_stream=True)
RANGE: Final = _unary("/etcdserverpb.KV/Range")


@dataclass(frozen=True, slots=True)
class Door:
    """Where somebody comes to, and what the rightful one says there."""

    address: str
    node: str
    """The name that the other side's certificate has to bear."""
    call: Call
    request: bytes = b""


@dataclass(frozen=True, slots=True)
class Doors:
    """All of them, in one loop, as gRPC's asyncio wants it."""

    loop: LoopThread
    by_name: dict[str, Door]
    authority: CertificateAuthority

    def identity(self, name: str, role: str | None = Role.NODE, **when: Any) -> TlsIdentity:
        """Return somebody of this cluster."""
        key = new_key()
        certificate = self.authority.certify(key.public_key(), name, role=role, **when)
        return TlsIdentity(certificate_pem(self.authority.certificate), certificate_pem(certificate), key_pem(key))

    def ask(
        self,
        door: str,
        identity: TlsIdentity | None,
        *,
        call: Call | None = None,
        request: bytes | None = None,
        node: str = "",
    ) -> str:
        """Return ANSWERED, or why the door refuses. identity: None for nobody's."""
        asked = self.asked(door, identity, call=call, request=request, node=node)
        return self.loop.run(asked, timeout=SOON, what=door)

    async def asked(
        self,
        name: str,
        identity: TlsIdentity | None,
        *,
        call: Call | None = None,
        request: bytes | None = None,
        node: str = "",
    ) -> str:
        """Return as `ask` does, in the loop."""
        door = self.by_name[name]
        ca = certificate_pem(self.authority.certificate)
        credentials = (
            grpc.ssl_channel_credentials(ca)
            if identity is None
            else grpc.ssl_channel_credentials(ca, identity.key, identity.certificate)
        )
        own: tuple[tuple[str, Any], ...] = (("grpc.use_local_subchannel_pool", 1),)
        async with open_channel(door.address, credentials, node=node or door.node, options=own) as channel:
            try:
                answer = await (call or door.call)(channel, door.request if request is None else request)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()} {error.debug_error_string()}"
        if door.call is LINK:
            reply = HelloReply.FromString(answer)
            is_in = reply.verdict == HelloReply.ACCEPTED
            return ANSWERED if is_in else f"{HelloReply.Verdict.Name(reply.verdict)}: {reply.reason}"
        return ANSWERED


def _hello(job: str, *, generation: int = GENERATION) -> bytes:
    said = Hello(
        protocol=1,
        job=job,
        generation=generation,
        stage=0,
        worker=0,
        incarnation="above",
        expected_incarnation=WORKER,
        attempt=1,
    )
    return said.SerializeToString()


@asynccontextmanager
async def _fronted(folder: Path, port: int) -> AsyncIterator[PortProcess]:
    front = PortProcess("127.0.0.1", 0, daemon_port=port, folder=folder)
    serving = asyncio.create_task(front.run())
    try:
        yield front
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        front.close()


async def _open(stack: AsyncExitStack, authority: CertificateAuthority, folder: Path) -> dict[str, Door]:
    """Open the doors of two nodes and of a relay: node b stands by at node a. Return them by name."""
    fronts, ports = {}, {}
    revoked = StreamLimits()
    revoked.revoke({"gone"})
    for node in ("a", "b"):
        (folder / node).mkdir()
        identity = TlsIdentity.read(authority.issue(node, role=Role.NODE))
        server, ports[node] = bind_node_service(identity, "127.0.0.1", 0, stream_limits=revoked)
        fronts[node] = await stack.enter_async_context(_fronted(folder / node, ports[node]))
        client = NodeClient(identity)
        desk = desk_of(node, folder / node, client, standing_by=fronts[node].standing_by)
        add_node_service(server, desk)
        await server.start()
        stack.push_async_callback(server.stop, None)
        stack.push_async_callback(client.close)
        stack.callback(desk.ending.set)
    host, port = "127.0.0.1", fronts["a"].port
    token = stack.enter_context(fronts["a"].standing_by("b"))
    fronts["b"].stand_by("a", Relay(host, port, token))
    identity = TlsIdentity.read(authority.issue("relay"))
    server, relay_port = bind_node_service(identity, host, 0)
    service = RelayService(fronts["a"])
    control_pb2_grpc.add_NodeServicer_to_server(service, server)
    await server.start()
    stack.push_async_callback(server.stop, None)
    stack.callback(service.ending.set)
    told = control_pb2.StandByRequest(node="node").SerializeToString()
    return {
        "daemon": Door(f"{host}:{ports['a']}", "a", DESCRIBE),
        "one port": Door(f"{host}:{port}", "a", DESCRIBE),
        "standing by": Door(f"{host}:{port}/b~", "b", DESCRIBE),
        "relay's service": Door(f"{host}:{relay_port}", "relay", STAND_BY, told),
        "worker at one port": Door(shared_address(f"{host}:{port}", WORKER), "a", LINK),
        "worker standing by": Door(shared_address(f"{host}:{port}/b~", WORKER), "b", LINK),
    }


async def _until_open(doors: Doors) -> None:
    """Wait for the processes behind the doors: node b stands by a moment after they run."""
    friend = doors.identity("node")
    for name in DOORS:
        while await doors.asked(name, friend) != ANSWERED:
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def doors(shared_etcd: Etcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """All doors, open for this module."""
    folder, authority = tmp_path_factory.mktemp("d"), shared_etcd.authority
    loop, stack = LoopThread("doors"), AsyncExitStack()
    loop.start()
    by_name = loop.run(_open(stack, authority, folder), timeout=SOON, what="the doors")
    ends = []
    for place, node in ((None, "a"), (LocalPlace("a", folder / "a"), "a"), (LocalPlace("b", folder / "b"), "b")):
        end = LinkEndpoint(
            loop=loop,
            identity=TlsIdentity.read(authority.directory / node),
            host="127.0.0.1",
            incarnation=WORKER,
            protocol=1,
            local=place,
            is_behind_shared_port=place is not None,
        )
        end.start()
        ends.append(end)
    by_name["worker"] = Door(f"127.0.0.1:{ends[0].port}", "a", LINK)
    for name, end in zip(WORKERS, ends, strict=True):
        changes: dict[str, Any] = {"generation": GENERATION, "first_contact": 10 * SOON}
        end.accept(lower_terms(name, inbox=SimpleQueue(), **changes))
        door = by_name[name]
        by_name[name] = Door(door.address, door.node, LINK, _hello(name))
    by_name["etcd"] = Door(shared_etcd.endpoint, "etcd", RANGE, b"\n\x01x")
    found = Doors(loop, by_name, authority)
    loop.run(_until_open(found), timeout=SOON, what="the processes of the ports")
    yield found
    for end in ends:
        end.stop()
    loop.run(stack.aclose(), timeout=SOON, what="closing the doors")
    loop.stop()


@pytest.mark.parametrize("door", DOORS)
def test_who_may_come_in_is_answered(doors: Doors, door: str) -> None:
    """Else no refusal of this module would show anything."""
    assert doors.ask(door, doors.identity("node")) == ANSWERED


@pytest.mark.parametrize("door", DOORS)
def test_nobody_comes_in_without_a_certificate(doors: Doors, door: str) -> None:
    """TLS ends before a word is heard."""
    assert doors.ask(door, None).startswith("UNAVAILABLE")


@pytest.mark.parametrize("door", DOORS)
def test_nobody_comes_in_with_a_certificate_of_another_authority(doors: Doors, door: str, tmp_path: Path) -> None:
    """Although it has the right name and role."""
    other = CertificateAuthority.create(tmp_path / "other")
    assert doors.ask(door, TlsIdentity.read(other.issue("node", role=Role.NODE))).startswith("UNAVAILABLE")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("begins", [-3 * DAY, 3 * DAY], ids=["expired", "early"])
def test_nobody_comes_in_before_or_after_a_certificates_time(doors: Doors, door: str, begins: timedelta) -> None:
    """Of a node of this cluster, for two days that are over, or that have not begun."""
    identity = doors.identity("node", now=datetime.now(UTC) + begins, validity=2 * DAY)
    assert doors.ask(door, identity).startswith("UNAVAILABLE")


@pytest.mark.parametrize("door", DOORS)
def test_nobody_talks_to_a_server_of_another_name(doors: Doors, door: str) -> None:
    """Whoever dials node x hears of node a, b or etcd: the dialler says nothing. A relay sees ciphertext only."""
    told = doors.ask(door, doors.identity("node"), node="node-x")
    assert told.startswith("UNAVAILABLE")
    assert "Hostname Verification Check failed" in told


@pytest.mark.parametrize("door", DAEMONS[:3])
def test_a_revoked_holder_is_refused_by_name(doors: Doors, door: str) -> None:
    """In whatever case of letters, and whatever else the certificate bears."""
    told = "PERMISSION_DENIED: the certificate of {} is revoked"
    assert doors.ask(door, doors.identity("Gone")).startswith(told.format("Gone"))
    assert doors.ask(door, doors.identity("node", hosts=["gone"])).startswith(told.format("gone"))


@pytest.mark.parametrize("door", DAEMONS[:3])
def test_a_role_may_make_its_own_calls_alone(doors: Doors, door: str) -> None:
    """A reader measures nothing, an operator does not stand by, and the join port's own certificate opens nothing."""
    denied = "PERMISSION_DENIED: {} is refused: the certificate is of {}, and only {} may call it"
    told = doors.ask(door, doors.identity("ann", Role.READER), call=PROBE)
    assert told.startswith(denied.format("Probe", "ann (reader)", "node and operator"))
    told = doors.ask(door, doors.identity("me", Role.OPERATOR), call=STAND_BY)
    assert told.startswith(denied.format("StandBy", "me (operator)", "node"))
    told = doors.ask(door, doors.identity(SIGNER_NAME, SIGNER_ROLE))
    whose = f"{SIGNER_NAME} (of an unknown role)"
    assert told.startswith(denied.format("Describe", whose, "node and operator and reader"))


def _nobody(doors: Doors) -> TlsIdentity:
    """Somebody of this cluster whose certificate has a common name alone, as some authorities make them."""
    key, mine = new_key(), doors.authority.certificate
    now, authority_key = (
        datetime.now(UTC),
        serialization.load_pem_private_key((doors.authority.directory / CA_KEY_FILE).read_bytes(), password=None),
    )
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    builder = x509.CertificateBuilder().issuer_name(mine.subject).public_key(key.public_key()).serial_number(7)
    builder = builder.subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")]))
    made = builder.not_valid_before(now - DAY).not_valid_after(now + DAY).sign(authority_key, hashes.SHA256())
    return TlsIdentity(certificate_pem(mine), certificate_pem(made), key_pem(key))


@pytest.mark.parametrize("door", [*DAEMONS, *WORKERS])
def test_a_certificate_that_names_nobody_opens_nothing(doors: Doors, door: str) -> None:
    """Nobody could revoke it by name."""
    told = doors.ask(door, _nobody(doors))
    assert "the certificate is of nobody, and only" in told or "the certificate of nobody is not that of" in told


def test_a_relays_service_is_for_nodes_alone(doors: Doors) -> None:
    """An operator and a reader of the node's own name are no nodes."""
    for role in (Role.OPERATOR, Role.READER):
        told = doors.ask("relay's service", doors.identity("node", role))
        assert told.startswith(f"PERMISSION_DENIED: StandBy is refused: the certificate is of node ({role})")


@pytest.mark.parametrize("door", DAEMONS)
def test_a_node_stands_by_under_its_own_name_alone(doors: Doors, door: str) -> None:
    """A node that offers itself as node b would get what is meant for that one."""
    request = control_pb2.StandByRequest(node="b").SerializeToString()
    told = doors.ask(door, doors.identity("node"), call=STAND_BY, request=request)
    assert told.startswith(
        "PERMISSION_DENIED: the certificate of node, localhost, 127.0.0.1, ::1 is not that of node b"
    )


@pytest.mark.parametrize("door", WORKERS)
@pytest.mark.parametrize(
    ("name", "role", "whose"),
    [
        ("node-x", Role.NODE, "node-x, localhost, 127.0.0.1, ::1"),
        ("node", Role.OPERATOR, "node (operator)"),
        ("node", Role.READER, "node (reader)"),
        ("node", SIGNER_ROLE, "node (of an unknown role)"),
    ],
)
def test_a_link_is_for_the_node_of_the_plan_alone(doors: Doors, door: str, name: str, role: str, whose: str) -> None:
    """Another node, and people with the node's name, who know all that the awaited worker would say."""
    told = doors.ask(door, doors.identity(name, role))
    assert told == f"WRONG_PEER: the certificate of {whose} is not that of node node"


@pytest.mark.parametrize("door", WORKERS)
@pytest.mark.parametrize(
    ("generation", "verdict"), [(GENERATION - 1, "STALE"), (GENERATION + 1, "NOT_YET"), (2**31 - 1, "NOT_YET")]
)
def test_a_worker_of_another_generation_gets_no_link(doors: Doors, door: str, generation: int, verdict: str) -> None:
    """An older one gives up, a newer one comes again: neither sends a frame."""
    told = doors.ask(door, doors.identity("node"), request=_hello(door, generation=generation))
    assert told.startswith(f"{verdict}:")
