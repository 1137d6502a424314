"""A watch lives as long as its call, and whoever reads it is told of its end, whatever grpc makes of a cancellation."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from headway.daemon.base.errors import StoreUnreachableError
from headway.daemon.cluster import watch
from headway.daemon.cluster.connection import EtcdConnection
from headway.proto import etcd_pb2


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
