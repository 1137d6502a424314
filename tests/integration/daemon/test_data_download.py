"""Data that is fetched comes once, from whichever node has it, goes on where it broke off, and is told as progress."""

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.daemon.agent.sweeps import DOWNLOAD_KEPT_S, sweep_data
from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import RecoveryError, StorageAwayError
from headway.daemon.blobs import download, verified_shards
from headway.daemon.blobs.fetch import PartialFile
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.blobs.library import DataLibrary, Reading
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.jobs.job import DataSpec
from headway.daemon.node import data_service
from headway.stages.data.shard_index import INDEX_NAME, read_index
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.tokens import TokenShards
from tests.rigs.node_network import node_network
from tests.rigs.running import running

SHARD = 300_000
"""Tokens, and bytes, of each of two shards: three chunks."""
CHUNK = 120_000
TOTAL = 2 * SHARD


@dataclass
class Holders:
    """Nodes b and c have the data, node a has not."""

    folders: dict[str, Path]
    cache: Path
    client: NodeClient
    endpoints: list[NodeEndpoint]
    data: DataSpec
    asked: list[tuple[str, int]] = field(default_factory=list)
    """(node, offset) of each request for a shard."""
    breaks_after: dict[str, int] = field(default_factory=dict)
    """Chunks that a node still sends before its disk fails."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Node a gets no piece before."""

    def library(self) -> DataLibrary:
        """A daemon's life on node a."""
        return DataLibrary(self.cache, self.client, lambda: self.endpoints)

    @property
    def folder(self) -> Path:
        return self.cache / self.data.sha256

    def shard(self, node: str, number: int = 0) -> Path:
        return self.folders[node] / read_index(self.folders[node]).shards[number].file

    def read(self, path: Path, *, offset: int = 0) -> Iterator[bytes]:
        """A node's disk."""
        node = path.parent.name
        if path.name != INDEX_NAME:
            self.asked.append((node, offset))
        with path.open("rb") as file:
            file.seek(offset)
            while chunk := file.read(CHUNK):
                if path.name != INDEX_NAME and node in self.breaks_after:
                    self.breaks_after[node] -= 1
                    if self.breaks_after[node] < 0:
                        raise OSError(5, "Input/output error")
                yield chunk


@pytest.fixture
async def holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Holders]:
    """b and c have verified the same data, each in a folder of its name; both serve on the loopback."""
    async with node_network(tmp_path / "nodes", "abc") as network:
        folders = {name: tmp_path / name for name in "bc"}
        for name, folder in folders.items():
            with writing_shards(folder, DataForm(vocab_size=256, most_tokens=SHARD)) as writer:
                writer.append(np.arange(TOTAL, dtype=np.uint32).astype(np.uint8))
            data = DataSpec(source=str(folder), sha256=read_index(folder).sha256)
            await network.desks[name].library.open(data)
        elsewhere = DataSpec(source=str(tmp_path / "nowhere"), sha256=data.sha256)
        endpoints = [network.view.nodes[name].endpoint for name in "bc"]
        found = Holders(folders, tmp_path / "cache", network.client, endpoints, elsewhere)
        found.gate.set()
        monkeypatch.setattr(data_service, "read_chunks", found.read)
        read = network.client.read

        async def gated(*arguments: Any) -> AsyncIterator[bytes]:
            async for piece in read(*arguments):
                await found.gate.wait()
                yield piece

        monkeypatch.setattr(network.client, "read", gated)
        yield found


def assert_whole(folder: Path, data: DataSpec) -> None:
    assert TokenShards.open(folder, expected_sha256=data.sha256).num_tokens == TOTAL
    names = [shard.file for shard in read_index(folder).shards]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, INDEX_NAME])


async def test_plans_share_one_download(holders: Holders) -> None:
    """Two generations ask, the first is given up, a third asks: each shard is sent once, and not hashed again after."""
    library = holders.library()
    holders.gate.clear()
    first, second = (asyncio.create_task(library.open(holders.data)) for _ in range(2))
    while not holders.client.addresses:
        await asyncio.sleep(0.01)
    first.cancel()
    third = asyncio.create_task(library.open(holders.data))
    await asyncio.wait({first})
    assert first.cancelled()
    holders.gate.set()
    assert set(await asyncio.gather(second, third)) == {holders.folder}
    assert holders.asked == [("b", 0), ("b", 0)]
    assert_whole(holders.folder, holders.data)


