"""`headway doctor` before real sockets: each outcome has its name, one line and its own advice, and nobody else's."""

import asyncio
import http.server
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.daemon.client import doctor as examination
from headway.daemon.client.cluster_access import ClusterSession, find_cluster
from headway.daemon.client.doctor import examine_ways, examine_ways_from
from headway.daemon.client.doctor_outcome import OF_ETCD, OF_NODES, Finding, Outcome
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.records import WorkerPort
from headway.daemon.local.processes import EtcdServerConfig
from headway.daemon.net import reach_dial
from headway.daemon.net.certificates import CertificateAuthority, certificate_pem, key_pem
from headway.daemon.net.port import Relay
from headway.daemon.net.port_process import PortProcess
from headway.daemon.net.reach_dial import dial
from headway.daemon.net.reaching import dial_ports
from headway.daemon.net.signing_request import new_key
from headway.daemon.node.service import add_node_service
from headway.daemon.node.stream_limits import StreamLimits, bind_node_service
from headway.stages.sockets.roles import Role
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.integration.conftest import Etcd
from tests.rigs.members import started_members
from tests.rigs.node_network import Network, node_network

DAY = timedelta(days=1)
SSH = b"SSH-2.0-OpenSSH_9.6\r\n"


class Place:
    """Node a, which dials, and what answers at the address that node b has registered."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.authority = CertificateAuthority.open(folder / "authority")
        self.other_authority = CertificateAuthority.create(folder / "other")
        prove = partial(dial, identity=self.identity("a"), source="a")
        network.desks["a"].dial_peers = partial(dial_ports, network.view, "a", prove=prove)

    def identity(self, name: str, *, authority: CertificateAuthority | None = None, **when: Any) -> TlsIdentity:
        """Return a node's."""
        key, authority = new_key(), authority or self.authority
        made = authority.certify(key.public_key(), name, role=Role.NODE, **when)
        return TlsIdentity(certificate_pem(authority.certificate), certificate_pem(made), key_pem(key))

    def session(self, identity: TlsIdentity | None = None) -> ClusterSession:
        """Return an operator's, or somebody else's."""
        return cast(ClusterSession, SimpleNamespace(identity=identity or self.network.identity))

    async def way_to(self, address: str) -> Finding:
        """Return what `headway doctor --from a --to b` finds while b is registered there."""
        self.network.view.nodes["b"] = replace(self.network.view.nodes["b"], address=address)
        (way,) = await examine_ways_from(self.session(), self.network.view, "a", ["b"])
        return way


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    """Shorter deadlines, and no pause between attempts."""
    for name, value in (("PAUSE_S", 0.0), ("ANSWER_S", 1.0), ("CONNECT_S", 0.3)):
        monkeypatch.setattr(reach_dial, name, value)
    monkeypatch.setattr(http.server.BaseHTTPRequestHandler, "log_message", lambda *_: None)
    async with node_network(tmp_path) as network:
        yield Place(network, tmp_path)


@asynccontextmanager
async def nothing(_: Place) -> AsyncIterator[str]:
    """Nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


@asynccontextmanager
async def firewall(_: Place) -> AsyncIterator[str]:
    """The kernel drops each first packet, because the queue of the socket is full."""
    with full_queue() as address:
        yield address


@contextmanager
def full_queue() -> Iterator[str]:
    """Return a port where no connection is made any more, nor refused."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        held = [socket.socket() for _ in range(4)]
        for each in held:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"
        for each in held:
            each.close()


@asynccontextmanager
async def no_name(_: Place) -> AsyncIterator[str]:
    """A name of RFC 6761, which nobody has."""
    yield "node-b.invalid:7070"


def server(identity: Callable[[Place], TlsIdentity]) -> Callable[[Place], AbstractAsyncContextManager[str]]:
    """A daemon that presents a certificate."""

    @asynccontextmanager
    async def listening(place: Place) -> AsyncIterator[str]:
        made, port = bind_node_service(identity(place), "127.0.0.1", 0)
        await made.start()
        yield f"127.0.0.1:{port}"
        await made.stop(None)

    return listening


