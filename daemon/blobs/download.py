"""Downloads a data set into this node's cache, shard by shard: from a node, the job's URL, or whoever calls.

The cache's folder of the data gathers shards, and is a data set once its index is there. A shard is hashed while it
arrives and then counts as verified; it is not read twice.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import RecoveryError, StorageAwayError
from headway.daemon.blobs.fetch import Failures, PartialFile, Source, fetch
from headway.daemon.blobs.file_threads import Beat, FileThreads
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.blobs.transfer import in_time
from headway.daemon.blobs.verified_shards import VerifiedShards
from headway.daemon.models.origin_folder import OriginFolder
from headway.proto.control_pb2 import GivenData, WantedData
from headway.stages.data.shard_index import INDEX_NAME, MAX_INDEX_BYTES, DataFile, ShardIndex, read_index
from headway.stages.errors import DataError, PeerError, UnavailableError
from headway.stages.state.file_digest import FileDigest

T = TypeVar("T")

INCOMING: Final = "incoming"
"""Folder, inside the data set's own, of unfinished files."""
CALLER_SILENCE_S: Final = 60.0
"""Seconds without a piece after which a caller is given up."""

MAX_ERROR: Final = 500
"""Characters quoted of a caller's reason."""


class Giver(Protocol):
    """Gives the files of one data set. Both methods raise PeerError or RecoveryError."""

    @property
    def name(self) -> str:
        """Return who it is, for people."""

    def index(self) -> AsyncIterator[bytes]:
        """Yield the index, in unverified pieces."""

    def file(self, wanted: DataFile, offset: int) -> AsyncIterator[bytes]:
        """Yield a file from an offset on, in unverified pieces."""


class NodeGiver:
    """Another node."""

    def __init__(self, client: NodeClient, endpoint: NodeEndpoint, sha256: str, *, reads_url: bool = False) -> None:
        """sha256: name of the data set. reads_url: if the node does not have it, it reads the job's URL for us."""
        self._client = client
        self._endpoint = endpoint
        self._sha256 = sha256
        self._reads_url = reads_url
        self.name = f"{endpoint}" + (" (reading the URL)" if reads_url else "")

    def index(self) -> AsyncIterator[bytes]:
        """Yield the index."""
        return self._fetch(self._sha256, INDEX_NAME, 0)

    def file(self, wanted: DataFile, offset: int) -> AsyncIterator[bytes]:
        """Yield a file from an offset on."""
        return self._fetch(wanted.sha256, wanted.file, offset)

    def _fetch(self, sha256: str, file: str, offset: int) -> AsyncIterator[bytes]:
        forward_file = file if self._reads_url else ""
        pieces = self._client.fetch_data(
            self._endpoint, sha256, offset=offset, data_sha256=self._sha256, forward_file=forward_file
        )
        return in_time(self._endpoint, pieces, heard=self._client.heard)


class UrlGiver:
    """A URL."""

    def __init__(self, url: str, threads: FileThreads) -> None:
        """threads: for reading URLs alone, some of which may hang."""
        self._url = url
        self._threads = threads
        self.name = url

    def index(self) -> AsyncIterator[bytes]:
        """Yield the index. Raises RecoveryError for a larger one than any data set has."""
        return self._read(lambda folder: iter((folder.read_small(INDEX_NAME, MAX_INDEX_BYTES),)))

    def file(self, wanted: DataFile, offset: int) -> AsyncIterator[bytes]:
        """Yield a file from an offset on."""
        return self._read(lambda folder: folder.read(wanted.file, offset, wanted.num_bytes))

    def _read(self, begin: Callable[[OriginFolder], Iterator[bytes]]) -> AsyncIterator[bytes]:
        return self._threads.pieces(self._url, lambda beat: begin(OriginFolder(self._url, beat=beat)))


class CallerGiver:
    """Whoever opened a stream to this node, and sends each file that it is asked for."""

    def __init__(self, name: str, given: AsyncIterator[GivenData], ask: Callable[[WantedData], None]) -> None:
        """given: what it sends. ask: is called with each file that is wanted."""
        self.name = name
        self._given = given
        self._ask = ask
        self._error: UnavailableError | None = None

    def index(self) -> AsyncIterator[bytes]:
        """Yield the index, which is named by an empty hash."""
        return self._pieces("", 0)

    def file(self, wanted: DataFile, offset: int) -> AsyncIterator[bytes]:
        """Yield a file from an offset on."""
        return self._pieces(wanted.sha256, offset)

    async def _pieces(self, sha256: str, offset: int) -> AsyncIterator[bytes]:
        if self._error is not None:
            raise self._error
        self._ask(WantedData(sha256=sha256, offset=offset))
        is_last = False
        while not is_last:
            given = await self._next()
            yield given.piece
            is_last = given.is_last

    async def _next(self) -> GivenData:
        """Return what it sends next. Raises UnavailableError, from then on always the same one."""
        why = "ended before the data was complete"
        try:
            async with asyncio.timeout(CALLER_SILENCE_S):
                given = await anext(self._given, None)
            if given is not None and not given.error:
                return given
            why = given.error[:MAX_ERROR] if given is not None else why
        except TimeoutError:
            why = f"sent nothing for {CALLER_SILENCE_S:g} s"
        self._error = UnavailableError(self.name, why)
        raise self._error


