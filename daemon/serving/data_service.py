"""What a daemon answers about token shards: it sends its own, reads a job's URL for others, and takes new ones.

Only its own folders, its cache and the URLs of known jobs are read.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Final

from headway.daemon.errors import RecoveryError
from headway.daemon.jobs.data_place import is_url
from headway.daemon.jobs.job import DataSpec
from headway.daemon.jobs.resolve import BUILT_IN_SOURCE
from headway.daemon.origin.origin_folder import OriginFolder
from headway.daemon.shards.givers import CALLER_SILENCE_S, CallerGiver
from headway.daemon.shards.library import DataLibrary
from headway.daemon.storage.checkpoint import CHUNK_BYTES
from headway.daemon.storage.file_threads import FileThreads
from headway.daemon.storage.state_store import read_chunks
from headway.daemon.view.cluster_view import ClusterView
from headway.proto import control_pb2
from headway.stages.data.shard_index import INDEX_NAME, MAX_INDEX_BYTES
from headway.stages.errors import UnavailableError

ALIVE_S: Final = 2.0
"""Interval of empty pieces to a caller while its file is being verified."""
NUM_FORWARDED: Final = 4
"""Number of pieces that are read from one server at once, for others."""


class DataService:
    """The data of one daemon."""

    def __init__(self, node: str, view: ClusterView, library: DataLibrary) -> None:
        self._node = node
        self._view = view
        self._library = library
        self._urls = FileThreads("data at URLs for others", num_at_once=NUM_FORWARDED)

    async def has(self, request: control_pb2.HasDataRequest) -> control_pb2.HasDataReply:
        """Return whether the data lies here, and the room for it. Raises RecoveryError."""
        is_here = await self._library.has(DataSpec(source=request.source, sha256=request.sha256))
        return control_pb2.HasDataReply(is_here=is_here, free_bytes=await self._library.free_bytes())

    async def pieces(self, request: control_pb2.FetchDataRequest) -> AsyncIterator[bytes]:
        """Yield a file by its SHA-256; empty pieces while it is being verified. Raises RecoveryError."""
        sources = self._sources_of(request.data_sha256)
        folders = [source for source in sources if not is_url(source)]
        finding = asyncio.ensure_future(self._library.found(request.sha256, request.data_sha256, folders))
        try:
            while not finding.done():
                await asyncio.wait({finding}, timeout=ALIVE_S)
                if not finding.done():
                    yield b""
        finally:
            finding.cancel()
        if (path := finding.result()) is not None:
            chunks = read_chunks(path, offset=request.offset)
            while piece := await asyncio.to_thread(next, chunks, b""):
                yield piece
            return
        urls = [source for source in sources if is_url(source)]
        if not urls or not request.forward_file:
            unknown = ", which knows no job with it at a URL" if request.forward_file else ""
            raise RecoveryError(f"data {request.sha256[:12]}…", f"is not on node {self._node}{unknown}")
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
            first = await asyncio.wait_for(anext(pieces, None), CALLER_SILENCE_S)
        except TimeoutError as error:
            raise UnavailableError(caller, f"sent nothing for {CALLER_SILENCE_S:g} s") from error
        if first is None or not _is_sha256(first.sha256):
            raise RecoveryError(caller, "did not say which data it offers")
        wanted: asyncio.Queue[control_pb2.WantedData | None] = asyncio.Queue()
        giver = CallerGiver(caller, pieces, wanted.put_nowait)
        taking = asyncio.ensure_future(self._library.take(first.sha256, giver))
        taking.add_done_callback(lambda _: wanted.put_nowait(None))
        try:
            while (each := await wanted.get()) is not None:
                yield each
            taking.result()
        finally:
            taking.cancel()

    async def _read(self, url: str, request: control_pb2.FetchDataRequest) -> AsyncIterator[bytes]:
        """Yield a file from a URL, from an offset on; whoever asked compares its hash. Raises RecoveryError."""
        if "/" in request.forward_file:
            raise RecoveryError(url, f"{request.forward_file!r} is not a file's name")

        def begin(folder: OriginFolder) -> Iterator[bytes]:
            name = request.forward_file
            if name == INDEX_NAME:
                return iter((folder.read_small(name, MAX_INDEX_BYTES)[request.offset :],))
            return folder.read(name, request.offset, folder.size_of(name))

        pieces = await self._urls.run(url, lambda beat: begin(OriginFolder(url, beat=beat)))
        while piece := await self._urls.run(url, lambda _: next(pieces, b"")):
            for start in range(0, len(piece), CHUNK_BYTES):
                yield piece[start : start + CHUNK_BYTES]

    def _sources_of(self, sha256: str) -> list[str]:
        """Return where jobs say that a data set lies."""
        parts = (part for job in self._view.jobs.values() if job.spec is not None for part in job.spec.data.parts)
        found = dict.fromkeys(part.source for part in parts if sha256 and part.sha256 == sha256)
        return [source for source in found if source != BUILT_IN_SOURCE]


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")
