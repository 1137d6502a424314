"""Brings layer files into a node's store: from other nodes, resumed where a holder failed, or from a checkpoint."""

import asyncio
from collections.abc import Iterable

import structlog

from headway.daemon.errors import RecoveryError
from headway.daemon.node.peer_client import NodeClient
from headway.daemon.records import CheckpointFile
from headway.daemon.storage.checkpoint import fetch_from_checkpoint
from headway.daemon.storage.state_key import StateKey
from headway.daemon.storage.state_store import StateStore
from headway.stages.errors import PeerError

log = structlog.get_logger()


async def fetch_from_nodes(
    store: StateStore, client: NodeClient, key: StateKey, *, addresses: Iterable[str], expected: CheckpointFile
) -> None:
    """Fetch a file from the first holder that gives it, going on at the next where one failed.

    Raises RecoveryError with every holder's reason when none does, or when the hash is another.
    """
    store.require_room(expected.size_bytes, str(key))
    incoming = store.receive(key)
    reasons = []
    for address in addresses:
        try:
            async for chunk in client.fetch_state(address, key, offset=incoming.offset):
                incoming.append(chunk.data, offset=chunk.offset)
            await asyncio.to_thread(incoming.verify, expected.sha256)
            incoming.put_in_place()
            store.adopt(key, incoming.path, size_bytes=expected.size_bytes, sha256=expected.sha256)
        except (PeerError, RecoveryError) as error:
            log.warning("state_fetch_failed", key=str(key), peer=address, error=str(error))
            reasons.append(str(error))
            continue
        log.info("state_fetched", key=str(key), peer=address, size_bytes=expected.size_bytes)
        return
    raise RecoveryError(str(key), "; ".join(reasons) or "nobody holds it")


async def fetch_checkpointed(store: StateStore, key: StateKey, *, url: str, expected: CheckpointFile) -> None:
    """Fetch a file from the folder of a checkpoint. Raises RecoveryError, naming the file there."""
    store.require_room(expected.size_bytes, str(key))
    path = store.path_of(key)
    await asyncio.to_thread(fetch_from_checkpoint, url, key.layer, expected, path)
    store.adopt(key, path, size_bytes=expected.size_bytes, sha256=expected.sha256)
    log.info("state_fetched", key=str(key), url=url, size_bytes=expected.size_bytes)
