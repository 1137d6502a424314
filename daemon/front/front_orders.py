"""What a daemon tells the process that serves its shared port: a line of JSON for each change, on standard input."""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from headway.daemon.front.front import Front
from headway.daemon.front.outpost import Outposts, Post

PIECE_BYTES = 64 << 10
BEAT = b"."
"""What the process writes to its standard output, to show that it does not stand still."""
BEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class FrontOrder:
    """All that holds from now on."""

    tokens: dict[str, str] = field(default_factory=dict)
    """Node by token, of the nodes that stand by here."""
    posts: tuple[Post, ...] = ()
    """Where this node stands by; none: others dial it directly."""


class OrderReader:
    """The process's side."""

    def __init__(self, front: Front, outposts: Outposts) -> None:
        self._front, self._outposts = front, outposts
        self._raw = b""

    def read(self, number: int) -> None:
        """Read what has come, and obey the last whole line of it."""
        with suppress(BlockingIOError):
            while piece := os.read(number, PIECE_BYTES):
                self._raw += piece
        *lines, self._raw = self._raw.split(b"\n")
        if lines:
            try:
                order = msgspec.json.decode(lines[-1], type=FrontOrder)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                sys.stderr.write(f"an order that cannot be read changes nothing: {error}\n")
                return
            self._front.expect(order.tokens)
            self._outposts.stand_by(order.posts)
