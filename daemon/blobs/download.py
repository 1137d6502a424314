"""Downloads a data set into this node's cache, shard by shard: from a node, the job's URL, or whoever calls.

The cache's folder of the data gathers shards, and is a data set once its index is there. A shard is hashed while it
arrives and then counts as verified; it is not read twice.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import RecoveryError, StorageAwayError
from headway.daemon.blobs.fetch import Failures, PartialFile, Source, fetch
from headway.daemon.blobs.file_threads import Beat, FileThreads
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.blobs.verified_shards import VerifiedShards
from headway.daemon.models.origin_folder import OriginFolder
from headway.proto.control_pb2 import GivenData, ReadRequest, ShardFile, WantedData
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


INDEX: Final = DataFile(file=INDEX_NAME, num_bytes=0, sha256="")
"""Stands for the index of a data set. It is known by what it says, so it has no size or hash of its own."""


@dataclass(frozen=True, slots=True)
class Giver:
    """One that may give the files of a data set."""

    name: str
    """For people."""
    read: Callable[[DataFile, int], AsyncIterator[bytes]]
    """Yields a file, or INDEX, from an offset on, in unverified pieces. Raises PeerError or RecoveryError."""

    def source(self, wanted: DataFile) -> Source:
        """Return it as the source of one file."""
        return Source(self.name, partial(self.read, wanted))


def node_giver(client: NodeClient, endpoint: NodeEndpoint, sha256: str, *, reads_url: bool = False) -> Giver:
    """Return another node. sha256: name of the data set. reads_url: a node without it reads the job's URL for us."""

    def read(wanted: DataFile, offset: int) -> AsyncIterator[bytes]:
        shard = ShardFile(sha256=wanted.sha256 or sha256, data_sha256=sha256, name=wanted.file)
        return client.read(endpoint, ReadRequest(shard=shard, offset=offset, forward=reads_url))

    return Giver(f"{endpoint}" + (" (reading the URL)" if reads_url else ""), read)


def url_giver(url: str, threads: FileThreads) -> Giver:
    """Return a URL. threads: for reading URLs alone, some of which may hang."""

    def begin(wanted: DataFile, offset: int, beat: Beat) -> Iterator[bytes]:
        folder = OriginFolder(url, beat=beat)
        if wanted is INDEX:
            return iter((folder.read_small(INDEX_NAME, MAX_INDEX_BYTES),))
        return folder.read(wanted.file, offset, wanted.num_bytes)

    return Giver(url, lambda wanted, offset: threads.pieces(url, partial(begin, wanted, offset)))


class Caller:
    """Whoever opened a stream to this node, and sends each file that it is asked for."""

    def __init__(self, name: str, given: AsyncIterator[GivenData], ask: Callable[[WantedData], None]) -> None:
        """given: what it sends. ask: is called with each file that is wanted; the index has an empty hash."""
        self._name = name
        self._given = given
        self._ask = ask
        self._error: UnavailableError | None = None
        self.giver = Giver(name, self._read)

    async def _read(self, wanted: DataFile, offset: int) -> AsyncIterator[bytes]:
        if self._error is not None:
            raise self._error
        self._ask(WantedData(sha256=wanted.sha256, offset=offset))
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
        self._error = UnavailableError(self._name, why)
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

    def keep_index(self, raw: bytes, sender: str, _: Beat) -> ShardIndex:
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

    def remember(self, wanted: DataFile, _: Beat) -> None:
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
        system or a URL's server does not answer, DataError if a file goes away while it is remembered.
        """
        if self._threads.num_hung:  # a call of an earlier attempt could still write to the same files
            raise StorageAwayError(str(self._folder), "an earlier write has not ended")
        data = self._data
        index = await self._in_thread(lambda _: data.begin()) or await self._index()
        done, total = 0, sum(each.num_bytes for each in index.files)
        await self._in_thread(lambda _: data.require_room(index))
        for each in index.files:
            if not await self._in_thread(partial(data.is_there, each)):
                tell = partial(self._tell_of, done, total)
                source = await fetch(
                    data.shard(each), partial(self._sources, each), in_thread=self._in_thread, tell=tell
                )
                self._last = source.name
                await self._in_thread(partial(data.remember, each))
            done += each.num_bytes
        await self._in_thread(lambda _: data.finish())

    def _tell_of(self, done: int, total: int, num_bytes: int) -> None:
        self._tell(done + num_bytes, total)

    async def _index(self) -> ShardIndex:
        """Fetch the index: it is known by what it says, so it comes whole, from one giver."""
        failures = Failures("nobody gives it")
        for source in self._sources(INDEX):
            try:
                raw = bytearray()
                async for piece in source.pieces(0):
                    raw += piece
                    if len(raw) > MAX_INDEX_BYTES:
                        raise RecoveryError(source.name, f"sent an index of more than {MAX_INDEX_BYTES >> 20} MiB")
                index = await self._in_thread(partial(self._data.keep_index, bytes(raw), source.name))
            except StorageAwayError:
                raise  # the fault is in this node's cache: no other giver can help
            except (PeerError, RecoveryError) as error:
                failures.add(source, error)
                continue
            self._last = source.name
            return index
        raise failures.error()

    def _sources(self, wanted: DataFile) -> list[Source]:
        givers = sorted(self._givers(), key=lambda giver: giver.name != self._last)
        return [giver.source(wanted) for giver in givers]

    async def _in_thread(self, act: Callable[[Beat], T]) -> T:
        return await self._threads.run(str(self._folder), act)
