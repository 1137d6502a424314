"""Bundles messages of data.proto for one write to a stream, and splits bundles. No socket, no thread, no clock here.

Each write to or read from a stream wakes several threads: for a small frame that is most of its cost. So waiting frames
travel together: a bundle is one or more messages, each after its length.
"""

from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Protocol

from headway.stages.links.grpc.frame_codec import CHUNK_BYTES, HEADER_LENGTH, MAX_HEADER_BYTES

MESSAGE_LENGTH = Struct("<I")
MAX_OVERHEAD_BYTES = MESSAGE_LENGTH.size + HEADER_LENGTH.size + MAX_HEADER_BYTES
"""Bytes of a bundle beyond those of one chunk: the header of that chunk, or those of several."""
MAX_BUNDLE_BYTES = CHUNK_BYTES + MAX_OVERHEAD_BYTES


class Outgoing(Protocol):
    """A frame, or a goodbye, that can be sent as messages."""

    def messages(
        self, acknowledged: Callable[[], int], *, chunk_bytes: int
    ) -> Iterator[Sequence[bytes | memoryview]]: ...


def bundles(
    next_frame: Callable[[], Outgoing | None], acknowledged: Callable[[], int], chunk_bytes: Callable[[], int]
) -> Iterator[list[bytes | memoryview]]:
    """Yield all frames in their order; each bundle is made when it is asked for, as parts that are not yet copied
    together.

    chunk_bytes: the present chunk size, which is the size of a bundle.
    """
    parts: list[bytes | memoryview] = []
    num_bytes = 0
    while (frame := next_frame()) is not None:
        size = chunk_bytes()
        for message in frame.messages(acknowledged, chunk_bytes=size):
            message_bytes = sum(map(len, message))
            if parts and num_bytes + MESSAGE_LENGTH.size + message_bytes > size + MAX_OVERHEAD_BYTES:
                yield parts
                parts, num_bytes = [], 0
            parts += (MESSAGE_LENGTH.pack(message_bytes), *message)
            num_bytes += MESSAGE_LENGTH.size + message_bytes
    if parts:
        yield parts


def bundle(message: bytes) -> bytes:
    """Return one message that travels alone."""
    return MESSAGE_LENGTH.pack(len(message)) + message


def unbundle(received: bytes | memoryview) -> Iterator[memoryview]:
    """Yield the messages. Raises ValueError if the bundle ends too early, after the messages before that place."""
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
