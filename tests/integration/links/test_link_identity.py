"""A link belongs to two nodes of a plan: no other node's certificate opens it, takes it over or answers for it."""

from datetime import timedelta
from typing import Any

import grpc
import pytest
import structlog

from headway.daemon.net.certificates import CertificateAuthority
from headway.proto.data_pb2 import Hello, HelloReply
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.sockets.tls_identity import TlsIdentity, expecting
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
