"""The port at which strangers join: what they send, and what becomes of its socket and certificate, harms nobody."""

import asyncio
import errno
import os
import ssl
import tempfile
import time
from pathlib import Path

import pytest

from headway.daemon.cluster.client import EtcdClient
from headway.daemon.net.invitation import NO_INVITATION
from headway.daemon.net.join_client import join
from headway.daemon.net.join_port import JoinLimits
from headway.daemon.net.join_token import MAX_REQUEST_BYTES, JoinToken
from headway.daemon.net.signing_request import new_key, signing_request
from headway.stages.errors import UnavailableError
from headway.stages.sockets.shared_port import shared_address
from tests.integration.conftest import Etcd
from tests.rigs.join_place import JoinPlace, join_place


async def test_a_port_that_gets_no_certificate_says_so(place: JoinPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the first machine comes; it joins when there is room."""
    token = await place.invited("b")
    with monkeypatch.context() as full:
        full.setattr(tempfile, "NamedTemporaryFile", _full_disk)
        with pytest.raises(UnavailableError, match="does not answer"):
            await place.join(token)
    assert set(place.told) == {"nobody can join: its port gets no certificate: No space left on device"}
    assert (await place.join(token)).answer.certificate
    assert place.told[-1] == ""


def _full_disk(**_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_port_that_says_a_byte_now_and_then_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What listens at the token's address drips its answer: the machine gives up after the time of one connection."""
    monkeypatch.setattr("headway.daemon.net.join_client.CALL_S", 1.0)
    gone = asyncio.Event()

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.1)
        except ConnectionError:
            gone.set()
            writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        token = JoinToken("n", (shared_address(f"127.0.0.1:{port}", "join"),), bytes(32), b"s" * 24)
        with pytest.raises(UnavailableError, match="does not answer"):
            async with asyncio.timeout(20.0):
                await asyncio.to_thread(join, token, signing_request("n", new_key()), patience_s=0.0)
        async with asyncio.timeout(20.0):
            await gone.wait()


async def test_garbage_and_too_much_are_answered_in_a_line(place: JoinPlace) -> None:
    """Bytes of no kind, JSON of another kind, deep JSON, a megabyte: each gets a refusal, and the port lives on."""
    assert await asyncio.to_thread(place.sent, b"\x00\xff\n") == {"refusal": "is not a request"}
    assert await asyncio.to_thread(place.sent, b'{"ask":"certificate","name":7}\n') == {"refusal": "is not a request"}
    assert await asyncio.to_thread(place.sent, b"[" * 10_000 + b"\n") == {"refusal": "is not a request"}
    too_much = {"refusal": f"a request has at most {MAX_REQUEST_BYTES} bytes"}
    assert await asyncio.to_thread(place.sent, b"x" * (20 << 10)) == too_much
    # The port does not read the rest of more, so the connection may break before the answer has come.
    assert await asyncio.to_thread(place.sent, b"x" * (1 << 20)) in (too_much, {})
    name = b'{"ask":"certificate","name":"../jobs/j/spec","secret":"","request":""}\n'
    assert await asyncio.to_thread(place.sent, name) == {"refusal": NO_INVITATION}
    assert (await place.join(await place.invited("n"))).answer.certificate


async def test_strangers_who_say_nothing_are_closed(etcd: Etcd, client: EtcdClient, tmp_path: Path) -> None:
    """Three connections are silent after the handshake, where two may be open: all are closed, and a machine joins."""
    limits = JoinLimits(most_open=2, deadline_s=3.0, per_s=1000.0, burst=1000)
    async with join_place(etcd.authority, client, tmp_path, limits=limits) as place:
        began = time.monotonic()
        silent = [await asyncio.to_thread(place.dialled) for _ in range(3)]
        token = await place.invited("n")
        assert (await place.join(token)).answer.certificate
        for connection in silent:
            with connection:
                assert await asyncio.to_thread(end_of, connection)
        assert time.monotonic() - began < 20


def end_of(connection: ssl.SSLSocket) -> bool:
    """Whether the other side ends the connection before the deadline."""
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


async def test_a_flood_is_not_heard_and_a_machine_joins_after_it(
    etcd: Etcd, client: EtcdClient, tmp_path: Path
) -> None:
    """Of fifty strangers at once five are heard. When the flood is over, a machine joins at once."""
    limits = JoinLimits(per_s=1.0, burst=5)
    async with join_place(etcd.authority, client, tmp_path, limits=limits) as place:

        def stranger() -> bool:
            try:
                return bool(place.sent(b'{"ask":"authority"}\n'))
            except OSError:
                return False

        heard = await asyncio.gather(*(asyncio.to_thread(stranger) for _ in range(50)))
        assert 1 <= sum(heard) <= 8
        token = await place.invited("n")
        request = signing_request("n", new_key())
        assert (await asyncio.to_thread(join, token, request, patience_s=20.0)).answer.certificate
