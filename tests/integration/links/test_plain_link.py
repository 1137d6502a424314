"""Plain TCP connections between workers of a private site: who opens one has shown a certificate before."""

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import grpc
import pytest
import structlog

from headway.daemon.net.certificates import CertificateAuthority
from headway.proto.data_pb2 import Hello, HelloReply
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.frame_codec import bundle
from headway.stages.sockets.own_sockets import own_sockets
from headway.stages.sockets.tls_identity import TlsIdentity, expecting
from tests.rigs.two_sides import DEADLINE_S, GENERATION, Endpoints, Inbox, accept, dial, heard, new_job, total

HOST = "127.0.0.1"


def listening_ports() -> set[int]:
    """Return the TCP ports at which this process listens."""
    return {
        copy.getsockname()[1]
        for copy in own_sockets()
        if copy.family == socket.AF_INET and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


@pytest.fixture
def below(endpoints: Endpoints, identity: TlsIdentity) -> Iterator[LinkEndpoint]:
    """A worker of which nobody has asked for a plain connection."""
    end = LinkEndpoint(loop=endpoints[0], identity=identity, host=HOST, incarnation="below", protocol=1)
    end.start()
    yield end
    end.stop()


def meet(port: int, identity: TlsIdentity, job: str, **changes: Any) -> HelloReply:
    """Ask for a plain connection, as anybody with a certificate can."""
    credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
    known: dict[str, Any] = {
        "protocol": 1,
        "generation": GENERATION,
        "incarnation": "above",
        "expected_incarnation": "below",
    }
    hello = Hello(job=job, **known | changes)
    with grpc.secure_channel(f"{HOST}:{port}", credentials, options=expecting("node")) as channel:
        call: Any = channel.unary_unary("/headway.data.Link/Meet")
        return HelloReply.FromString(call(hello.SerializeToString(), timeout=DEADLINE_S))


def is_hung_up(connection: socket.socket) -> bool:
    """Return whether the other side closes it before it says anything."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_port_opens_when_the_awaited_peer_asks_for_it(
    below: LinkEndpoint, identity: TlsIdentity, authority: CertificateAuthority
) -> None:
    """Neither an awaited link opens one, nor another node's certificate, nor a hello for a link with TLS."""
    before = listening_ports()
    plain, with_tls = new_job("plain"), new_job("tls")
    links = [accept(below, plain, Inbox(), is_plain=True), accept(below, with_tls, Inbox())]
    refused = meet(below.port, TlsIdentity.read(authority.issue("node-x")), plain)
    assert (refused.verdict, refused.token) == (HelloReply.WRONG_PEER, "")
    assert meet(below.port, identity, plain, generation=GENERATION + 1).verdict == HelloReply.NOT_YET
    assert meet(below.port, identity, with_tls).token == ""
    assert not listening_ports() - before, "a port that an earlier test still closes is not this one's"
    reply = meet(below.port, identity, plain)
    assert listening_ports() - before == {reply.plain_port}
    for link in links:
        link.close()


@pytest.mark.parametrize(
    "said", [b"", bundle(b""), bundle(b"0" * 32), b"\xff" * 64], ids=["nothing", "empty", "guess", "noise"]
)
def test_who_has_no_token_is_hung_up_on(
    below: LinkEndpoint, identity: TlsIdentity, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """A stranger at the port says nothing, a guess or garbage: no link is touched, and the token of another works."""
    monkeypatch.setattr("headway.stages.links.endpoint.HELLO_TIMEOUT_S", 0.3)
    job = new_job("strange")
    link = accept(below, job, Inbox(), is_plain=True)
    reply = meet(below.port, identity, job)
    with socket.create_connection((HOST, reply.plain_port), timeout=DEADLINE_S) as stranger:
        stranger.sendall(said)
        assert is_hung_up(stranger)
    assert not link.was_connected
    link.close()


def test_a_token_opens_one_connection(below: LinkEndpoint, identity: TlsIdentity) -> None:
    """Who has heard it on the way comes too late: it was used."""
    job = new_job("twice")
    link = accept(below, job, Inbox(), is_plain=True)
    reply = meet(below.port, identity, job)
    hello = Hello(protocol=1, job=job, generation=GENERATION, incarnation="above", expected_incarnation="below")
    said = bundle(reply.token.encode()) + bundle(hello.SerializeToString())
    with socket.create_connection((HOST, reply.plain_port), timeout=DEADLINE_S) as first:
        first.sendall(said)
        assert first.recv(1) != b""
        with socket.create_connection((HOST, reply.plain_port), timeout=DEADLINE_S) as second:
            second.sendall(said)
            assert is_hung_up(second)
    link.close()


def test_where_no_plain_connection_comes_through_the_link_has_tls(
    endpoints: Endpoints, below: LinkEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall lets the worker's port through and no other: the link opens all the same, and says how."""
    real_port = below._plain_server.port

    def closed(host: str) -> int:
        real_port(host)
        with socket.socket() as unused:
            unused.bind((HOST, 0))
            return int(unused.getsockname()[1])

    monkeypatch.setattr(below._plain_server, "port", closed)
    upper, lower = Inbox(), Inbox()
    job = new_job("closed")
    with structlog.testing.capture_logs() as logs:
        accepted = accept(below, job, lower, is_plain=True)
        link = dial(endpoints[1], below.port, job, upper, is_plain=True)
        link.send(total())
        heard(lower)
    assert [entry["way"] for entry in logs if entry["event"] == "link_opened"] == ["TCP with TLS"]
    link.close()
    accepted.close()


def test_a_plain_link_resumes(endpoints: Endpoints, below: LinkEndpoint) -> None:
    """Its stream is cut: it comes back, plain, with another token. One side is deaf for a while: it comes back."""
    upper, lower = Inbox(), Inbox()
    job = new_job("resumed")
    with structlog.testing.capture_logs() as logs:
        accepted = accept(below, job, lower, is_plain=True)
        link = dial(endpoints[1], below.port, job, upper, is_plain=True)
        for _ in range(3):
            link.send(total())
            heard(lower)
            below.cut(timedelta(0))
    assert link.num_resumed >= 1
    assert {entry["way"] for entry in logs if entry["event"] == "link_opened"} == {"plain TCP"}
    below.deafen(timedelta(seconds=3))
    link.send(total())
    heard(lower)
    link.close()
    accepted.close()
