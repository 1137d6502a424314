"""Brings layer files into a node's store, from other nodes or a checkpoint, resumed where a source failed.

A file whose checksum differs from its registration is dropped. Then its holder is asked for the bytes after the last
one: that makes the holder check its own file, and delete a damaged one.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

import structlog

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import RecoveryError
from headway.daemon.blobs.fetch import Source, fetch
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.state_key import StateKey
from headway.stages.errors import PeerError, UnavailableError
from headway.stages.state.file_digest import FileDigest

log = structlog.get_logger()

SILENCE_S: Final = 10.0
"""Seconds of silence after which the next holder is asked."""
MOST_SILENCES: Final = 6
"""Multiple of that time for a file that does not move while its connection does."""


async def bring(
    store: StateStore,
    key: StateKey,
    sources: Callable[[], Iterable[Source]],
    *,
    expected: FileDigest,
    generation: int = 0,
    uid: str = "",
    tell: Callable[[int], None] = lambda _: None,
) -> None:
    """Bring a file into the store from the first source that gives it, continuing at the next where one failed.

    tell: is called with the number of bytes that are there. Raises RecoveryError as `fetch`. Bytes that have come stay
    for the next attempt, until the file is abandoned.
    """
    file = await store.receive(key, expected)
    source = await fetch(file, sources, in_thread=store.in_thread, tell=tell)
    await store.adopt(
        key, file.path, size_bytes=expected.size_bytes, checksum=expected.checksum, generation=generation, uid=uid
    )
    log.info("state_fetched", key=str(key), source=source.name, size_bytes=expected.size_bytes)


def holder(
    client: NodeClient,
    endpoint: NodeEndpoint,
    key: StateKey,
    expected: FileDigest,
    *,
    unhurried: bool = False,
    is_forwarded: bool = False,
) -> Source:
    """Return a node as the source of a state file.

    unhurried: no worker waits for it, so it may come slowly. is_forwarded: a node without the file reads it where it
    can, also from the checkpoint folder.
    """

    def read(offset: int) -> AsyncIterator[bytes]:
        pieces = client.fetch_state(endpoint, key, offset=offset, forward=is_forwarded, unhurried=unhurried)
        return in_time(endpoint, pieces, heard=client.heard)

    async def let_it_check(_error: RecoveryError) -> None:
        if is_forwarded:
            return
        try:
            async for _ in in_time(endpoint, client.fetch_state(endpoint, key, offset=expected.size_bytes)):
                pass
        except (PeerError, RecoveryError) as error:
            log.warning("holder_checked_its_file", key=str(key), peer=endpoint.address, error=str(error))

    return Source(str(endpoint), read, let_it_check)


async def in_time(
    endpoint: NodeEndpoint, pieces: AsyncIterator[bytes], *, heard: dict[str, float] | None = None
) -> AsyncIterator[bytes]:
    """Yield the pieces as they come. Raises UnavailableError when the next one does not.

    heard: when each address sent the last piece of any file. On a slow line the pieces of many files take turns. So a
    file is not given up while its connection delivers others, or only after MOST_SILENCES times as long.
    """
    heard = {} if heard is None else heard
    while True:
        piece = await _next_in_time(endpoint, pieces, heard)
        if piece is None:
            return
        heard[endpoint.address] = time.monotonic()
        yield piece


async def _next_in_time(endpoint: NodeEndpoint, pieces: AsyncIterator[bytes], heard: dict[str, float]) -> bytes | None:
    asked = time.monotonic()
    coming: asyncio.Future[bytes | None] = asyncio.ensure_future(anext(pieces, None))
    try:
        while not coming.done():
            silent_from = min(max(asked, heard.get(endpoint.address, 0.0)), asked + (MOST_SILENCES - 1) * SILENCE_S)
            left_s = silent_from + SILENCE_S - time.monotonic()
            if left_s <= 0:
                raise UnavailableError(str(endpoint), f"sent nothing for {time.monotonic() - silent_from:.3g} s")
            await asyncio.wait({coming}, timeout=left_s)
        return coming.result()
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming})
