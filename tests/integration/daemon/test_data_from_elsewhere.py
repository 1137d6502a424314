"""Data that lies at a URL, or on the submitter's machine alone: real nodes, a real web server, every byte verified."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headway.daemon.base.errors import ConfigError, NoAccessError, RecoveryError, StorageAwayError
from headway.daemon.blobs import download
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.blobs.library import DataLibrary
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.submission import _FolderReader, send_missing
from headway.daemon.cluster.records import SpecRecord
from headway.daemon.jobs.job import DataSpec
from headway.daemon.node import data_service
from headway.proto.control_pb2 import ReadRequest, ShardFile
from headway.stages.data.shard_index import read_index
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.tokens import TokenShards
from tests.rigs.file_server import FileServer, serving
from tests.rigs.node_network import Network, node_network

SHARD = 700_000
TOTAL = 2 * SHARD


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    async with node_network(tmp_path) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards."""
    with writing_shards(tmp_path / "made" / "shards", DataForm(vocab_size=256, most_tokens=SHARD)) as writer:
        writer.append(np.arange(TOTAL, dtype=np.uint32).astype(np.uint8))
    return tmp_path / "made" / "shards"


@pytest.fixture
def server(folder: Path) -> Any:
    with serving(folder.parent) as found:
        yield found


def data_at(source: str, folder: Path) -> DataSpec:
    return DataSpec(source=source, sha256=read_index(folder).sha256)


def submit(network: Network, data: DataSpec) -> None:
    """The job whose data it is."""
    assert network.job.spec is not None
    network.job.submission = SpecRecord(spec=replace(network.job.spec, data=data))


def from_b(network: Network, sha256: str, *, data_sha256: str, name: str = "") -> AsyncIterator[bytes]:
    """A file of a data set; named: b reads it at the job's URL if it has none."""
    shard = ShardFile(sha256=sha256, data_sha256=data_sha256, name=name)
    return network.client.read(network.b.endpoint, ReadRequest(shard=shard, forward=bool(name)))


def assert_whole(folder: Path, data: DataSpec) -> None:
    assert TokenShards.open(folder, expected_sha256=data.sha256).num_tokens == TOTAL


