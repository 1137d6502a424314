"""The token shards that a node has: found in the cache, in the job's folder or on another node; verified before use."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.addresses import NodeEndpoint
from headway.daemon.data.verified_shards import VerifiedShards
from headway.daemon.errors import RecoveryError
from headway.daemon.jobs.job import DataSpec
from headway.daemon.jobs.resolve import data_folder
from headway.daemon.node.peer_client import NodeClient
from headway.daemon.storage.file_threads import Beat, FileThreads
from headway.stages.errors import DataError, PeerError
from headway.stages.tokens import INDEX_NAME, TokenShards, fingerprint, read_index

log = structlog.get_logger()

SILENCE_S: Final = 120.0
"""A file system that gives no byte for so long hangs. The built-in data takes seconds to make before its first byte."""

MAX_DATA_SETS: Final = 1000
"""That are known by heart. Another one is read again when it is asked for, without hashing what has not changed."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a data set is."""

    num_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class _DataSet:
    """One that was verified."""

    sha256: str
    folder: Path
    state: str
    """The fingerprint of its folder then."""
    files: dict[str, Path]
    """Its index and shards, by SHA-256."""


@dataclass(slots=True)
class _Turns:
    """Those who want one data set from other nodes take turns."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_askers: int = 0


class DataLibrary:
    """Opens a job's data, and knows every verified folder so that other nodes can be served from it."""

    def __init__(
        self,
        cache_dir: Path,
        client: NodeClient,
        peers: Callable[[], Iterable[NodeEndpoint]],
        *,
        memory: Path | None = None,
    ) -> None:
        """peers: the other nodes' daemons, at the time of the call. memory: a file for what was verified."""
        self._cache_dir = cache_dir
        self._client = client
        self._peers = peers
        self._verified = VerifiedShards(memory)
        self._threads = FileThreads("data", silence_s=SILENCE_S)
        self._opening: dict[str, asyncio.Task[Path]] = {}
        self._fetching: dict[str, _Turns] = {}
        self._sets: dict[str, _DataSet] = {}
        """The data sets that were verified last, by SHA-256."""
        self.reading: dict[str, Reading] = {}
        """How far the data sets are that are being read, by SHA-256."""

    async def open(self, data: DataSpec) -> Path:
        """The folder with the data that a job names, as it is now. Raises RecoveryError when no node has it.

        Files are read when they are not as they were when they were last verified.
        """
        try:
            return await self._open_once(data)
        except DataError as error:
            return await self._fetch_once(data, why_not_here=str(error))

    async def look_ahead(self, data: DataSpec) -> None:
        """Verify what lies here, so that this node can begin with it at once. What does not lie here stays away."""
        try:
            await self._open_once(data)
        except (DataError, RecoveryError, OSError) as error:
            log.info("data_not_here", sha256=data.sha256, reason=str(error))

    async def _open_once(self, data: DataSpec) -> Path:
        """Who asks while it is under way waits for the same. Raises DataError, RecoveryError."""
        task = self._opening.get(data.sha256)
        if task is None:
            task = asyncio.create_task(self._open_here(data), name=f"data {data.sha256[:12]}")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._opening[data.sha256] = task
            task.add_done_callback(lambda _: self._opening.pop(data.sha256, None))
        return await asyncio.shield(task)

    def state_of(self, folder: str) -> str:
        """The fingerprint of a folder when its files were last verified: for a worker that opens them."""
        return next((each.state for each in reversed(self._sets.values()) if str(each.folder) == folder), "")

    def find(self, sha256: str) -> Path | None:
        """The file with this hash in a verified folder: the index of a data set, or one of its shards."""
        return next((each.files[sha256] for each in self._sets.values() if sha256 in each.files), None)

    async def _open_here(self, data: DataSpec) -> Path:
        """Raises DataError: it is not here, or is something else. RecoveryError: its file system does not answer."""
        errors: list[DataError] = []

        def verified(beat: Beat) -> _DataSet | None:
            try:
                return self._verify(data, beat)
            except DataError as error:
                errors.append(error)
                return None

        found = await self._threads.run(data.source or str(self._cache_dir), verified)
        if found is None:
            raise errors[0]
        self._sets.pop(found.sha256, None)
        self._sets[found.sha256] = found
        while len(self._sets) > MAX_DATA_SETS:
            del self._sets[next(iter(self._sets))]
        return found.folder

    def _verify(self, data: DataSpec, beat: Beat) -> _DataSet:
        """In a thread."""
        folder = self._cache_dir / data.sha256
        if not data.sha256 or not (folder / INDEX_NAME).exists():
            self._cache_dir.mkdir(parents=True, exist_ok=True)
            folder = data_folder(data.source, self._cache_dir)
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
        shards = {shard.sha256: folder / shard.file for shard in index.shards}
        return _DataSet(index.sha256, folder, state, {**shards, index.sha256: folder / INDEX_NAME})

    async def _fetch_once(self, data: DataSpec, *, why_not_here: str) -> Path:
        """Two jobs with the same data fetch it one after the other, and the second finds it here."""
        turns = self._fetching.setdefault(data.sha256, _Turns())
        turns.num_askers += 1
        try:
            has_waited = turns.lock.locked()
            async with turns.lock:
                if has_waited:
                    try:
                        return await self._open_once(data)
                    except DataError as error:
                        why_not_here = str(error)
                return await self._fetch(data, why_not_here=why_not_here)
        finally:
            turns.num_askers -= 1
            if not turns.num_askers:
                del self._fetching[data.sha256]

    async def _fetch(self, data: DataSpec, *, why_not_here: str) -> Path:
        reasons = [why_not_here]
        for endpoint in self._peers():
            try:
                await self._fetch_from(endpoint, data.sha256)
                folder = await self._open_once(data)
            except (PeerError, RecoveryError, DataError, OSError) as error:
                reasons.append(str(error))
                continue
            log.info("data_fetched", sha256=data.sha256, peer=endpoint.address)
            return folder
        raise RecoveryError(f"data {data.sha256[:12]}…", "; ".join(reasons))

    async def _fetch_from(self, endpoint: NodeEndpoint, sha256: str) -> None:
        """All files of a data set, the index last: without it a folder holds no shards.

        Each is moved into place when it is whole: a worker may still read an older file of the same name.
        """
        folder = self._cache_dir / sha256
        folder.mkdir(parents=True, exist_ok=True)
        incoming = folder / "incoming"
        incoming.mkdir(exist_ok=True)
        await self._download(endpoint, sha256, incoming / INDEX_NAME)
        index = await asyncio.to_thread(read_index, incoming)
        if index.sha256 != sha256:
            raise RecoveryError(str(endpoint), f"sent the index of other data, {index.sha256[:12]}…")
        for shard in index.shards:
            if Path(shard.file).name != shard.file:
                raise RecoveryError(str(endpoint), f"sent an index with the path {shard.file!r}")
            await self._download(endpoint, shard.sha256, incoming / shard.file)
            (incoming / shard.file).replace(folder / shard.file)
        (incoming / INDEX_NAME).replace(folder / INDEX_NAME)
        incoming.rmdir()

    async def _download(self, endpoint: NodeEndpoint, sha256: str, target: Path) -> None:
        with target.open("wb") as file:
            async for piece in self._client.fetch_data(endpoint, sha256):
                await asyncio.to_thread(file.write, piece)
