"""Messages of data.proto to what is written to a stream at once, and back. No socket, no thread, no clock here.

Each time that something is written to or read from a stream, several threads wake up: for a small frame that is most of
its cost. So frames that wait together travel together: a bundle is one or more messages, each behind its length.
"""

from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Protocol

from headway.stages.frame_codec import CHUNK_BYTES, HEADER_LENGTH, MAX_HEADER_BYTES

MESSAGE_LENGTH = Struct("<I")
MAX_OVERHEAD_BYTES = MESSAGE_LENGTH.size + HEADER_LENGTH.size + MAX_HEADER_BYTES
"""What a bundle may have beyond the bytes of one chunk: the header of that chunk, or those of several."""
MAX_BUNDLE_BYTES = CHUNK_BYTES + MAX_OVERHEAD_BYTES


class Outgoing(Protocol):
    """A frame, or a goodbye, that can be said in messages."""

    def messages(
        self, acknowledged: Callable[[], int], *, chunk_bytes: int
    ) -> Iterator[Sequence[bytes | memoryview]]: ...


def bundles(
    next_frame: Callable[[], Outgoing | None], acknowledged: Callable[[], int], chunk_bytes: Callable[[], int]
) -> Iterator[bytes]:
    """All frames that there are, in their order; each bundle is made (one copy) when it is asked for.

    chunk_bytes: the size of chunk at that moment, which is as much as a bundle holds.
    """
    parts: list[bytes | memoryview] = []
    num_bytes = 0
    while (frame := next_frame()) is not None:
        size = chunk_bytes()
        for message in frame.messages(acknowledged, chunk_bytes=size):
            message_bytes = sum(map(len, message))
            if parts and num_bytes + MESSAGE_LENGTH.size + message_bytes > size + MAX_OVERHEAD_BYTES:
                yield b"".join(parts)
                parts, num_bytes = [], 0
            parts += (MESSAGE_LENGTH.pack(message_bytes), *message)
            num_bytes += MESSAGE_LENGTH.size + message_bytes
    if parts:
        yield b"".join(parts)


def bundle(message: bytes) -> bytes:
    """One message that travels alone."""
    return MESSAGE_LENGTH.pack(len(message)) + message


def unbundle(received: bytes) -> Iterator[memoryview]:
    """The messages. Raises ValueError where the bundle ends too early, after the messages before that place."""
    rest = memoryview(received)
    while True:
        if len(rest) < MESSAGE_LENGTH.size:
            raise ValueError(f"a bundle that ends with {len(rest)} bytes")
        (length,) = MESSAGE_LENGTH.unpack_from(rest)
        end = MESSAGE_LENGTH.size + length
        if end > len(rest):
            raise ValueError(f"a message of {length} bytes in a bundle with {len(rest) - MESSAGE_LENGTH.size} left")
        yield rest[MESSAGE_LENGTH.size : end]
        rest = rest[end:]
        if not rest:
            return
