"""A dialled port answers, or the reason is known: real sockets, real TLS, the endpoint of a worker."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

from headway.daemon.client.doctor_outcome import Outcome, outcome_of
from headway.daemon.cluster.measurements import Port
from headway.daemon.cluster.records import PROTOCOL_VERSION
from headway.daemon.net import reach_dial
from headway.daemon.net.reach_dial import dial
from headway.daemon.net.reach_target import Target
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.loop_thread import LoopThread
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.rigs.two_sides import Endpoints


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach_dial, "PAUSE_S", 0.0)
    monkeypatch.setattr(reach_dial, "ANSWER_S", 2.0)


@pytest.fixture
def loop(endpoints: Endpoints) -> LoopThread:
    return endpoints[0]


@pytest.fixture
def worker(loop: LoopThread, identity: TlsIdentity) -> Iterator[Target]:
    """A worker that says whether it can be reached."""
    endpoint = LinkEndpoint(
        loop=loop, identity=identity, host="127.0.0.1", incarnation="w-1", protocol=PROTOCOL_VERSION
    )
    endpoint.start()
    yield target_at(endpoint.port)
    endpoint.stop()


def target_at(port: int) -> Target:
    return Target(
        node="node", incarnation="b-1", port=Port.WORKER, address=f"127.0.0.1:{port}", device_index=0, worker="w-1"
    )


def dialled(loop: LoopThread, target: Target, identity: TlsIdentity) -> str:
    return loop.run(dial(target, identity, source="a"), timeout=timedelta(seconds=30), what="dialling")


def test_a_worker_that_listens_is_reached(loop: LoopThread, worker: Target, identity: TlsIdentity) -> None:
    assert dialled(loop, worker, identity) == ""


def test_a_closed_port_refuses(loop: LoopThread, identity: TlsIdentity) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert dialled(loop, target_at(unused.getsockname()[1]), identity) == "the connection was refused"


@pytest.mark.parametrize(("problem", "num_attempts"), [(TimeoutError(), 2), (ConnectionRefusedError(), 3)])
def test_silence_is_believed_sooner_than_a_refusal(
    loop: LoopThread, identity: TlsIdentity, monkeypatch: pytest.MonkeyPatch, problem: OSError, num_attempts: int
) -> None:
    """An attempt without an answer takes two seconds and four packets; a process that starts refuses for a moment."""
    attempts = []

    async def fail(address: str) -> None:
        attempts.append(address)
        raise problem

    monkeypatch.setattr(reach_dial, "_connect", fail)
    assert dialled(loop, target_at(7100), identity)
    assert len(attempts) == num_attempts


def test_another_worker_behind_the_address_is_told(loop: LoopThread, worker: Target, identity: TlsIdentity) -> None:
    """An address that leads to another machine's worker is no way to this one."""
    other = replace(worker, worker="w-2")
    assert dialled(loop, other, identity) == "another process listens here now"


def test_a_worker_of_another_release_is_told_as_such(
    loop: LoopThread, worker: Target, identity: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No port is closed, so nobody is told to open one."""
    monkeypatch.setattr(reach_dial, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    reason = dialled(loop, worker, identity)
    assert reason == f"protocol {PROTOCOL_VERSION + 1} instead of {PROTOCOL_VERSION}"
    assert outcome_of(reason) is Outcome.OTHER_RELEASE


def test_a_stranger_is_told_by_the_certificate(loop: LoopThread, worker: Target, stranger: TlsIdentity) -> None:
    assert "ca.pem" in dialled(loop, worker, stranger)


def test_a_listener_that_says_nothing_does_not_answer(loop: LoopThread, identity: TlsIdentity) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reason = dialled(loop, target_at(silent.getsockname()[1]), identity)
    assert "does not answer" in reason or "handshake" in reason.lower()


@pytest.mark.parametrize("address", ["no such host.invalid:1", "127.0.0.1:99999", "127.0.0.1", ""])
def test_what_is_no_address_is_a_reason_too(loop: LoopThread, identity: TlsIdentity, address: str) -> None:
    assert dialled(loop, replace(target_at(1), address=address), identity)
