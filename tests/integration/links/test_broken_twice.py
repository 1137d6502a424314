"""A stream breaks, and while the link puts away what served it, gRPC cancels the call as well."""

import asyncio
import queue
from datetime import timedelta

import torch

from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.stream_link import StreamLink
from tests.integration.links.conftest import Endpoints
from tests.integration.links.two_sides import lower_terms


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
    """It must know since when it has no stream: from then on its deadline counts."""
    loop: LoopThread = endpoints[0]
    contract = FrameContract({FrameKind.ACTIVATION: (TensorForm(torch.uint8, (1,)),)}, 4)
    inbox: queue.SimpleQueue[Frame | LinkLost] = queue.SimpleQueue()
    link = StreamLink(loop, lower_terms("j", inbox=inbox, contract=contract))

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