@asynccontextmanager
async def revoking(place: Place) -> AsyncIterator[str]:
    """Node b knows that node a is revoked."""
    limits = StreamLimits()
    limits.revoke({"a"})
    made, port = bind_node_service(place.identity("b"), "127.0.0.1", 0, stream_limits=limits)
    add_node_service(made, place.network.desks["b"])
    await made.start()
    yield f"127.0.0.1:{port}"
    await made.stop(None)


@asynccontextmanager
async def restarted(place: Place) -> AsyncIterator[str]:
    """Node b has another incarnation than the one in etcd."""
    address = place.network.b.address
    place.network.view.nodes["b"] = replace(place.network.view.nodes["b"], incarnation="b-0")
    yield address


@contextmanager
def web_server(certificates: Path | None) -> Iterator[str]:
    """Another service; without certificates it speaks no TLS."""
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    if certificates is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
        serving.socket = context.wrap_socket(serving.socket, server_side=True)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{serving.server_port}"
    serving.shutdown()
    serving.server_close()
    thread.join()


@asynccontextmanager
async def http_plain(_: Place) -> AsyncIterator[str]:
    """A web server."""
    with web_server(None) as address:
        yield address


@asynccontextmanager
async def https(place: Place) -> AsyncIterator[str]:
    """A web server with a certificate of this cluster."""
    with web_server(place.authority.issue("b", role=Role.NODE)) as address:
        yield address


def saying(words: bytes, *, reads: bool) -> Callable[[Place], AbstractAsyncContextManager[str]]:
    """Something that says these words, and closes when it has heard some."""

    @asynccontextmanager
    async def listening(_: Place) -> AsyncIterator[str]:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(words)
            try:
                if reads:
                    await reader.read(1)
            except OSError:
                pass
            writer.close()

        async with await asyncio.start_server(greet, "127.0.0.1", 0) as made:
            yield f"127.0.0.1:{made.sockets[0].getsockname()[1]}"

    return listening


