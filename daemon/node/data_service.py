"""What a daemon answers about token shards: it sends its own, reads a job's URL for others, and takes new ones.

Only its own folders and its cache are read, and at the URLs of known jobs the files that their index names.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, Final

from headway.daemon.base.errors import RecoveryError
from headway.daemon.base.places import is_url
from headway.daemon.blobs.checkpoint import CHUNK_BYTES
from headway.daemon.blobs.download import CALLER_SILENCE_S, Caller
from headway.daemon.blobs.file_threads import Beat, FileThreads
from headway.daemon.blobs.library import DataLibrary
from headway.daemon.blobs.state_store import read_chunks
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.job import DataSpec
from headway.daemon.models.origin_folder import OriginFolder
from headway.proto import control_pb2
from headway.stages.data.shard_index import INDEX_NAME, MAX_INDEX_BYTES, parse_index
from headway.stages.data.source_choice import BUILT_IN_SOURCES
from headway.stages.errors import UnavailableError

ALIVE_S: Final = 2.0
"""Interval of empty pieces to a caller while its file is being verified, or comes slowly from a URL."""
NUM_READ: Final = 8
"""Number of pieces of this node's own files that are read at once, for others."""
NUM_FORWARDED: Final = 4
"""Number of pieces that are read from one server at once, for others, and of data sets whose files are known."""


class DataService:
    """The data of one daemon."""

    def __init__(self, node: str, view: ClusterView, library: DataLibrary) -> None:
        self._node = node
        self._view = view
        self._library = library
        self._files = FileThreads("data for others", num_at_once=NUM_READ)
        self._urls = FileThreads("data at URLs for others", num_at_once=NUM_FORWARDED)
        self._forwarded: dict[str, dict[tuple[str, str], int]] = {}
        """Of the data sets that were read last for others, by SHA-256: sizes by a file's name and SHA-256."""

    async def has(self, request: control_pb2.HasDataRequest) -> control_pb2.HasDataReply:
        """Return whether the data lies here, what is left of an interrupted transfer, and the room for the rest.

        Raises RecoveryError.
        """
        is_here = await self._library.has(DataSpec(source=request.source, sha256=request.sha256))
        there_bytes = await self._library.there_bytes(request.sha256) if _is_sha256(request.sha256) else 0
        free_bytes = await self._library.free_bytes()
        return control_pb2.HasDataReply(is_here=is_here, free_bytes=free_bytes, there_bytes=there_bytes)

    async def pieces(self, request: control_pb2.ReadRequest) -> AsyncIterator[bytes]:
        """Yield a file by its SHA-256; empty pieces while it is being verified. Raises RecoveryError."""
        wanted = request.shard
        sources = self._sources_of(wanted.data_sha256)
        folders = [source for source in sources if not is_url(source)]
        finding = asyncio.ensure_future(self._library.found(wanted.sha256, wanted.data_sha256, folders))
        async with aclosing(_alive_until(finding)) as nothing:
            async for piece in nothing:
                yield piece
        if (path := finding.result()) is not None:
            async for piece in self._files.pieces(str(path), lambda _: read_chunks(path, offset=request.offset)):
                yield piece
            return
        urls = [source for source in sources if is_url(source)]
        if not urls or not request.forward:
            unknown = ", which knows no job with it at a URL" if request.forward else ""
            raise RecoveryError(f"data {wanted.sha256[:12]}…", f"is not on node {self._node}{unknown}")
        async for piece in self._read(urls[0], request):
            yield piece

    async def take(
        self, given: AsyncIterator[control_pb2.GivenData], *, caller: str
    ) -> AsyncIterator[control_pb2.WantedData]:
        """Yield each file that is wanted of a data set which the caller offers, until all of it is here.

        Raises RecoveryError, PeerError.
        """
        pieces = aiter(given)
        try:
            async with asyncio.timeout(CALLER_SILENCE_S):
                first = await anext(pieces, None)
        except TimeoutError as error:
            raise UnavailableError(caller, f"sent nothing for {CALLER_SILENCE_S:g} s") from error
        if first is None or not _is_sha256(first.sha256):
            raise RecoveryError(caller, "did not say which data it offers")
        wanted: asyncio.Queue[control_pb2.WantedData | None] = asyncio.Queue()
        giver = Caller(caller, pieces, wanted.put_nowait).giver
        taking = asyncio.ensure_future(self._library.take(first.sha256, giver))
        taking.add_done_callback(lambda _: wanted.put_nowait(None))
        try:
            while (each := await wanted.get()) is not None:
                yield each
            taking.result()
        finally:
            taking.cancel()

    async def _read(self, url: str, request: control_pb2.ReadRequest) -> AsyncIterator[bytes]:
        """Yield a file of the job's data from a URL, from an offset on; empty pieces while its server is slow.

        Whoever asked compares its hash. Raises RecoveryError, also for each file that the job's index does not name,
        and DataError for an index that is none.
        """
        wanted, name = request.shard, request.shard.name

        def begin(beat: Beat) -> Iterator[bytes]:
            folder = OriginFolder(url, beat=beat)
            if name == INDEX_NAME:
                return iter((self._index_at(folder, wanted.data_sha256)[request.offset :],))
            if wanted.data_sha256 not in self._forwarded:
                self._index_at(folder, wanted.data_sha256)
            size = self._forwarded.get(wanted.data_sha256, {}).get((name, wanted.sha256))
            if size is None:
                raise RecoveryError(url, f"{name!r} is not a file of the data")
            return folder.read(name, request.offset, size)

        pieces, is_last = self._urls.pieces(url, begin), False
        while not is_last:
            reading = asyncio.ensure_future(anext(pieces, b""))
            async with aclosing(_alive_until(reading)) as nothing:
                async for piece in nothing:
                    yield piece
            read = reading.result()
            for start in range(0, len(read), CHUNK_BYTES):
                yield read[start : start + CHUNK_BYTES]
            is_last = not read

    def _index_at(self, folder: OriginFolder, sha256: str) -> bytes:
        """Return the index of a job's data, and note its files. Raises RecoveryError, DataError. Runs in a thread."""
        raw = folder.read_small(INDEX_NAME, MAX_INDEX_BYTES)
        index = parse_index(raw, folder.named(INDEX_NAME))
        if index.sha256 != sha256:
            raise RecoveryError(folder.url, f"has other data, {index.sha256[:12]}…")
        forwarded = dict(list(self._forwarded.items())[1 - NUM_FORWARDED :])
        self._forwarded = {**forwarded, sha256: {(each.file, each.sha256): each.num_bytes for each in index.files}}
        return raw

    def _sources_of(self, sha256: str) -> list[str]:
        """Return where jobs say that a data set lies."""
        parts = (part for job in self._view.jobs.values() if job.spec is not None for part in job.spec.data_sets)
        found = dict.fromkeys(part.source for part in parts if sha256 and part.sha256 == sha256)
        return [source for source in found if source not in BUILT_IN_SOURCES]


async def _alive_until(work: "asyncio.Future[Any]") -> AsyncGenerator[bytes]:
    """Yield empty pieces until work is done. It is cancelled when the reader goes."""
    try:
        while not work.done():
            await asyncio.wait({work}, timeout=ALIVE_S)
            if not work.done():
                yield b""
    finally:
        work.cancel()


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")