class IncomingData:
    """One data set. Every method blocks, so it belongs in a thread."""

    def __init__(self, folder: Path, sha256: str, verified: VerifiedShards) -> None:
        """folder: of the cache. sha256: name of the data."""
        self._folder = folder
        self._incoming = folder / INCOMING
        self._sha256 = sha256
        self._verified = verified

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the files that are here, finished or not."""
        folders = [self._folder, self._incoming] if self._incoming.is_dir() else []
        return sum(file.stat().st_size for folder in folders for file in folder.iterdir() if file.is_file())

    def begin(self) -> ShardIndex | None:
        """Make the folder. Return the index of an earlier attempt, if there is one."""
        self._incoming.mkdir(parents=True, exist_ok=True)
        for folder in (self._folder, self._incoming):
            try:
                index = read_index(folder)
            except DataError:
                continue
            if index.sha256 == self._sha256:
                return index
        return None

    def keep_index(self, raw: bytes, sender: str) -> ShardIndex:
        """Keep the bytes of the index. Raises RecoveryError if they are not those of this data set."""
        (self._incoming / INDEX_NAME).write_bytes(raw)
        try:
            index = read_index(self._incoming)
        except DataError as error:
            raise RecoveryError(sender, f"sent an index that {error.reason}") from error
        if index.sha256 != self._sha256:
            raise RecoveryError(sender, f"sent the index of other data, {index.sha256[:12]}…")
        return index

    def require_room(self, index: ShardIndex) -> None:
        """Raise RecoveryError before a byte moves, if the data does not fit."""
        places = [self._folder / each.file for each in index.files]
        places += [self._incoming / each.sha256 for each in index.files]
        total = sum(each.num_bytes for each in index.files)
        missing = total - sum(place.stat().st_size for place in places if place.is_file())
        if missing > (free := shutil.disk_usage(self._folder).free):
            text = f"has {free / 1e9:.1f} GB free, and {missing / 1e9:.1f} GB of the data are missing"
            raise RecoveryError(str(self._folder), text)

    def is_there(self, wanted: DataFile, beat: Beat) -> bool:
        """Return whether a verified file is in place."""
        try:
            self._verified.verify_file(self._folder / wanted.file, wanted.sha256, lambda _: beat())
        except DataError:
            return False
        return True

    def shard(self, wanted: DataFile) -> PartialFile:
        """Return an arriving shard."""
        expected = FileDigest(size_bytes=wanted.num_bytes, checksum=wanted.sha256)
        what = f"shard {wanted.sha256[:12]}…"
        return PartialFile(self._folder / wanted.file, expected, what=what, partial=self._incoming / wanted.sha256)

    def remember(self, wanted: DataFile) -> None:
        """Note that a shard was verified while it came."""
        self._verified.remember(self._folder / wanted.file, wanted.sha256)

    def finish(self) -> None:
        """Put the index in place, last of all: without it a folder holds no shards."""
        if (self._incoming / INDEX_NAME).exists():
            (self._incoming / INDEX_NAME).replace(self._folder / INDEX_NAME)
        shutil.rmtree(self._incoming)


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
        index = kept if kept is not None else await self._index()
        done, total = 0, sum(each.num_bytes for each in index.files)
        await self._in_thread(lambda _: self._data.require_room(index))
        for each in index.files:
            if not await self._in_thread(partial(self._data.is_there, each)):
                await self._bring(each, partial(self._tell_of, done, total))
            done += each.num_bytes
        await self._in_thread(lambda _: self._data.finish())

    def _tell_of(self, done: int, total: int, num_bytes: int) -> None:
        self._tell(done + num_bytes, total)

    async def _bring(self, wanted: DataFile, tell: Callable[[int], None]) -> None:
        def sources() -> list[Source]:
            return [Source(giver.name, partial(giver.file, wanted)) for giver in self._asked()]

        source = await fetch(self._data.shard(wanted), sources, in_thread=self._in_thread, tell=tell)
        self._last = source.name
        await self._in_thread(lambda _: self._data.remember(wanted))

    async def _index(self) -> ShardIndex:
        """Fetch the index: it is known by what it says, so it comes whole, from one giver."""
        failures = Failures("nobody gives it")
        for giver in self._asked():
            source = Source(giver.name, lambda _, giver=giver: giver.index())  # type: ignore[misc]
            try:
                raw = bytearray()
                async for piece in source.pieces(0):
                    raw += piece
                    if len(raw) > MAX_INDEX_BYTES:
                        raise RecoveryError(giver.name, f"sent an index of more than {MAX_INDEX_BYTES >> 20} MiB")
                index = await self._in_thread(partial(self._kept, bytes(raw), giver.name))
            except StorageAwayError:
                raise  # the fault is in this node's cache: no other giver can help
            except (PeerError, RecoveryError) as error:
                failures.add(source, error)
                continue
            self._last = giver.name
            return index
        raise failures.error()

    def _kept(self, raw: bytes, sender: str, _: Beat) -> ShardIndex:
        return self._data.keep_index(raw, sender)

    def _asked(self) -> list[Giver]:
        return sorted(self._givers(), key=lambda giver: giver.name != self._last)

    async def _in_thread(self, act: Callable[[Beat], T]) -> T:
        return await self._threads.run(str(self._folder), act)