@asynccontextmanager
async def mute(_: Place) -> AsyncIterator[str]:
    """A stopped process: its kernel takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@asynccontextmanager
async def fronted(folder: Path, port: int) -> AsyncIterator[PortProcess]:
    """The process of a shared port."""
    folder.mkdir()
    front = PortProcess("127.0.0.1", 0, daemon_port=port, folder=folder)
    serving = asyncio.create_task(front.run())
    yield front
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    front.close()


@asynccontextmanager
async def relay(place: Place) -> AsyncIterator[str]:
    """A port at which nobody stands by."""
    async with fronted(place.folder / "r", 9) as front:
        yield f"127.0.0.1:{front.port}"


def behind(opened: Callable[[Place], AbstractAsyncContextManager[str]]) -> Callable[..., Any]:
    """The address of node b behind that port."""

    @asynccontextmanager
    async def there(place: Place) -> AsyncIterator[str]:
        async with opened(place) as address:
            yield f"{address}/b~"

    return there


PLACES: dict[str, tuple[Callable[[Place], AbstractAsyncContextManager[str]], Outcome]] = {
    "refused": (nothing, Outcome.REFUSED),
    "refused relay": (behind(nothing), Outcome.REFUSED),
    "dropped": (firewall, Outcome.SILENT),
    "dropped relay": (behind(firewall), Outcome.SILENT),
    "no name": (no_name, Outcome.UNKNOWN_NAME),
    "another authority": (server(lambda it: it.identity("b", authority=it.other_authority)), Outcome.OTHER_AUTHORITY),
    "expired": (server(lambda it: it.identity("b", now=datetime.now(UTC) - 3 * DAY, validity=DAY)), Outcome.EXPIRED),
    "early": (server(lambda it: it.identity("b", now=datetime.now(UTC) + 3 * DAY)), Outcome.EARLY),
    "another node": (server(lambda it: it.identity("c")), Outcome.OTHER_NAME),
    "revoked": (revoking, Outcome.REVOKED),
    "restarted": (restarted, Outcome.OTHER_PROCESS),
    "http": (http_plain, Outcome.OTHER_SERVICE),
    "http as relay": (behind(http_plain), Outcome.OTHER_SERVICE),
    "https": (https, Outcome.OTHER_SERVICE),
    "ssh": (saying(SSH, reads=True), Outcome.OTHER_SERVICE),
    "ssh as relay": (behind(saying(SSH, reads=True)), Outcome.OTHER_SERVICE),
    "closes": (saying(b"", reads=False), Outcome.ENDED),
    "mute": (mute, Outcome.HANGS),
    "lost relay": (behind(relay), Outcome.NOT_BEHIND_PORT),
}


@pytest.mark.parametrize("case", PLACES)
async def test_what_answers_wrongly_is_named_with_what_to_do(place: Place, case: str) -> None:
    """One line in our own words, and the advice of its outcome alone."""
    opened, outcome = PLACES[case]
    async with opened(place) as address:
        way = await place.way_to(address)
    assert (way.what, way.is_fine, way.outcomes) == ("a → b", False, (outcome,))
    assert way.advice == OF_NODES[outcome]
    assert way.found.startswith(f"its daemon at {address}: ")
    for jargon in ("\n", "SSL", "gRPC", "last error", "UNAVAILABLE", "this machine", "this side"):
        assert jargon not in way.found


async def test_what_does_not_take_this_sides_certificate_is_told_as_that(place: Place) -> None:
    """Node a's clock is behind, or it has b's ca.pem and a certificate of another authority: gRPC says no more."""
    theirs = place.identity("a", authority=place.other_authority)
    for identity in (
        place.identity("a", now=datetime.now(UTC) + 3 * DAY),
        place.identity("a", now=datetime.now(UTC) - 3 * DAY, validity=DAY),
        TlsIdentity(place.network.identity.ca, theirs.certificate, theirs.key),
    ):
        prove = partial(dial, identity=identity, source="a")
        place.network.desks["a"].dial_peers = partial(dial_ports, place.network.view, "a", prove=prove)
        way = await place.way_to(place.network.b.address)
        assert (way.is_fine, way.outcomes) == (False, (Outcome.ENDED,))
        assert "clocks" in way.advice


async def test_what_answers_is_blamed_for_nothing(place: Place) -> None:
    """Directly, and behind a relay: this one is told, with the way to do without it."""
    way = await place.way_to(place.network.b.address)
    assert (way.is_fine, way.outcomes, way.advice) == (True, (Outcome.REACHED,), "")
    port = int(place.network.b.address.rpartition(":")[2])
    async with fronted(place.folder / "r", 9) as relays, fronted(place.folder / "o", port) as own:
        with relays.standing_by("b") as token:
            own.stand_by("r", Relay("127.0.0.1", relays.port, token))
            async with asyncio.timeout(20.0):
                while not (way := await place.way_to(f"127.0.0.1:{relays.port}/b~")).is_fine:
                    await asyncio.sleep(0.05)
    assert (way.outcomes, way.advice) == ((Outcome.RELAYED,), OF_NODES[Outcome.RELAYED])


async def test_a_closed_port_of_a_worker_alone_has_its_own_advice(place: Place) -> None:
    """The daemon answers: the node is there, and `one_port` spares it the other ports."""
    silent = WorkerPort(device_index=0, address="127.0.0.1:1", incarnation="w")
    place.network.view.nodes["b"] = replace(place.network.view.nodes["b"], workers=(silent,))
    way = await place.way_to(place.network.b.address)
    assert (way.is_fine, way.found) == (False, "its worker at 127.0.0.1:1: the connection was refused")
    assert "`one_port`" in way.advice


async def test_a_daemon_that_cannot_be_asked_is_dialled_from_here(place: Place) -> None:
    """The source of the ways is the one that does not answer, and the finding says so of this machine."""
    async with nothing(place) as address:
        place.network.view.nodes["a"] = replace(place.network.view.nodes["a"], address=address)
        (way,) = await examine_ways_from(place.session(), place.network.view, "a", [])
    assert (way.what, way.is_fine, way.outcomes) == ("this machine → a", False, (Outcome.REFUSED,))
    assert way.found == f"its daemon at {address}: the connection was refused"


async def test_a_reader_is_told_who_may_ask(place: Place) -> None:
    """No node is at fault, so there is no FAIL."""
    key = new_key()
    made = place.authority.certify(key.public_key(), "ann", role=Role.READER)
    reader = TlsIdentity(place.network.identity.ca, certificate_pem(made), key_pem(key))
    (finding,) = await examine_ways(place.session(reader), place.network.view)
    assert (finding.is_fine, finding.found) == (True, "not tried: ann (reader) may not ask the daemons")


ETCD_PLACES: dict[str, tuple[Callable[[Place], AbstractAsyncContextManager[str]], Outcome]] = {
    name: PLACES[name]
    for name in ("refused", "dropped", "no name", "another authority", "expired", "early", "http", "https", "ssh")
} | {
    "another host": (server(lambda it: it.identity("b")), Outcome.OTHER_SERVICE),
    "mute": (mute, Outcome.HANGS),
}


@pytest.mark.parametrize("case", ETCD_PLACES)
async def test_an_etcd_that_is_none_is_named_with_what_to_do(
    place: Place, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finding `cluster`, in our own words."""
    monkeypatch.setattr(ClusterSession.__init__, "__kwdefaults__", {"timeout_s": 1.0})
    opened, outcome = ETCD_PLACES[case]
    certs = CertificateAuthority.open(tmp_path / "authority").issue("me", role=Role.OPERATOR)
    async with opened(place) as address:
        (found,) = await asyncio.to_thread(examination._cluster, partial(find_cluster, etcd=address, certs=certs))
    assert (found.is_fine, found.outcomes, found.advice) == (False, (outcome,), OF_ETCD[outcome]), found
    assert not any(jargon in found.found for jargon in ("SSL", "last error", "\n"))


