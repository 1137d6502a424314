"""A thread that calls CUDA first makes the worker's card its own: else the call makes a context on card 0."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headway.stages.device.opening import CudaStreams
from headway.stages.device.streamed import Stream
from headway.stages.links.nccl import CudaSideStream

CARD = torch.device("cuda", 3)


class Calls:
    """CUDA as far as the seam calls it. Each thread begins on card 0, as CUDA's own do."""

    def __init__(self) -> None:
        self.on_another_card: list[str] = []
        self._thread = threading.local()

    def set_device(self, device: Any) -> None:
        self._thread.index = torch.device("cuda", device).index if isinstance(device, int) else device.index

    def called(self, what: str) -> None:
        if getattr(self._thread, "index", 0) != CARD.index:
            self.on_another_card.append(what)

    def event(self, **_: Any) -> "Event":
        return Event(self)

    @contextmanager
    def stream(self, _: Any) -> Iterator[None]:
        self.called("stream")
        yield

    def current_stream(self, _: Any) -> str:
        self.called("current_stream")
        return "compute"


class Event:
    """torch.cuda.Event."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def record(self, _: Any) -> None:
        self._calls.called("record")

    def query(self) -> bool:
        self._calls.called("query")
        return True

    def synchronize(self) -> None:
        self._calls.called("synchronize")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
    monkeypatch.setattr(torch.cuda, "Event", calls.event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: "side")
    monkeypatch.setattr(torch.cuda, "stream", calls.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", calls.current_stream)
    return calls


def in_a_thread(act: Callable[[], object]) -> None:
    """Call it in a fresh thread, and return when it is done."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive()


def test_every_thread_that_waits_for_an_event_is_on_the_workers_card(calls: Calls) -> None:
    """Threads of completions, of the snapshot writer and of tokens ask for events that another thread recorded."""
    calls.set_device(CARD)
    streams = CudaStreams(CARD)
    event = streams.record(Stream.COMPUTE)
    in_a_thread(event.wait)
    in_a_thread(lambda: event.is_passed)
    in_a_thread(lambda: streams.record(Stream.IN))
    in_a_thread(lambda: streams.copy(Stream.IN, torch.empty(1), torch.ones(1)))
    assert calls.on_another_card == []


def test_the_thread_that_sends_is_on_the_workers_card(calls: Calls) -> None:
    """The attachment is formed in the thread that receives; the one that sends is another."""
    calls.set_device(CARD)
    side = CudaSideStream(CARD)

    def send() -> None:
        with side.entered():
            pass

    in_a_thread(send)
    assert calls.on_another_card == []
