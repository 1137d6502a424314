"""The token shards that a node has: found in the cache, in the job's folder or on another node; verified before use."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from headway.daemon.addresses import NodeEndpoint
from headway.daemon.errors import RecoveryError
from headway.daemon.jobs.job import DataSpec
from headway.daemon.jobs.resolve import data_folder
from headway.daemon.node.peer_client import NodeClient
from headway.stages.errors import DataError, PeerError
from headway.stages.tokens import INDEX_NAME, TokenShards, read_index

log = structlog.get_logger()


class DataLibrary:
    """Opens a job's data, and knows every verified folder so that other nodes can be served from it."""

    def __init__(self, cache_dir: Path, client: NodeClient, peers: Callable[[], Iterable[NodeEndpoint]]) -> None:
        """peers: the other nodes' daemons, at the time of the call."""
        self._cache_dir = cache_dir
        self._client = client
        self._peers = peers
        self._folders: dict[str, Path] = {}

    async def open(self, data: DataSpec) -> Path:
        """The folder with the data that a job names. Raises RecoveryError, in one line, when no node has it."""
        if data.sha256 in self._folders:
            return self._folders[data.sha256]
        try:
            folder = await asyncio.to_thread(self._open_here, data)
        except DataError as error:
            folder = await self._fetch(data, why_not_here=str(error))
        self._folders[data.sha256] = folder
        return folder

    def find(self, sha256: str) -> Path | None:
        """The file with this hash in a verified folder: the index of a data set, or one of its shards."""
        for name, folder in self._folders.items():
            if sha256 == name:
                return folder / INDEX_NAME
            for shard in read_index(folder).shards:
                if shard.sha256 == sha256:
                    return folder / shard.file
        return None

    def _open_here(self, data: DataSpec) -> Path:
        fetched = self._cache_dir / data.sha256
        if data.sha256 and (fetched / INDEX_NAME).exists():
            TokenShards.open(fetched, expected_sha256=data.sha256)
            return fetched
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        folder = data_folder(data.source, self._cache_dir)
        TokenShards.open(folder, expected_sha256=data.sha256)
        return folder

    async def _fetch(self, data: DataSpec, *, why_not_here: str) -> Path:
        reasons = [why_not_here]
        for endpoint in self._peers():
            try:
                await self._fetch_from(endpoint, data.sha256)
                folder = await asyncio.to_thread(self._open_here, data)
            except (PeerError, RecoveryError, DataError, OSError) as error:
                reasons.append(str(error))
                continue
            log.info("data_fetched", sha256=data.sha256, peer=endpoint.address)
            return folder
        raise RecoveryError(f"data {data.sha256[:12]}…", "; ".join(reasons))

    async def _fetch_from(self, endpoint: NodeEndpoint, sha256: str) -> None:
        """All files of a data set, the index last: without it a folder holds no shards."""
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
            await self._download(endpoint, shard.sha256, folder / shard.file)
        (incoming / INDEX_NAME).replace(folder / INDEX_NAME)
        incoming.rmdir()

    async def _download(self, endpoint: NodeEndpoint, sha256: str, target: Path) -> None:
        with target.open("wb") as file:
            async for piece in self._client.fetch_data(endpoint, sha256):
                await asyncio.to_thread(file.write, piece)
