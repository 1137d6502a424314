"""Downloads a data set into this node's cache, shard by shard, each from any giver that has it."""

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from headway.daemon.errors import DamagedCopyError, RecoveryError, StorageAwayError
from headway.daemon.shards.givers import Giver, ServerAwayError
from headway.daemon.shards.incoming_data import IncomingData
from headway.daemon.shards.verified_shards import VerifiedShards
from headway.daemon.storage.file_threads import Beat, FileThreads
from headway.stages.data.shard_index import MAX_INDEX_BYTES, DataFile, ShardIndex
from headway.stages.errors import PeerError

T = TypeVar("T")


class Download:
    """One attempt to download one data set."""

    def __init__(
        self,
        folder: Path,
        sha256: str,
        *,
        givers: Callable[[], Iterable[Giver]],
        verified: VerifiedShards,
        threads: FileThreads,
        tell: Callable[[int, int], None],
    ) -> None:
        """folder: of the cache. givers: returns those to ask, the first one first. threads: of downloads alone.

        tell: is called with the bytes that are here and hashed, and with the final number.
        """
        self._folder = folder
        self._data = IncomingData(folder, sha256, verified)
        self._givers = givers
        self._threads = threads
        self._tell = tell
        self._done = 0
        self._total = 0
        """Bytes of the shards that are in place, and of all."""
        self._last = ""
        """Name of the giver of the last file: it is asked first for the next."""

    async def run(self) -> None:
        """Download the data set.

        Raises RecoveryError with each giver's reason if none gives a missing part, StorageAwayError if the cache's file
        system or a URL's server does not answer.
        """
        if self._threads.num_hung:  # a call of an earlier attempt could still write to the same files
            raise StorageAwayError(str(self._folder), "an earlier write has not ended")
        kept = await self._in_thread(lambda _: self._data.begin())
        index = kept if kept is not None else await self._from_any(self._index)
        self._total = sum(each.num_bytes for each in index.files)
        await self._in_thread(lambda _: self._data.require_room(index))
        for each in index.files:
            await self._bring(each)
            self._done += each.num_bytes
        await self._in_thread(lambda _: self._data.finish())

    async def _index(self, giver: Giver) -> ShardIndex:
        raw = bytearray()
        async for piece in giver.index():
            raw += piece
            if len(raw) > MAX_INDEX_BYTES:
                raise RecoveryError(giver.name, f"sent an index of more than {MAX_INDEX_BYTES >> 20} MiB")
        return await self._in_thread(lambda _: self._data.keep_index(bytes(raw), giver.name))

    async def _bring(self, wanted: DataFile) -> None:
        """Download one file, unless a verified one is in place."""
        part = self._data.shard(wanted)

        def look(beat: Beat) -> bool:
            def moved(_: int) -> None:
                beat()
                self._tell(self._done + part.num_bytes, self._total)

            if self._data.is_there(wanted, beat):
                return True
            part.resume(moved)
            return False

        async def receive(giver: Giver) -> None:
            def add(piece: bytes, _: Beat) -> None:
                part.append(piece, giver.name)

            # A complete part of an earlier attempt is only checked.
            if part.num_bytes < wanted.num_bytes:
                async for piece in giver.file(wanted, part.num_bytes):
                    await self._in_thread(partial(add, piece))
                    self._tell(self._done + part.num_bytes, self._total)
            await self._in_thread(lambda _: part.check(giver.name))

        async def fetch(giver: Giver) -> None:
            num_before = part.num_bytes
            try:
                await receive(giver)
            except DamagedCopyError:
                if not num_before:
                    raise
                # bytes from another giver may be the wrong ones, so now fetch all of it from this one
                await receive(giver)

        if not await self._in_thread(look):
            await self._from_any(fetch, lambda: part.num_bytes)
            await self._in_thread(lambda _: self._data.put(part, wanted))

    async def _from_any(self, fetch: Callable[[Giver], Awaitable[T]], num_bytes: Callable[[], int] = lambda: 0) -> T:
        """Return what the first giver gives that can give all of it. They are asked in turns while more bytes arrive.

        Raises RecoveryError with each one's reason, StorageAwayError.
        """
        while True:
            before, reasons, is_away = num_bytes(), [], False
            for giver in sorted(self._givers(), key=lambda giver: giver.name != self._last):
                try:
                    given = await fetch(giver)
                except StorageAwayError:
                    raise  # the fault is in this node's cache: no other giver can help
                except (PeerError, RecoveryError) as error:
                    reasons.append(str(error))
                    is_away |= isinstance(error, ServerAwayError)
                    continue
                self._last = giver.name
                return given
            if num_bytes() <= before:
                kind = StorageAwayError if is_away else RecoveryError
                raise kind("nobody gives it", "; ".join(reasons) or "there is no other node")

    async def _in_thread(self, act: Callable[[Beat], T]) -> T:
        return await self._threads.run(str(self._folder), act)
