"""The link under failures of the network, by itself and with its values over gloo beside the stream: each frame comes
once, in order, unchanged, or LinkLost says why."""

import asyncio
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch

from headway.daemon.worker.neighbours import Neighbours
from headway.stages.links.link import FrameKind, LinkLost
from headway.stages.links.stream_link import StreamLink
from tests.rigs.gloo_attach import GlooAttach
from tests.rigs.tcp_proxy import TcpProxy, Way
from tests.rigs.two_sides import DEADLINE_S, MAX_BYTES, Endpoints, Inbox, Pair, frame_of, heard, lost, lower_terms

NUM_FRAMES = 24


@dataclass
class Pairs:
    """Makes connected pairs; each has a job of its own."""

    endpoints: Endpoints
    proxy: TcpProxy
    attach: GlooAttach | None = None
    made: list[Pair] = field(default_factory=list)

    def __call__(self, *, resume_timeout_s: float = DEADLINE_S) -> Pair:
        silence = timedelta(seconds=resume_timeout_s)
        pair = Pair(self.endpoints, port=self.proxy.port, silence=silence, attach=self.attach)
        self.made.append(pair)
        pair.exchange([1])
        return pair


@pytest.fixture
def proxy(endpoints: Endpoints) -> Iterator[TcpProxy]:
    """Between the two ends."""
    with TcpProxy(endpoints[2].port) as proxy:
        yield proxy


@pytest.fixture
def make_pair(endpoints: Endpoints, proxy: TcpProxy, request: pytest.FixtureRequest) -> Iterator[Pairs]:
    """Connected pairs through the proxy; gloo goes beside it."""
    pairs = Pairs(endpoints, proxy, GlooAttach() if getattr(request, "param", "") == "attached" else None)
    yield pairs
    assert pairs.attach is None or (pairs.attach.num_opened > 4 and not pairs.attach.stuck)
    proxy.heal()
    for pair in pairs.made:
        pair.__exit__()


def random_sizes(seed: int) -> list[int]:
    """From nothing to the largest, most of them small."""
    return [int(MAX_BYTES ** random.Random(seed * 1000 + batch).random()) for batch in range(NUM_FRAMES)]


FAULTS: dict[str, Callable[[TcpProxy], object]] = {
    "cut": lambda proxy: proxy.cut(),
    "all is lost": lambda proxy: proxy.drop(),
    "what goes down is lost": lambda proxy: proxy.drop(Way.THERE),
    "what goes up is lost": lambda proxy: proxy.drop(Way.BACK),
    "stalled": lambda proxy: proxy.stall(),
}


@pytest.mark.parametrize("make_pair", ["stream", "attached"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "longer_s"),
    [pytest.param("cut", 10.0, marks=pytest.mark.slow), *((fault, 0.0) for fault in FAULTS)],
)
def test_frames_under_way_survive_an_outage(make_pair: Pairs, proxy: TcpProxy, fault: str, longer_s: float) -> None:
    """The network fails amid a stream of frames until both ends know it, and heals: every frame arrives once, in order,
    unchanged.
    """
    pair = make_pair()
    num_resumed = pair.above.num_resumed + pair.below.num_resumed
    begin = iter([lambda: None] * 5 + [lambda: FAULTS[fault](proxy)])

    def heal() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while pair.upper.broken_at is None or pair.lower.broken_at is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        time.sleep(longer_s)
        proxy.heal()

    healer = threading.Thread(target=heal)
    healer.start()
    pair.exchange(random_sizes(1), pause=lambda: next(begin, lambda: None)())
    healer.join()
    assert pair.upper.num_resumed >= 1
    assert pair.lower.num_resumed >= 1
    assert pair.above.num_resumed + pair.below.num_resumed >= num_resumed + 2


@pytest.mark.parametrize("make_pair", ["stream", "attached"], indirect=True)
def test_many_cuts_at_random_moments(make_pair: Pairs, proxy: TcpProxy) -> None:
    """Fifty resets while frames of all sizes go both ways."""
    pair = make_pair()
    chance = random.Random(7)
    for seed in range(5):
        cuts = [chance.random() * 0.15 for _ in range(10)]

        def cut_again(moments: list[float] = cuts) -> None:
            for moment in moments:
                time.sleep(moment)
                proxy.reset()

        cutter = threading.Thread(target=cut_again)
        cutter.start()
        pair.exchange(random_sizes(seed))
        cutter.join()
    pair.exchange([10])
    assert pair.upper.num_resumed >= 3


