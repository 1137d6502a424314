"""Transactions in etcd's notation; leases and watches, whatever grpc makes of a cancellation."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.daemon.base.errors import StoreUnreachableError
from headway.daemon.cluster import watch
from headway.daemon.cluster.connection import EtcdConnection
from headway.daemon.cluster.lease import Lease
from headway.daemon.cluster.transaction import Delete, Put, prefix_end, range_start, transaction_request
from headway.proto import etcd_pb2


@pytest.mark.parametrize(
    ("prefix", "end"),
    [(b"/a/", b"/a0"), (b"a\xff", b"b"), (b"a\xff\xff", b"b"), (b"\xff", b"\0"), (b"", b"\0"), (b"\0", b"\x01")],
)
def test_the_end_of_a_prefix_is_the_next_key_after_all_of_them(prefix: bytes, end: bytes) -> None:
    """The last byte rises by one; 0xff cannot and is dropped; what has no end is etcd's zero byte."""
    assert prefix_end(prefix) == end


@given(prefix=st.binary(max_size=4), key=st.binary(min_size=1, max_size=6))
def test_a_key_is_in_the_range_exactly_if_it_has_the_prefix(prefix: bytes, key: bytes) -> None:
    """Any key, any prefix: start <= key < end, with the zero byte for no end."""
    start, end = range_start(prefix), prefix_end(prefix)
    assert (start <= key and (end == b"\0" or key < end)) == key.startswith(prefix)


def test_a_key_that_is_changed_twice_is_refused_before_etcd_does() -> None:
    """Put and delete of one key in one transaction: ValueError."""
    with pytest.raises(ValueError, match="once"):
        transaction_request((), (Put("/a", b""), Delete("/a")))


async def test_a_renewal_that_grpc_cancels_is_repeated() -> None:
    """Another task has closed the channel: nobody wants the lease to end."""
    num, again = 0, asyncio.Event()

    async def renew(lease_id: int, *, timeout_s: float) -> int:
        nonlocal num
        num += 1
        if num == 1:
            raise asyncio.CancelledError
        again.set()
        return 1

    async def revoke(lease_id: int) -> None:
        return None

    lease = Lease(7, ttl_s=1, is_strict=False, renew=renew, revoke=revoke, target="etcd")
    async with asyncio.timeout(10.0):
        await again.wait()
        lease.check()
        await lease.revoke()
    assert lease.lost.is_set()


class Call:
    """As grpc's: cancelling what is being written cancels the call."""

    def __init__(self, *, answers: bool = True) -> None:
        self.is_cancelled = False
        self.num_questions = 0
        self._answers = answers
        self._has_answered = asyncio.Event()
        self._reading: asyncio.Task[Any] | None = None

    async def read(self) -> etcd_pb2.WatchResponse:
        """An event comes while the question is still being written."""
        self._reading = asyncio.current_task()
        await self._has_answered.wait()
        return etcd_pb2.WatchResponse(watch_id=7)

    async def write(self, request: etcd_pb2.WatchRequest) -> None:
        """Takes longer than the event."""
        assert request.WhichOneof("request_union") == "progress_request"
        self.num_questions += 1
        if self._answers:
            self._has_answered.set()
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise

    def cancel(self) -> None:
        """Whoever reads is told so."""
        self.is_cancelled = True
        if self._reading is not None:
            self._reading.cancel()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for seconds."""
    monkeypatch.setattr(watch, "QUIET_S", 0.02)
    monkeypatch.setattr(watch, "SILENT_S", 0.3)
    monkeypatch.setattr(watch, "LISTEN_STEP_S", 0.01)


async def test_an_event_during_the_question_does_not_end_the_call() -> None:
    """The server sends an event before the client's progress request is written: the call continues."""
    call = Call()
    silence = watch._Silence(cast(Any, call))
    reply = await silence.read()
    assert isinstance(reply, etcd_pb2.WatchResponse)
    assert reply.watch_id == 7
    await asyncio.sleep(0.5)
    assert not call.is_cancelled
    assert call.num_questions == 1, "nobody reads: nothing is asked"
    await silence.end()


async def test_a_server_that_answers_nothing_loses_the_call() -> None:
    """The read ends, and whoever reads can tell why."""
    call = Call(answers=False)
    silence = watch._Silence(cast(Any, call))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(silence.read(), 5.0)
    assert (silence.has_ended_call, call.num_questions) == (True, 1)
    await silence.end()


class Connection:
    """To nobody."""

    endpoint = "nowhere:1"
    left = ""

    def leave(self, endpoint: str) -> None:
        """It was no good."""
        self.left = endpoint


async def test_a_call_cancelled_by_grpc_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation that the watching task did not get must not end it silently."""

    async def cancelled(*_: object) -> AsyncIterator[etcd_pb2.WatchResponse]:
        raise asyncio.CancelledError
        yield

    monkeypatch.setattr(watch, "_stream_with_login", cancelled)
    connection = Connection()
    with pytest.raises(StoreUnreachableError, match="the watch was cancelled"):
        await anext(watch.watch(cast(EtcdConnection, connection), "/", from_revision=1))
    assert connection.left == "nowhere:1"


FORBIDDEN = watch._ForbiddenError("etcd", "cancelled the watch: permission denied")


@dataclass
class Server:
    """Answers each stream with replies, or an error at the end."""

    answers: list[list[object]]
    user: str = "root"
    num_logins: int = 0
    access: Any = field(init=False)

    def __post_init__(self) -> None:
        self.access = SimpleNamespace(user=self.user)

    async def log_in(self) -> None:
        self.num_logins += 1

    async def stream(self, *_: object) -> AsyncIterator[object]:
        for answer in self.answers.pop(0):
            if isinstance(answer, Exception):
                raise answer
            yield answer


async def replies(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    monkeypatch.setattr(watch, "_stream", server.stream)
    return [reply async for reply in watch._stream_with_login(server, "/", 1)]  # type: ignore[arg-type]


async def test_a_forbidden_watch_is_asked_for_again_after_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: a server that still forbids it means it."""
    server = Server([[FORBIDDEN], ["created", "event"]])
    assert await replies(server, monkeypatch) == ["created", "event"]
    assert server.num_logins == 1
    with pytest.raises(StoreUnreachableError, match="permission denied"):
        await replies(Server([[FORBIDDEN], [FORBIDDEN]]), monkeypatch)


@pytest.mark.parametrize("server", [Server([["created", FORBIDDEN]]), Server([[FORBIDDEN]], user="")])
async def test_a_watch_that_has_begun_or_has_no_user_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second stream would tell the first one's events again."""
    with pytest.raises(StoreUnreachableError, match="permission denied"):
        await replies(server, monkeypatch)
    assert server.num_logins == 0