def without_access(library: DataLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node of this library has no credentials."""

    class Threads(FileThreads):
        async def run(self, url: str, *_: Any, **__: Any) -> Any:
            raise NoAccessError(url, "this node has no credentials for it")

    monkeypatch.setattr(library, "_urls", Threads("none"))


async def test_a_url_is_read_once_and_then_nodes_help_each_other(
    network: Network, folder: Path, server: FileServer
) -> None:
    """b reads index and shards at the URL; a gets all of it from b, and asks the server nothing."""
    data = data_at(f"{server.url}/shards", folder)
    assert_whole(await network.b.library.open(data), data)
    num_asked = len(server.asked)
    assert {name for name, _ in server.asked} == {path.name for path in folder.iterdir()}
    shutil.rmtree(folder)
    assert_whole(await network.a.library.open(data), data)
    assert len(server.asked) == num_asked


async def test_a_node_without_access_reads_through_another(
    network: Network, folder: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a has no credentials, and b, which needs nothing of the data, reads it at the URL for a; b keeps no copy."""
    without_access(network.a.library, monkeypatch)
    data = data_at(f"{server.url}/shards", folder)
    with pytest.raises(RecoveryError, match=r"is not on node b; .*/shards: this node has no credentials"):
        await network.a.library.open(data)  # of no job that b knows
    submit(network, data)
    assert_whole(await network.a.library.open(data), data)
    assert not (network.b.folder / "data" / data.sha256).exists()


async def test_only_files_of_a_job_are_read_for_others(
    network: Network, folder: Path, server: FileServer, tmp_path: Path
) -> None:
    """Refused: a path, a file beside the shards, a shard's name with another hash, data that no job has."""
    (tmp_path / "made" / "secret").write_text("secret")
    (folder / "key").write_text("secret")
    data = data_at(f"{server.url}/shards", folder)
    submit(network, data)
    for file, sha256 in (
        ("../secret", data.sha256),
        ("..%2fsecret", data.sha256),
        ("key", data.sha256),
        (read_index(folder).shards[0].file, data.sha256),
        ("shards.json", "f" * 64),
    ):
        pieces = from_b(network, "e" * 64, data_sha256=sha256, name=file)
        with pytest.raises(RecoveryError, match=r"is not a file of the data|is not on node b"):
            _ = [piece async for piece in pieces]
    assert {file for file, _ in server.asked} == {"shards.json"}


async def test_another_index_is_not_read_for_others(network: Network, folder: Path, server: FileServer) -> None:
    """What lies at the URL is no longer the job's: the node that reads it says so, and sends none of it."""
    data = data_at(f"{server.url}/shards", folder)
    submit(network, replace(data, sha256="d" * 64))
    pieces = from_b(network, "d" * 64, data_sha256="d" * 64, name="shards.json")
    with pytest.raises(RecoveryError, match=rf"/shards: has other data, {data.sha256[:12]}"):
        _ = [piece async for piece in pieces]


async def test_a_node_that_reads_a_slow_url_for_another_is_not_silent(
    network: Network, folder: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty pieces come while the server takes its time; afterwards all bytes are there."""
    monkeypatch.setattr(data_service, "ALIVE_S", 0.01)
    data = data_at(f"{server.url}/shards", folder)
    submit(network, data)
    server.gate.clear()
    shard = read_index(folder).shards[0]
    pieces = from_b(network, shard.sha256, data_sha256=data.sha256, name=shard.file)
    assert await anext(pieces) == b""
    server.gate.set()
    assert b"".join([piece async for piece in pieces]) == (folder / shard.file).read_bytes()


async def test_a_server_that_is_away_is_an_outage_and_the_rest_comes_later(
    network: Network, folder: Path, server: FileServer
) -> None:
    """It fails before the index, and after the first shard came: no job fails for it. What is here is kept."""
    data = data_at(f"{server.url}/shards", folder)
    first, second = (shard.file for shard in read_index(folder).shards)
    server.status = 503
    with pytest.raises(StorageAwayError, match=r"/shards/shards.json: cannot be read: .*503"):
        await network.a.library.open(data)
    server.status = 200
    (folder / second).rename(folder / "away")
    with pytest.raises(RecoveryError, match=rf"/shards/{second}: is missing"):
        await network.a.library.open(data)
    (folder / "away").rename(folder / second)
    server.status = 503
    with pytest.raises(StorageAwayError, match=r"127\.0\.0\.1:\d+/shards/.*503"):
        await network.a.library.open(data)
    server.status, server.asked = 200, []
    assert_whole(await network.a.library.open(data), data)
    assert first not in {name for name, _ in server.asked}


async def test_a_server_that_hangs_is_named(network: Network, folder: Path, server: FileServer) -> None:
    """It takes the request and sends nothing: the URL is told, as an outage."""
    data = data_at(f"{server.url}/shards", folder)
    network.a.library._urls = FileThreads("data at URLs", silence_s=0.3)
    server.gate.clear()
    with pytest.raises(StorageAwayError, match=r"/shards: its file system has not answered for 0\.3 s"):
        await network.a.library.open(data)
    server.gate.set()


async def test_other_bytes_than_the_jobs_are_refused(network: Network, folder: Path, server: FileServer) -> None:
    """A damaged shard is refused by its hash, and another index by its name; neither is kept."""
    data = data_at(f"{server.url}/shards", folder)
    with pytest.raises(RecoveryError, match=r"sent the index of other data"):
        await network.a.library.open(replace(data, sha256="e" * 64))
    incoming = network.a.folder / "data" / data.sha256
    server.damage = True
    with pytest.raises(RecoveryError, match=r"sent an index that|has SHA-256"):
        await network.a.library.open(data)
    server.damage = False
    index = (folder / "shards.json").read_bytes()
    shard = folder / read_index(folder).shards[0].file
    shard.write_bytes(bytes(SHARD))
    with pytest.raises(RecoveryError, match=r"shard [0-9a-f]{12}…: http.*/shards: has SHA-256"):
        await network.a.library.open(data)
    assert (incoming / download.INCOMING / "shards.json").read_bytes() == index
    assert not (incoming / shard.name).exists()


async def give(network: Network, folder: Path, sha256: str) -> None:
    reader = _FolderReader(folder, lambda _: None)
    await network.client.give_data(network.a.endpoint, sha256, reader.read)


async def test_a_submitter_gives_its_data_to_one_node_and_others_get_it_there(network: Network, folder: Path) -> None:
    """a asks for the index and each shard; the folder is gone then, and b gets all from a, also from a's next life."""
    data = data_at(str(folder), folder)
    await give(network, folder, data.sha256)
    shutil.rmtree(folder)
    assert_whole(network.a.folder / "data" / data.sha256, data)
    assert not (network.a.folder / "data" / data.sha256 / download.INCOMING).exists()
    again = DataLibrary(network.a.folder / "data", network.client, list)
    network.desks["a"].library = network.a.library = again
    assert again.find(data.sha256) is None
    assert await again.has(data)
    network.desks["a"].library = again
    assert_whole(await network.b.library.open(data), data)


async def test_a_broken_gift_goes_on_where_it_stopped(
    network: Network, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second shard breaks off in its middle. The next attempt begins there, and sends the first one no more."""
    data = data_at(str(folder), folder)
    asked: list[tuple[str, int]] = []
    read, is_broken = _FolderReader.read, True

    async def noting(self: _FolderReader, sha256: str, offset: int) -> AsyncIterator[bytes]:
        asked.append((sha256, offset))
        num_pieces = 0
        async for piece in read(self, sha256, offset):
            if is_broken and sha256 == read_index(folder).shards[1].sha256 and num_pieces and len(asked) < 4:
                raise RecoveryError("the disk", "fails")
            num_pieces += 1
            yield piece

    monkeypatch.setattr(_FolderReader, "read", noting)
    with pytest.raises(RecoveryError, match="the disk: fails"):
        await give(network, folder, data.sha256)
    del asked[:]
    is_broken = False
    await give(network, folder, data.sha256)
    ((sha256, offset),) = asked
    assert sha256 == read_index(folder).shards[1].sha256
    assert 0 < offset < SHARD
    assert_whole(network.a.folder / "data" / data.sha256, data)


async def test_a_broken_gift_goes_on_at_the_same_node(
    network: Network, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a has a part of the data and less room than b, too little for all of it: the rest goes to a."""
    session = cast(ClusterSession, SimpleNamespace(identity=network.identity, view=lambda: _now(network.view)))
    data = data_at(str(folder), folder)
    has = DataLibrary.has
    monkeypatch.setattr(DataLibrary, "has", lambda library, data: has(library, replace(data, source="")))
    incoming = network.a.folder / "data" / data.sha256 / download.INCOMING
    incoming.mkdir(parents=True)
    shard = read_index(folder).shards[0]
    (incoming / shard.sha256).write_bytes((folder / shard.file).read_bytes()[:-9])
    room = {network.a.library: TOTAL - SHARD + 100, network.b.library: 10**13}
    monkeypatch.setattr(DataLibrary, "free_bytes", lambda library: _now(room[library]))
    (sent,) = await send_missing(session, data, warn=print)
    assert sent.node == "a"
    assert_whole(network.a.folder / "data" / data.sha256, data)


async def test_a_giver_that_lies_or_falls_silent_is_refused(
    network: Network, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong bytes, another index, no name, silence, too little room: one line each, and no data set comes of it."""
    data = data_at(str(folder), folder)
    with pytest.raises(RecoveryError, match="did not say which data it offers"):
        await give(network, folder, "../../etc")
    with pytest.raises(RecoveryError, match="sent the index of other data"):
        await give(network, folder, "e" * 64)
    usage = shutil.disk_usage(folder)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(RecoveryError, match=r"has 0\.0 GB free"):
            await give(network, folder, data.sha256)

    async def silent(_: str, __: int) -> AsyncIterator[bytes]:
        await asyncio.sleep(30)
        yield b""

    monkeypatch.setattr(download, "CALLER_SILENCE_S", 0.2)
    with pytest.raises(RecoveryError, match=r"sent nothing for 0\.2 s"):
        await network.client.give_data(network.a.endpoint, "d" * 64, silent)
    monkeypatch.undo()
    shard = folder / read_index(folder).shards[0].file
    shard.write_bytes(bytes(SHARD))
    with pytest.raises(RecoveryError, match="has SHA-256"):
        await give(network, folder, data.sha256)
    assert not (network.a.folder / "data" / data.sha256 / "shards.json").exists()


async def test_submit_sends_what_no_node_has(network: Network, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the node with the most room, once; nothing for the built-in data, a URL, or a folder that a node has too."""
    session = cast(ClusterSession, SimpleNamespace(identity=network.identity, view=lambda: _now(network.view)))
    data = data_at(str(folder), folder)
    warnings: list[str] = []
    assert await send_missing(session, data, warn=warnings.append) == []  # both see this very folder
    has = DataLibrary.has
    monkeypatch.setattr(DataLibrary, "has", lambda library, data: has(library, replace(data, source="")))
    room = {network.a.library: 10**12, network.b.library: 10**13}
    monkeypatch.setattr(DataLibrary, "free_bytes", lambda library: _now(room[library]))
    for other in (DataSpec(), replace(data, source="http://nowhere/shards")):
        assert await send_missing(session, other, warn=warnings.append) == []
    told: list[tuple[str, int, int]] = []
    (sent,) = await send_missing(session, data, warn=warnings.append, tell=lambda *each: told.append(each))
    assert (sent.node, sent.num_bytes) == ("b", TOTAL)
    assert told[-1] == ("b", TOTAL, TOTAL)
    assert await send_missing(session, data, warn=warnings.append) == []
    assert warnings == []
    room[network.a.library] = room[network.b.library] = 5
    shutil.rmtree(network.b.folder / "data")
    with pytest.raises(ConfigError, match="no node has room for its"):
        await send_missing(session, data, warn=warnings.append)
    network.view.nodes.clear()
    assert await send_missing(session, data, warn=warnings.append) == []
    assert warnings == [
        f"no node could be asked whether it has {folder}: none is up; if none has it, run `headway data send {folder}`"
    ]


async def test_a_node_verifies_its_folder_when_another_asks(
    network: Network, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """b has the folder that the job names, and never read it. It sends empty pieces while it does, then the data."""
    monkeypatch.setattr(data_service, "ALIVE_S", 0.01)
    data = data_at(str(folder), folder)
    submit(network, data)
    open_here = network.b.library._open_here

    async def slowly(data: DataSpec) -> Path:
        await asyncio.sleep(0.1)
        return await open_here(data)

    monkeypatch.setattr(network.b.library, "_open_here", slowly)
    pieces = [piece async for piece in from_b(network, data.sha256, data_sha256=data.sha256)]
    assert pieces[0] == b""
    assert b"".join(pieces) == (folder / "shards.json").read_bytes()


async def _now(result: Any) -> Any:
    return result
