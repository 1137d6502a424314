"""A link's stream over a unix socket: messages in parts, their limits, their ends, and turns for other tasks."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headway.stages.links.frame_codec import LENGTH, MAX_BUNDLE_BYTES
from headway.stages.links.streams import Ears, SocketStream

DEADLINE_S = 20.0
Pair = tuple[SocketStream, SocketStream, socket.socket]

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    """Both ends, and the first one's socket."""
    one, other = socket.socketpair(socket.AF_UNIX)
    ends = SocketStream(one, Ears()), SocketStream(other, Ears())
    yield *ends, one
    for end in ends:
        end.close()


async def received(stream: SocketStream) -> bytes | None:
    """Return a copy of the next message."""
    message = await asyncio.wait_for(stream.read(), DEADLINE_S)
    return None if message is None else bytes(message)


@pytest.mark.parametrize("sizes", [[], [0], [5, 0, 7], [3] * 1000, [1 << 18, 5, 1 << 19, 0, 9]])
async def test_parts_arrive_as_one_message(pair: Pair, sizes: list[int]) -> None:
    """Few, many, empty and large parts, more than the kernel has room for, twice in a row."""
    parts = [memoryview(bytes(range(256)) * (size // 256 + 1))[:size] for size in sizes]
    for _ in range(2):
        told, _ = await asyncio.gather(received(pair[1]), pair[0].write(*parts))
        assert told == b"".join(parts)


async def test_an_end_between_messages_is_one(pair: Pair) -> None:
    """What was written arrives after the writer has closed, then the end."""
    await pair[0].write(b"last")
    pair[0].close()
    assert await received(pair[1]) == b"last"
    assert await received(pair[1]) is None


@pytest.mark.parametrize("sent", [b"\x05", LENGTH.pack(5), LENGTH.pack(5) + b"four"])
async def test_an_end_inside_a_message_is_a_break(pair: Pair, sent: bytes) -> None:
    """Half a length, a length alone, half a message."""
    pair[2].send(sent)
    pair[0].close()
    with pytest.raises(ConnectionError, match="ended inside a message"):
        await received(pair[1])


async def test_a_message_that_is_too_long_is_not_read(pair: Pair) -> None:
    """A length above that of any bundle ends the stream before memory is asked for."""
    pair[2].send(LENGTH.pack(MAX_BUNDLE_BYTES + 1))
    with pytest.raises(ConnectionError, match="a message of"):
        await received(pair[1])


async def test_a_flood_leaves_turns_to_other_tasks(pair: Pair) -> None:
    """Messages that have all arrived are read one by one, and another task runs between them."""
    num_messages, num_turns = 50, 0
    for _ in range(num_messages):
        await pair[0].write(b"small")

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    counter = asyncio.create_task(count())
    for _ in range(num_messages):
        message = await pair[1].read()
        assert message is not None
        assert bytes(message) == b"small"
    counter.cancel()
    assert num_turns >= num_messages - 2


async def test_a_broken_connection_says_so(pair: Pair) -> None:
    """Nobody reads any more: the writer learns of it."""
    pair[1].close()
    with pytest.raises(ConnectionError, match="the stream broke"):
        await pair[0].write(b"to nobody")
