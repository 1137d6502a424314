"""Chooses the documents of the validation split: by their content and a seed, wherever they stand. Pure.

Equal documents are on the same side, so no copy of a training document is validated on.
"""

import json
from dataclasses import dataclass
from hashlib import blake2b

from headway.daemon.data.documents import Conversation, Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A share of all documents."""

    share: float = 0.0
    seed: int = 0

    def contains(self, beginning: bytes | Conversation | Pair) -> bool:
        """Return whether a document is held out. beginning: its first piece, the conversation, or the pair.

        It is, if BLAKE2b's first 8 bytes, a little-endian number, are below share · 2^64. The key is the seed.
        """
        if not self.share:
            return False
        digest = blake2b(_content(beginning), digest_size=8, key=self.seed.to_bytes(8, "little")).digest()
        return int.from_bytes(digest, "little") < int(self.share * 2**64)


def _content(beginning: bytes | Conversation | Pair) -> bytes:
    if isinstance(beginning, bytes):
        return beginning
    if isinstance(beginning, Pair):
        return _content(beginning.preferred) + _content(beginning.other)
    return json.dumps([beginning.messages, beginning.tools], sort_keys=True, default=str).encode()