async def test_one_member_of_etcd_that_is_away_is_told(etcd: Etcd, tmp_path: Path) -> None:
    """The cluster answers, and so does the other member: neither is blamed."""
    certs = etcd.authority.issue("me", role=Role.OPERATOR)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{unused.getsockname()[1]}"
        members = f"{etcd.endpoint},{closed}"
        cluster, away = await examination._examined(find_cluster(etcd=members, certs=certs))
    assert cluster.is_fine
    assert (away.what, away.outcomes) == (f"etcd at {closed}", (Outcome.REFUSED,))
    assert len(await examination._examined(find_cluster(etcd=etcd.endpoint, certs=certs))) == 1


async def test_a_member_of_etcd_without_a_majority_is_told(own_server_config: EtcdServerConfig) -> None:
    """Two of three are gone: the third one answers, and is no healthy member for that."""
    certs = own_server_config.certificates
    async with started_members(own_server_config) as servers:
        left, *lost = servers
        members = ",".join(server.endpoint for server in servers)
        address = find_cluster(etcd=members, certs=certs)
        assert await examination._members(address) == []
        await asyncio.gather(*(server.kill() for server in lost))
        async with EtcdClient(left.access()) as client, asyncio.timeout(20.0):
            while (await client.status()).has_leader:
                await asyncio.sleep(0.05)
        found = await examination._members(address)
    told = {finding.what: finding.outcomes for finding in found}
    gone = {f"etcd at {server.endpoint}": (Outcome.REFUSED,) for server in lost}
    assert told == gone | {f"etcd at {left.endpoint}": (Outcome.NO_MAJORITY,)}
    assert "Lost members" in next(finding.advice for finding in found if finding.what.endswith(left.endpoint))