def test_an_outage_that_lasts_too_long_ends_the_link_on_both_sides(make_pair: Pairs, proxy: TcpProxy) -> None:
    """Nothing gets through for longer than the timeout: both sides are told who is gone and why, not earlier."""
    pair = make_pair(resume_timeout_s=1.5)
    begun_at = time.monotonic()
    proxy.cut()
    for inbox, link in ((pair.at_upper, pair.upper), (pair.at_lower, pair.lower)):
        told = lost(inbox)
        assert told.peer == link.peer
        assert told.reason.startswith("not resumed within 1.5 s: ")
    assert 1.4 < time.monotonic() - begun_at < 20


def test_a_closed_link_is_not_retried_and_its_last_frames_arrive(make_pair: Pairs, proxy: TcpProxy) -> None:
    """One side says its last frames and closes; the network breaks then: the frames and the goodbye still come."""
    pair = make_pair()
    frames = [frame_of(FrameKind.ACTIVATION, batch, 1 << 20) for batch in range(8)]
    for sent in frames:
        pair.upper.send(sent)
    pair.upper.close()
    proxy.reset()
    for sent in frames:
        assert torch.equal(heard(pair.at_lower).tensors[0], sent.tensors[0])
    assert lost(pair.at_lower) == LinkLost(pair.lower.peer, "the peer closed the link")
    assert pair.at_upper.empty()


def test_a_quiet_link_stays(make_pair: Pairs) -> None:
    """Nobody sends anything for longer than silence is allowed: heartbeats keep the one stream."""
    pair = make_pair()
    with pytest.raises(queue.Empty):
        pair.at_upper.get(timeout=3.5)
    assert (pair.upper.num_resumed, pair.lower.num_resumed) == (0, 0)
    pair.exchange([5])


@pytest.mark.parametrize("sides", [{"dialled": True, "accepted": False}, {"dialled": False, "accepted": True}, {}])
def test_an_endpoint_can_be_cut_off(make_pair: Pairs, sides: dict[str, bool]) -> None:
    """The streams of one kind of link are dropped and refused for half a second; then the link goes on."""
    pair = make_pair()
    began = time.monotonic()
    for endpoint in (pair.above, pair.below):
        endpoint.cut(timedelta(seconds=0.5), **sides)
    pair.exchange(random_sizes(2))
    assert pair.upper.num_resumed >= 1
    assert time.monotonic() - began >= 0.4


def test_a_worker_tells_of_a_broken_link_until_it_is_resumed(make_pair: Pairs, proxy: TcpProxy) -> None:
    """Its daemon dials the neighbour then, also when the worker itself waits for nobody."""
    pair = make_pair()
    neighbours = Neighbours(pair.above, queue.SimpleQueue(), print)
    neighbours._links, neighbours._positions = [pair.upper], {pair.upper.peer: 4}

    def until(broken: list[int]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while neighbours.broken != broken:
            assert time.monotonic() < deadline, neighbours.broken
            time.sleep(0.01)

    until([])
    proxy.drop()
    until([4])
    [cut] = neighbours.cuts
    assert (cut.ends, cut.num_cut, cut.num_back, cut.cut_s) == ((0, 4), 1, 0, 0.0)
    proxy.heal()
    until([])
    [back] = neighbours.cuts
    assert back.num_cut == back.num_back >= 1
    assert back.cut_s > 0


def test_an_endpoint_can_be_deaf(make_pair: Pairs) -> None:
    """One side hears nothing for three seconds, and is heard: it gives its stream up, and the link goes on."""
    pair = make_pair()
    pair.below.deafen(timedelta(seconds=3))
    pair.exchange(random_sizes(2))
    assert pair.lower.num_resumed >= 1


class _Breaking:
    """A stream that breaks on `broken`, and whose write takes a moment to be cancelled."""

    def __init__(self) -> None:
        self.broken = asyncio.Event()
        self.is_writing = asyncio.Event()
        self.is_cancelled = asyncio.Event()

    async def read(self) -> bytes | None:
        await self.broken.wait()
        raise ConnectionError("reset")

    async def write(self, *_: bytes | memoryview) -> None:
        self.is_writing.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.is_cancelled.set()
            await asyncio.sleep(0.2)

    async def finish(self) -> None:
        return


def test_a_link_that_is_cancelled_while_it_breaks_is_broken(endpoints: Endpoints) -> None:
    """While the link puts away what served a stream, gRPC cancels the call: it must know since when it has
    no stream, because from then on its deadline counts."""
    loop = endpoints[0]
    link = StreamLink(loop, lower_terms("j", inbox=Inbox()))

    async def serve(stream: _Breaking) -> None:
        async with link.turn() as turn:
            await link.run(stream, turn, acknowledged=0)

    async def scenario() -> None:
        stream = _Breaking()
        serving = asyncio.create_task(serve(stream))
        await stream.is_writing.wait()  # the first heartbeat
        stream.broken.set()
        await stream.is_cancelled.wait()
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled()

    loop.run(scenario(), timeout=timedelta(seconds=10), what="a stream that breaks")
    assert link.broken_at is not None
