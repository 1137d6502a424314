"""Finds a node's token shards: in the cache, in the job's folder, on another node or at a URL; verified before use."""

import asyncio
import errno
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.base.activities import SharedWork
from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import NoAccessError, RecoveryError, StorageAwayError
from headway.daemon.base.file_system import check_allowed
from headway.daemon.base.places import is_url
from headway.daemon.blobs.download import Download, Giver, IncomingData, node_giver, url_giver
from headway.daemon.blobs.file_threads import Beat, FileThreads
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.blobs.verified_shards import VerifiedShards
from headway.daemon.jobs.job import DataSpec
from headway.daemon.jobs.resolve import data_folder
from headway.stages.data.shard_index import INDEX_NAME, fingerprint, read_index
from headway.stages.data.source_choice import BUILT_IN_SOURCES
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import DataError

log = structlog.get_logger()

MAX_DATA_SETS: Final = 1000
"""Maximum number of remembered data sets. Another one is read again on request; only changed files are hashed."""
NUM_DOWNLOAD_CALLS: Final = 8
"""Number of downloads that call the file system at once, so that hashing an earlier attempt delays no other
download.
"""
NOT_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})
"""Errors of a file system for a path that does not exist."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The progress of a data set."""

    num_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class _DataSet:
    """A verified data set."""

    sha256: str
    folder: Path
    state: str
    """Fingerprint of its folder when it was verified."""
    files: dict[str, Path]
    """Its index and shards, by SHA-256."""


