"""Downloads a data set from other nodes into this node's cache, shard by shard, each from any node that has it.

Received bytes stay on disk, so the next attempt continues from there with any node. A shard is hashed while it arrives
and then counts as verified; it is not read twice.
"""

import shutil
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from headway.daemon.addresses import NodeEndpoint
from headway.daemon.errors import DamagedCopyError, RecoveryError, StorageAwayError
from headway.daemon.rpc.peer_client import NodeClient
from headway.daemon.rpc.transfer import in_time
from headway.daemon.shards.incoming_shard import IncomingShard
from headway.daemon.shards.verified_shards import VerifiedShards
from headway.daemon.storage.file_threads import Beat, FileThreads
from headway.stages.data.shard_index import INDEX_NAME, DataFile, ShardIndex, read_index
from headway.stages.errors import DataError, PeerError

T = TypeVar("T")

MAX_INDEX_BYTES: Final = 64 << 20
"""Maximum size of a data set's index: its true size is unknown before it arrives."""
INCOMING: Final = "incoming"
"""Folder, inside the data set's own, of unfinished files."""


class Download:
    """One attempt to download one data set."""

    def __init__(
        self,
        folder: Path,
        sha256: str,
        *,
        client: NodeClient,
        peers: Callable[[], Iterable[NodeEndpoint]],
        verified: VerifiedShards,
        threads: FileThreads,
        tell: Callable[[int, int], None],
    ) -> None:
        """folder: of the cache. threads: of downloads alone.

        tell: is called with the bytes that are here and hashed, and with the final number.
        """
        self._folder = folder
        self._incoming = folder / INCOMING
        self._sha256 = sha256
        self._client = client
        self._peers = peers
        self._verified = verified
        self._threads = threads
        self._tell = tell
        self._done = 0
        self._total = 0
        """Bytes of the shards that are in place, and of all."""
        self._giver: NodeEndpoint | None = None
        """Node that gave the last file: it is asked first for the next."""

    async def run(self) -> None:
        """Download the data set. The index comes first and is put in place last: without it a folder holds no shards.

        Raises RecoveryError with each node's reason if none gives a missing part, StorageAwayError if the cache's file
        system does not answer.
        """
        if self._threads.num_hung:  # a call of an earlier attempt could still write to the same files
            raise StorageAwayError(str(self._folder), "an earlier write has not ended")
        await self._in_thread(lambda _: self._incoming.mkdir(parents=True, exist_ok=True))
        index = await self._index()
        self._total = sum(each.num_bytes for each in index.files)
        await self._in_thread(lambda _: self._require_room(index))
        for each in index.files:
            await self._bring(each)
            self._done += each.num_bytes
        await self._in_thread(lambda _: self._finish())

    async def _index(self) -> ShardIndex:
        """Return the index: of an earlier attempt, or from any node. Its name is the hash of its content."""

        async def fetch(endpoint: NodeEndpoint) -> ShardIndex:
            raw = bytearray()
            async for piece in in_time(endpoint, self._client.fetch_data(endpoint, self._sha256)):
                raw += piece
                if len(raw) > MAX_INDEX_BYTES:
                    raise RecoveryError(str(endpoint), f"sent an index of more than {MAX_INDEX_BYTES >> 20} MiB")
            return await self._in_thread(lambda _: self._keep_index(bytes(raw), str(endpoint)))

        kept = await self._in_thread(lambda _: self._kept_index())
        return kept if kept is not None else await self._from_any(fetch)

    def _kept_index(self) -> ShardIndex | None:
        for folder in (self._folder, self._incoming):
            try:
                index = read_index(folder)
            except DataError:
                continue
            if index.sha256 == self._sha256:
                return index
        return None

    def _keep_index(self, raw: bytes, sender: str) -> ShardIndex:
        (self._incoming / INDEX_NAME).write_bytes(raw)
        try:
            index = read_index(self._incoming)
        except DataError as error:
            raise RecoveryError(sender, f"sent an index that {error.reason}") from error
        if index.sha256 != self._sha256:
            raise RecoveryError(sender, f"sent the index of other data, {index.sha256[:12]}…")
        return index

    def _require_room(self, index: ShardIndex) -> None:
        """Raise RecoveryError before a byte moves, if the data does not fit."""
        places = [self._folder / each.file for each in index.files]
        places += [self._incoming / each.sha256 for each in index.files]
        missing = self._total - sum(place.stat().st_size for place in places if place.is_file())
        if missing > (free := shutil.disk_usage(self._folder).free):
            text = f"has {free / 1e9:.1f} GB free, and {missing / 1e9:.1f} GB of the data are missing"
            raise RecoveryError(str(self._folder), text)

    async def _bring(self, wanted: DataFile) -> None:
        """Download one file, unless a verified one is in place."""
        target, size_bytes = self._folder / wanted.file, wanted.num_bytes
        part = IncomingShard(self._incoming / wanted.sha256, size_bytes=size_bytes, sha256=wanted.sha256)

        def look(beat: Beat) -> bool:
            def moved(_: int) -> None:
                beat()
                self._tell(self._done + part.num_bytes, self._total)

            if self._is_there(target, wanted, beat):
                return True
            part.resume(moved)
            return False

        async def receive(endpoint: NodeEndpoint) -> None:
            def add(piece: bytes, _: Beat) -> None:
                part.append(piece, str(endpoint))

            # A complete part of an earlier attempt is only checked.
            if part.num_bytes < size_bytes:
                pieces = self._client.fetch_data(endpoint, wanted.sha256, offset=part.num_bytes)
                async for piece in in_time(endpoint, pieces, heard=self._client.heard):
                    await self._in_thread(partial(add, piece))
                    self._tell(self._done + part.num_bytes, self._total)
            await self._in_thread(lambda _: part.check(str(endpoint)))

        async def fetch(endpoint: NodeEndpoint) -> None:
            num_before = part.num_bytes
            try:
                await receive(endpoint)
            except DamagedCopyError:
                if not num_before:
                    raise
                # bytes from another node may be the wrong ones, so now fetch all of it from this node
                await receive(endpoint)

        def put(_: Beat) -> None:
            part.put(target)
            self._verified.remember(target, wanted.sha256)

        if not await self._in_thread(look):
            await self._from_any(fetch, lambda: part.num_bytes)
            await self._in_thread(put)

    def _is_there(self, target: Path, wanted: DataFile, beat: Beat) -> bool:
        try:
            self._verified.verify_file(target, wanted.sha256, lambda _: beat())
        except DataError:
            return False
        return True

    async def _from_any(
        self, fetch: Callable[[NodeEndpoint], Awaitable[T]], num_bytes: Callable[[], int] = lambda: 0
    ) -> T:
        """Return what the first node gives that can give all of it. Nodes are asked in turns while more bytes arrive.

        Raises RecoveryError with each node's reason, StorageAwayError.

        """
        while True:
            before, reasons = num_bytes(), []
            for endpoint in sorted(self._peers(), key=lambda peer: peer != self._giver):
                try:
                    given = await fetch(endpoint)
                except StorageAwayError:
                    raise  # the fault is in this node's cache: no other node can help
                except (PeerError, RecoveryError) as error:
                    reasons.append(str(error))
                    continue
                self._giver = endpoint
                return given
            if num_bytes() <= before:
                raise RecoveryError("other nodes", "; ".join(reasons) or "there are none")

    def _finish(self) -> None:
        if (self._incoming / INDEX_NAME).exists():
            (self._incoming / INDEX_NAME).replace(self._folder / INDEX_NAME)
        shutil.rmtree(self._incoming)

    async def _in_thread(self, act: Callable[[Beat], T]) -> T:
        return await self._threads.run(str(self._folder), act)
