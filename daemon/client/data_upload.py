"""Sends a job's token shards from this machine to a node, if no node has them: other nodes fetch them from there."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headway.daemon.client.cluster_access import ClusterSession, node_client
from headway.daemon.errors import ConfigError, RecoveryError
from headway.daemon.jobs.job import DataSpec
from headway.daemon.jobs.places import is_url
from headway.daemon.jobs.resolve import BUILT_IN_SOURCE
from headway.daemon.records.records import NodeRecord
from headway.daemon.rpc.peer_client import NodeClient
from headway.proto.control_pb2 import HasDataReply
from headway.stages.data.shard_index import INDEX_NAME, read_index
from headway.stages.errors import DataError, PeerError

MOST_NODES: Final = 64
"""Maximum number of nodes asked, the first by name."""
PIECE_BYTES: Final = 512 << 10

Tell = Callable[[str, int, int], None]
"""Is called with the node, the bytes that are there, and all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A data set that a node has received."""

    source: str
    node: str
    num_bytes: int

    @property
    def told(self) -> str:
        """Return it as a line for people."""
        return f"{self.source}: no node had it; sent {self.num_bytes / 1e6:,.1f} MB to {self.node}"


async def send_missing(
    session: ClusterSession, data: DataSpec, *, warn: Callable[[str], None], tell: Tell = lambda *_: None
) -> list[Sent]:
    """Send each folder of a job's data that no node has; return what was sent.

    warn: is told why nothing could be sent, if no node answers: a job waits in the queue without its data too. Raises
    ConfigError: no node has room. Raises RecoveryError, PeerError: a node refuses the data, or fails.
    """
    parts = [part for part in data.parts if part.source != BUILT_IN_SOURCE and not is_url(part.source)]
    if session.identity is None or not parts:
        return []
    nodes = (await session.view()).nodes
    async with node_client(session.identity) as client:
        sent = [await _send_if_missing(client, nodes, part, warn, tell) for part in parts]
    return [each for each in sent if each is not None]


async def _send_if_missing(
    client: NodeClient, nodes: Mapping[str, NodeRecord], data: DataSpec, warn: Callable[[str], None], tell: Tell
) -> Sent | None:
    folder = Path(data.source)
    try:
        index = read_index(folder)
    except DataError as error:
        raise ConfigError(error.reason, error.path) from error
    names = sorted(nodes)[:MOST_NODES]
    answers = await asyncio.gather(*(_ask(client, nodes[name], data) for name in names))
    replies = {name: reply for name, reply in zip(names, answers, strict=True) if isinstance(reply, HasDataReply)}
    if any(reply.is_here for reply in replies.values()):
        return None
    if not replies:
        why = next((answer for answer in answers if isinstance(answer, str)), "none is up")
        warn(f"no node could be asked whether it has {folder}: {why}; if none has it, run `headway data send {folder}`")
        return None
    node, num_bytes = _roomiest(replies, sum(each.num_bytes for each in index.files), data)
    reader = _FolderReader(folder, lambda done: tell(node, done, num_bytes))
    await client.give_data(nodes[node].endpoint, data.sha256, reader.read)
    return Sent(source=data.source, node=node, num_bytes=num_bytes)


def _roomiest(replies: Mapping[str, HasDataReply], num_bytes: int, data: DataSpec) -> tuple[str, int]:
    """Return the node with the most of it, else with the most room, and the bytes it is to hold in the end.

    Raises ConfigError when they fit nowhere.
    """
    room = {name: reply.free_bytes + reply.there_bytes for name, reply in replies.items()}
    fitting = [name for name in replies if room[name] > num_bytes] or list(replies)
    node = max(fitting, key=lambda name: (replies[name].there_bytes, room[name]))
    if (free := room[node]) <= num_bytes:
        what = f"no node has room for its {num_bytes / 1e9:.1f} GB; {node} has most, {free / 1e9:.1f} GB"
        raise ConfigError(f"{what}; make room there, or name a URL", data.source)
    return node, num_bytes


async def _ask(client: NodeClient, node: NodeRecord, data: DataSpec) -> HasDataReply | str:
    try:
        return await client.has_data(node.endpoint, data.sha256, data.source)
    except (PeerError, RecoveryError) as error:
        return str(error)


class _FolderReader:
    """Reads the files that a node asks for."""

    def __init__(self, folder: Path, tell: Callable[[int], None]) -> None:
        self._folder = folder
        self._files = {each.sha256: each for each in read_index(folder).files}
        self._tell = tell
        self._done = 0
        """Bytes of the files before the present one."""
        self._asked: set[str] = set()

    async def read(self, sha256: str, offset: int) -> AsyncIterator[bytes]:
        """Yield a file from an offset on. Raises RecoveryError."""
        wanted = self._files.get(sha256)
        if sha256 and wanted is None:
            raise RecoveryError(str(self._folder), f"has no shard {sha256[:12]}…")
        name = wanted.file if wanted is not None else INDEX_NAME
        num_there = offset
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(offset)
                while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                    yield piece
                    num_there += len(piece)
                    if wanted is not None:
                        self._tell(self._done + num_there)
        except OSError as error:
            raise RecoveryError(str(self._folder / name), f"cannot be read: {error.strerror}") from error
        if wanted is not None and sha256 not in self._asked:
            self._asked.add(sha256)
            self._done += wanted.num_bytes
