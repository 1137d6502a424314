"""Who gives the files of a data set to this node: another node, the URL that the job names, or whoever calls."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final, Protocol, TypeVar

from headway.daemon.addresses import NodeEndpoint
from headway.daemon.errors import StorageAwayError
from headway.daemon.origin.origin_folder import OriginFolder
from headway.daemon.rpc.peer_client import NodeClient
from headway.daemon.rpc.transfer import in_time
from headway.daemon.storage.file_threads import Beat, FileThreads
from headway.proto.control_pb2 import GivenData, WantedData
from headway.stages.data.shard_index import INDEX_NAME, MAX_INDEX_BYTES, DataFile
from headway.stages.errors import UnavailableError

T = TypeVar("T")

CALLER_SILENCE_S: Final = 60.0
"""Seconds without a piece after which a caller is given up."""

MAX_ERROR: Final = 500
"""Characters quoted of a caller's reason."""


class ServerAwayError(UnavailableError):
    """The server of a URL does not answer: another attempt may succeed."""


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

    async def _read(self, begin: Callable[[OriginFolder], Iterator[bytes]]) -> AsyncIterator[bytes]:
        pieces = await self._in_thread(lambda beat: begin(OriginFolder(self._url, beat=beat)))
        while (piece := await self._in_thread(lambda _: next(pieces, None))) is not None:
            yield piece

    async def _in_thread(self, act: Callable[[Beat], T]) -> T:
        try:
            return await self._threads.run(self._url, act)
        except StorageAwayError as error:
            raise ServerAwayError(error.item, error.reason) from error


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
