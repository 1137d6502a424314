"""A link belongs to two nodes of a plan: no other node's certificate opens it, takes it over or answers for it. Both
sides show their newest certificate.
"""

import asyncio
import socket
import ssl
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from cryptography import x509

from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.net.renewals import keep_renewed
from headway.proto.data_pb2 import Hello, HelloReply
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.sockets.tls_identity import (
    RenewableIdentity,
    TlsIdentity,
    certificate_of_client,
    dialling,
    expecting,
    serving,
)
from tests.rigs.two_sides import DEADLINE_S, GENERATION, SOON, Endpoints, Inbox, accept, dial, heard, lost, total


@pytest.fixture(scope="module")
def other_node(authority: CertificateAuthority) -> TlsIdentity:
    """A node of the same cluster, with a certificate of its own."""
    return TlsIdentity.read(authority.issue("node-x"))


def hello(job: str, *, generation: int = GENERATION, **fields: Any) -> bytes:
    """What the awaited worker would say, much later: nobody else knows of so many attempts."""
    known: dict[str, Any] = {
        "protocol": 1,
        "incarnation": "above",
        "expected_incarnation": "below",
        "attempt": 1_000_000,
    }
    return Hello(job=job, generation=generation, **known, **fields).SerializeToString()


async def answer_to(port: int, identity: TlsIdentity, message: bytes) -> HelloReply:
    """Return a worker's answer to a hello."""
    credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=expecting("node")) as channel:
        call: Any = channel.stream_stream("/headway.data.Link/Stream")(timeout=DEADLINE_S)
        await call.write(message)
        return HelloReply.FromString(await call.read())


def test_another_nodes_certificate_takes_over_no_link(endpoints: Endpoints, other_node: TlsIdentity) -> None:
    """Right incarnations and the highest attempt, from node-x: refused by name, and the link goes on undisturbed."""
    loop, above, below = endpoints
    at_lower = Inbox()
    link, accepted = dial(above, below.port, "stolen", Inbox()), accept(below, "stolen", at_lower)
    link.send(total())
    heard(at_lower)
    with structlog.testing.capture_logs() as logs:
        stolen = answer_to(below.port, other_node, hello("stolen"))
        reply = loop.run(stolen, timeout=SOON, what="the answer")
    assert reply.verdict == HelloReply.WRONG_PEER
    assert reply.reason == "the certificate of node-x, localhost, 127.0.0.1, ::1 is not that of node node"
    told = next(entry for entry in logs if entry["event"] == "hello_of_another_node")
    assert (told["node"], told["names"][0]) == ("node", "node-x")
    above.cut(timedelta(0))  # the innocent dials again, with an attempt below that of the other
    link.send(total())
    heard(at_lower)
    link.close()
    accepted.close()


def test_a_worker_in_the_place_of_another_gets_no_frame(endpoints: Endpoints, other_node: TlsIdentity) -> None:
    """Who listens where the neighbour was presents node-x's certificate: the link never opens, and says why."""
    loop, above, _ = endpoints
    place = LinkEndpoint(loop=loop, identity=other_node, host="127.0.0.1", incarnation="below", protocol=1)
    place.start()
    at_place, at_upper = Inbox(), Inbox()
    accepted = accept(place, "lured", at_place)
    link = dial(above, place.port, "lured", at_upper, timeout=timedelta(seconds=1))
    link.send(total())
    assert "does not carry the expected name" in lost(at_upper).reason
    assert at_place.empty()
    accepted.close()
    place.stop()


def serial(pem: bytes) -> int:
    """Serial number of a certificate."""
    return x509.load_pem_x509_certificate(pem).serial_number


def shown(port: int, client: Path) -> int:
    """Serial number of the certificate that a server shows in a new handshake."""
    context = ssl.create_default_context(cafile=client / "ca.pem")
    context.load_cert_chain(client / "cert.pem", client / "key.pem")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10.0) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        der = connection.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


async def test_both_sides_show_what_was_renewed_meanwhile(tmp_path: Path) -> None:
    """Two renewals: each handshake after one has its certificate, on the listening and on the dialling side."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    me, folder = authority.issue("me"), tmp_path / "renewals"
    identity = RenewableIdentity(authority.issue("node"), folder)

    async def answer(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return str(serial(certificate_of_client(context.auth_context()))).encode()

    server = grpc.aio.server()
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"m": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", methods),))
    port = server.add_secure_port("127.0.0.1:0", serving(identity))
    await server.start()
    try:
        for name in ("", "A", "B"):
            if name:
                scratch = authority.issuing_into(tmp_path / name).issue("node", validity=timedelta(hours=1))
                pair = TlsIdentity.read(scratch)
                keep_renewed(folder, pair.certificate, pair.key, name=name)
            expected = serial(identity.now().certificate)
            assert await asyncio.to_thread(shown, port, me) == expected
            async with grpc.aio.secure_channel(f"localhost:{port}", dialling(identity)) as channel:
                call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/s/m")
                assert await call(b"", timeout=10.0) == str(expected).encode()
    finally:
        await server.stop(None)