class DataLibrary:
    """Opens a job's data, and knows every verified folder so that it can serve other nodes."""

    def __init__(
        self,
        cache_dir: Path,
        client: NodeClient,
        peers: Callable[[], Iterable[NodeEndpoint]],
        *,
        memory: Path | None = None,
    ) -> None:
        """peers: returns the other nodes' daemons. memory: a file that remembers verified shards."""
        self._cache_dir = cache_dir
        self._client = client
        self._peers = peers
        self._verified = VerifiedShards(memory)
        self._threads = FileThreads("data")
        self._downloads = FileThreads("downloads of data", num_at_once=NUM_DOWNLOAD_CALLS)
        self._checks = FileThreads("checks of data", num_at_once=1, most_hung=1)
        self._again: dict[Path, asyncio.Future[None]] = {}
        """Readings of verified folders that go on beside training."""
        self._decayed: dict[Path, str] = {}
        self._urls = FileThreads("data at URLs", num_at_once=NUM_DOWNLOAD_CALLS)
        self._opening: SharedWork[tuple[str, str], Path] = SharedWork()
        """Openings in progress by SHA-256 and source: another job may name another folder for the same data."""
        self._fetching: SharedWork[str, None] = SharedWork()
        """Fetches by SHA-256."""
        self._sets: dict[str, _DataSet] = {}
        """The data sets that were verified last, by folder."""
        self.reading: dict[str, Reading] = {}
        """Progress of the data sets that are being read or fetched, by SHA-256."""

    async def open(self, data: DataSpec) -> Path:
        """Return the folder with the data that a job names.

        Files are read if they changed since their verification. Missing files are fetched, once for all callers.

        Raises RecoveryError when nobody has it, StorageAwayError when it was here or a file system does not answer.
        """
        try:
            return await self._open_once(data)
        except (DataError, RecoveryError) as error:
            why_not_here = error
        try:
            await self._fetching.result(data.sha256, partial(self._fetch, data))
            return await self._open_once(data)
        except (DataError, RecoveryError) as error:
            is_outage = any(isinstance(each, StorageAwayError) for each in (why_not_here, error))
            kind = StorageAwayError if is_outage else RecoveryError
            is_folder = data.source not in BUILT_IN_SOURCES and not is_url(data.source)
            hint = "; `headway data send FOLDER`, where it lies, sends it" if is_folder and not is_outage else ""
            raise kind(f"data {data.sha256[:12]}…", f"{why_not_here}; {error}{hint}") from error

    def read_again_soon(self, folder: Path) -> None:
        """Hash a folder's shards again beside the training that begins, one folder at a time."""
        if folder in self._again:
            return
        task = self._again[folder] = asyncio.ensure_future(self._read_again(folder))
        task.add_done_callback(lambda _: self._again.pop(folder, None))

    async def _read_again(self, folder: Path) -> None:
        try:
            await self._checks.run(str(folder), lambda beat: self._verified.read_again(folder, lambda _: beat()))
            self._decayed.pop(folder, None)
        except RecoveryError as error:
            log.info("data_not_read_again", folder=str(folder), reason=str(error))
        except DataError as error:
            log.error("token_shard_decayed", reason=str(error))
            self._decayed[folder] = str(error)

    @property
    def decay(self) -> str:
        """Return which shards have decayed under a job that trains on them, and what to do; empty: none."""
        if not self._decayed:
            return ""
        told = "; ".join(self._decayed.values())
        return f"{told}. Batches since the job's start may have wrong tokens: pause it and `submit --from` one before"

    async def look_ahead(self, data: DataSpec) -> None:
        """Verify local data in advance, so that this node can start at once. It fetches nothing."""
        try:
            await self._open_once(data)
        except (DataError, RecoveryError, OSError) as error:
            log.info("data_not_here", sha256=data.sha256, reason=str(error))

    async def has(self, data: DataSpec) -> bool:
        """Return whether the data lies here, by its index alone."""

        def look(_: Beat) -> bool:
            try:
                return read_index(self._place(data)).sha256 == data.sha256
            except DataError:
                return False

        return bool(data.sha256) and await self._threads.run(data.source or str(self._cache_dir), look)

    async def free_bytes(self) -> int:
        """Return the room in the cache. Raises RecoveryError."""

        def look(_: Beat) -> int:
            self._cache_dir.mkdir(parents=True, exist_ok=True)
            return shutil.disk_usage(self._cache_dir).free

        return await self._threads.run(str(self._cache_dir), look)

    async def there_bytes(self, sha256: str) -> int:
        """Return the bytes that an interrupted download of a data set has left here. Raises RecoveryError."""

        def look(_: Beat) -> int:
            return IncomingData(self._cache_dir / sha256, sha256, self._verified).num_bytes

        return await self._threads.run(str(self._cache_dir), look)

    async def take(self, sha256: str, giver: Giver) -> None:
        """Bring the data set that a caller offers. Raises RecoveryError, PeerError, DataError."""
        if sha256 in self._fetching:
            raise RecoveryError(f"data {sha256[:12]}…", "is arriving already; wait for it, or try again")
        await self._fetching.result(sha256, partial(self._bring, sha256, lambda: [giver]))
        await self._open_once(DataSpec(source="", sha256=sha256))

    async def found(self, sha256: str, data_sha256: str, sources: Iterable[str]) -> Path | None:
        """Return the file with this hash from a data set that lies here, which is verified now if it was not before.

        sources: folders in which the data set may lie, beside the cache.
        """
        for source in ("", *sources):
            if (path := self.find(sha256)) is not None:
                return path
            if await self.has(data := DataSpec(source=source, sha256=data_sha256)):
                await self.look_ahead(data)
        return self.find(sha256)

    async def _open_once(self, data: DataSpec) -> Path:
        """Open the data. Raises DataError, RecoveryError."""
        return await self._opening.result((data.sha256, data.source), partial(self._open_here, data))

    def state_of(self, folder: str) -> str:
        """Return the fingerprint of a folder when its files were last verified: for a worker that opens them."""
        found = self._sets.get(folder)
        return found.state if found is not None else ""

    def find(self, sha256: str) -> Path | None:
        """Return the file with this hash from a verified folder: the index of a data set, or one of its shards."""
        return next((each.files[sha256] for each in reversed(self._sets.values()) if sha256 in each.files), None)

    async def _open_here(self, data: DataSpec) -> Path:
        """Open local data. Raises DataError: it is missing or wrong. StorageAwayError: it may be here again later."""
        try:
            found = await self._threads.run(data.source or str(self._cache_dir), partial(self._verify, data))
        except DataError as error:
            if self._may_come_back(data, error):
                raise StorageAwayError(error.path, error.reason) from error
            raise
        self._sets.pop(str(found.folder), None)
        self._sets[str(found.folder)] = found
        while len(self._sets) > MAX_DATA_SETS:
            del self._sets[next(iter(self._sets))]
        return found.folder

    def _may_come_back(self, data: DataSpec, error: DataError) -> bool:
        """Return whether the file system fails, or lacks files that were read before: an outage, not the
        job's mistake.
        """
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in NOT_THERE:
            return self._verified.has_read(Path(data.source))
        return isinstance(cause, OSError) and not isinstance(cause, PermissionError)

    def _verify(self, data: DataSpec, beat: Beat) -> _DataSet:
        """Verify in a thread."""
        folder = self._place(data)
        index = TokenShards.open(folder, expected_sha256=data.sha256, verify=False).index
        total, done = self._verified.num_bytes_to_read(folder), 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            beat()
            done += num_bytes
            self.reading[data.sha256] = Reading(done, total)

        state = fingerprint(folder)
        try:
            self._verified.verify(folder, advance)
        finally:
            self.reading.pop(data.sha256, None)
        shards = {each.sha256: folder / each.file for each in index.files}
        return _DataSet(index.sha256, folder, state, {**shards, index.sha256: folder / INDEX_NAME})

    def _place(self, data: DataSpec) -> Path:
        """Return the folder with the data, if it lies here. Raises DataError."""
        folder = self._cache_dir / data.sha256
        if data.sha256 and (folder / INDEX_NAME).exists():
            return folder
        if not data.source or is_url(data.source):
            raise DataError(data.source or f"data {data.sha256[:12]}…", "is not on this node yet")
        if data.source not in BUILT_IN_SOURCES:
            try:
                check_allowed(data.source)
            except NoAccessError as error:
                raise DataError(data.source, error.reason) from error
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        return data_folder(data.source, self._cache_dir)

    async def _fetch(self, data: DataSpec) -> None:
        """Bring data from nodes that have it; else from its URL, which another node reads for one without access."""

        def givers() -> list[Giver]:
            peers, sha256 = list(self._peers()), data.sha256
            nodes = [node_giver(self._client, each, sha256) for each in peers]
            if not is_url(data.source):
                return nodes
            others = (node_giver(self._client, each, sha256, reads_url=True) for each in peers)
            return [*nodes, url_giver(data.source, self._urls), *others]

        await self._bring(data.sha256, givers)

    async def _bring(self, sha256: str, givers: Callable[[], Iterable[Giver]]) -> None:
        def tell(num_bytes: int, total_bytes: int) -> None:
            self.reading[sha256] = Reading(num_bytes, total_bytes)

        download = Download(
            self._cache_dir / sha256,
            sha256,
            givers=givers,
            verified=self._verified,
            threads=self._downloads,
            tell=tell,
        )
        try:
            await download.run()
        finally:
            self.reading.pop(sha256, None)
        log.info("data_fetched", sha256=sha256, folder=str(self._cache_dir / sha256))