async def test_what_has_come_is_known_as_verified(holders: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was hashed as it came: opening it for each plan that follows reads none of it."""

    def never(*_: object) -> str:
        raise AssertionError("hashed again")

    monkeypatch.setattr(verified_shards, "_sha256", never)
    library = holders.library()
    for _ in range(2):
        assert await library.open(holders.data) == holders.folder


async def test_progress_is_told(holders: Holders) -> None:
    """The bytes that are here, of all: they grow with each piece, and are gone when it has come."""
    library, seen = holders.library(), []
    fetch = holders.client.read

    async def watched(*arguments: Any, **options: Any) -> AsyncIterator[bytes]:
        async for piece in fetch(*arguments, **options):
            yield piece
            seen.append(library.reading.get(holders.data.sha256))

    holders.client.read = watched  # type: ignore[method-assign]
    await library.open(holders.data)
    told = [reading for reading in seen if reading is not None]
    assert [reading.total_bytes for reading in told] == [TOTAL] * len(told)
    assert [reading.num_bytes for reading in told] == sorted({reading.num_bytes for reading in told})
    assert told[-1] == Reading(TOTAL, TOTAL)
    assert library.reading == {}


async def test_another_node_goes_on_where_one_broke_off(holders: Holders) -> None:
    """b's disk fails in the second chunk: c is asked for the rest, and for what follows."""
    holders.breaks_after = {"b": 1}
    assert await holders.library().open(holders.data) == holders.folder
    (_, from_b), (node, offset), after = holders.asked
    assert (from_b, node, after) == (0, "c", ("c", 0))
    assert 0 < offset < SHARD
    assert_whole(holders.folder, holders.data)


async def test_nodes_are_asked_again_for_as_long_as_more_comes(
    holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both disks fail after each chunk or two: the data comes nevertheless, each byte once."""

    def heal() -> None:
        holders.breaks_after = dict.fromkeys("bc", 1)

    heal()
    read = holders.read

    def healing(path: Path, *, offset: int = 0) -> Iterator[bytes]:
        heal()
        return read(path, offset=offset)

    monkeypatch.setattr(data_service, "read_chunks", healing)
    assert await holders.library().open(holders.data) == holders.folder
    offsets = [offset for _, offset in holders.asked]
    assert offsets.count(0) == 2
    assert_whole(holders.folder, holders.data)


async def test_a_daemon_that_starts_anew_goes_on(holders: Holders) -> None:
    """All disks fail, the daemon ends; the next one hashes what is there and asks for the rest."""
    holders.breaks_after = {"b": 1, "c": 1}
    with pytest.raises(RecoveryError, match=r"nowhere: no token shards here.*Input/output error"):
        await holders.library().open(holders.data)
    come = max(offset for _, offset in holders.asked)
    assert come > 0
    holders.breaks_after.clear()
    holders.asked.clear()
    assert await holders.library().open(holders.data) == holders.folder
    assert holders.asked[0][1] >= come
    assert_whole(holders.folder, holders.data)


async def test_other_bytes_are_not_kept(holders: Holders) -> None:
    """b's shard was altered since it was verified; where c has it altered too, no byte of it stays."""
    for node in "bc":
        raw = bytearray(holders.shard(node).read_bytes())
        raw[-1] ^= 1
        holders.shard(node).write_bytes(raw)
    with pytest.raises(RecoveryError, match=r"shard .*: node b.*: has SHA-256 .*; node c.*: has SHA-256"):
        await holders.library().open(holders.data)
    assert [path.name for path in (holders.folder / download.INCOMING).iterdir()] == [INDEX_NAME]
    raw[-1] ^= 1
    holders.shard("c").write_bytes(raw)
    assert await holders.library().open(holders.data) == holders.folder
    assert_whole(holders.folder, holders.data)


async def test_an_index_of_other_data_is_refused(holders: Holders) -> None:
    """b sends the index of something else: c is asked."""
    with writing_shards(holders.cache.parent / "other", DataForm(vocab_size=256)) as writer:
        writer.append(np.zeros(5, dtype=np.uint8))
    shutil.copy(holders.cache.parent / "other" / INDEX_NAME, holders.folders["b"] / INDEX_NAME)
    assert await holders.library().open(holders.data) == holders.folder
    assert_whole(holders.folder, holders.data)


async def test_data_that_finds_no_room_is_not_begun(holders: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte too few: it says how much is free and how much is missing, and no shard is asked for."""
    usage = shutil.disk_usage(holders.cache.parent)._replace(free=TOTAL - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RecoveryError, match=r"GB free, and 0\.0 GB of the data are missing"):
        await holders.library().open(holders.data)
    assert holders.asked == []


async def test_data_whose_file_system_went_away_comes_from_another_node(holders: Holders) -> None:
    """It was read here and is gone: an outage, and no mistake. b has it; without b it is waited for."""
    library = holders.library()
    there = DataSpec(source=str(holders.folders["c"]), sha256=holders.data.sha256)
    assert await library.open(there) == holders.folders["c"]
    holders.folders["c"].rename(holders.folders["c"].with_name("elsewhere"))
    everyone, holders.endpoints = holders.endpoints, []
    with pytest.raises(StorageAwayError, match=r"no token shards here.*there is no other node"):
        await library.open(there)
    holders.endpoints = everyone
    assert await library.open(there) == holders.folder


async def test_a_cache_that_hangs_is_an_outage(holders: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first piece is never written: no other node is asked, and no attempt begins beside the hung write."""
    library, go_on, append = holders.library(), threading.Event(), PartialFile.append
    library._downloads = FileThreads("downloads of data", silence_s=0.1)

    def hung(part: PartialFile, *arguments: Any) -> None:
        go_on.wait()
        append(part, *arguments)

    monkeypatch.setattr(PartialFile, "append", hung)
    try:
        for reason in ("has not answered for 0.1 s", "an earlier write has not ended"):
            with pytest.raises(StorageAwayError, match=f"no token shards here.*{reason}"):
                await asyncio.wait_for(library.open(holders.data), 20)
        assert [node for node, _ in holders.asked] == ["b"]
    finally:
        go_on.set()
    async with asyncio.timeout(20):
        while library._downloads.num_hung:
            await asyncio.sleep(0.005)
    library._downloads = FileThreads("downloads of data")
    assert await library.open(holders.data) == holders.folder
    assert_whole(holders.folder, holders.data)


async def test_data_that_lies_here_waits_for_no_download(holders: Holders) -> None:
    """Another job names the same data at a wrong path, and it is on its way for that job."""
    library = holders.library()
    holders.gate.clear()
    other = asyncio.create_task(library.open(holders.data))
    while not holders.client.addresses:
        await asyncio.sleep(0.005)
    here = DataSpec(source=str(holders.folders["c"]), sha256=holders.data.sha256)
    assert await asyncio.wait_for(library.open(here), 20) == holders.folders["c"]
    holders.gate.set()
    assert await other == holders.folder


async def test_who_gives_the_rest_is_not_blamed_for_the_beginning(holders: Holders) -> None:
    """b's first byte is wrong, and its disk fails then: c gives the rest, and is asked for all of it."""
    raw = bytearray(holders.shard("b").read_bytes())
    raw[0] ^= 1
    holders.shard("b").write_bytes(raw)
    holders.breaks_after = {"b": 1}
    assert await holders.library().open(holders.data) == holders.folder
    (_, from_b), (second, offset), (third, from_c) = holders.asked[:3]
    assert (from_b, second, third, from_c) == (0, "c", "c", 0)
    assert offset > 0
    assert_whole(holders.folder, holders.data)


async def test_a_download_that_nobody_waits_for_ends(holders: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one job that wanted the data is gone. Who asks next begins where it was."""
    library = holders.library()
    for shared in (library._opening, library._fetching):
        monkeypatch.setattr(shared, "_kept_s", 0.0)
    holders.gate.clear()
    async with running(library.open(holders.data)):
        while not holders.client.addresses:
            await asyncio.sleep(0.005)
    async with asyncio.timeout(20):
        while library._fetching:
            await asyncio.sleep(0.005)
    assert holders.asked == []
    holders.gate.set()
    assert await library.open(holders.data) == holders.folder


async def test_what_nobody_goes_on_with_leaves_the_cache(holders: Holders) -> None:
    """A download broke off more than a week ago, another one lately; the folder of a whole data set stays."""
    await holders.library().open(holders.data)
    now = (holders.folder / INDEX_NAME).stat().st_mtime + 2 * DOWNLOAD_KEPT_S
    for name, age_s in (("old", DOWNLOAD_KEPT_S + 60), ("new", DOWNLOAD_KEPT_S - 60)):
        incoming = holders.cache / name / download.INCOMING
        incoming.mkdir(parents=True)
        (incoming / "part").write_bytes(b"12345")
        (holders.cache / name / "shard").write_bytes(b"123")
        for path in (holders.cache / name / "shard", incoming / "part", incoming, incoming.parent):
            os.utime(path, (now - age_s,) * 2)
    assert sweep_data(holders.cache, frozenset(), now=now) >= 8
    assert {path.name for path in holders.cache.iterdir()} == {"new", holders.data.sha256}
    assert_whole(holders.folder, holders.data)
