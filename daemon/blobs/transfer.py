"""Brings layer files into a node's store: from other nodes, resumed where a holder failed, or from a checkpoint.

A file whose checksum differs from its registration is dropped. Then its holder is asked for the bytes after the last
one: that makes the holder check its own file, and delete a damaged one.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import RecoveryError
from headway.daemon.blobs.fetch import Source, fetch
from headway.daemon.blobs.file_threads import Beat, FileThreads
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


async def fetch_from_nodes(
    store: StateStore,
    client: NodeClient,
    key: StateKey,
    *,
    endpoints: Iterable[NodeEndpoint],
    expected: FileDigest,
    generation: int = 0,
    uid: str = "",
    unhurried: bool = False,
    is_forwarded: bool = False,
    tell: Callable[[int], None] = lambda _: None,
) -> None:
    """Fetch a file from the first holder that gives it, continuing at the next where one failed.

    unhurried: no worker waits for it, so holders may send it slowly. is_forwarded: a holder without the file reads it
    where it can, also from the checkpoint folder. tell: is called with the number of bytes that are there.

    Raises RecoveryError with every holder's reason when none gives it, or when the checksum differs. Bytes that have
    come stay for the next attempt, until the file is abandoned.
    """
    file = await store.receive(key, expected)
    sources = [
        holder(client, endpoint, key, expected, unhurried=unhurried, is_forwarded=is_forwarded)
        for endpoint in endpoints
    ]
    source = await fetch(file, lambda: sources, in_thread=store.in_thread, tell=tell)
    await store.adopt(
        key, file.path, size_bytes=expected.size_bytes, checksum=expected.checksum, generation=generation, uid=uid
    )
    log.info("state_fetched", key=str(key), peer=source.name, size_bytes=expected.size_bytes)


async def fetch_stored(
    store: StateStore,
    threads: FileThreads,
    key: StateKey,
    *,
    url: str,
    fetch: Callable[[Path, Beat], None],
    expected: FileDigest,
    generation: int = 0,
    uid: str = "",
) -> None:
    """Fetch a file from a checkpoint, or from the folder with the initial weights. Raises RecoveryError.

    url: the folder. fetch(path, beat): writes the verified file to a path, in a thread.
    """
    store.require_room(expected.size_bytes, str(key), held=key)
    path = await store.place_for(key)
    await threads.run(url, lambda beat: fetch(path, beat))
    await store.adopt(
        key, path, size_bytes=expected.size_bytes, checksum=expected.checksum, generation=generation, uid=uid
    )
    log.info("state_fetched", key=str(key), url=url, size_bytes=expected.size_bytes)


def holder(
    client: NodeClient,
    endpoint: NodeEndpoint,
    key: StateKey,
    expected: FileDigest,
    *,
    unhurried: bool = False,
    is_forwarded: bool = False,
) -> Source:
    """Return a node as the source of a state file. unhurried, is_forwarded: as for `fetch_from_nodes`."""

    def read(offset: int) -> AsyncIterator[bytes]:
        pieces = client.fetch_state(endpoint, key, offset=offset, forward=is_forwarded, unhurried=unhurried)
        return in_time(endpoint, pieces, heard=client.heard)

    async def let_it_check() -> None:
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
