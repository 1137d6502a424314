"""Faults that last: what they take away from real processes, folders and sockets, and that they give it back."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from headway.daemon.chaos.connections import can_destroy, destroy_connections
from headway.daemon.chaos.outages import FullDisk, Healer, IdleConnections, Outages, StorageAway, poison
from headway.daemon.errors import ConfigError
from headway.daemon.jobs.rules import check_job
from headway.daemon.records.format import decode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import SpecRecord
from tests.integration.exactness.training import small_job

_WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(sys.argv[1], "ab", buffering=0) as file:
            file.write(b"x")
        print("written", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""
_KILLED = """
import sys, time
from pathlib import Path
from headway.daemon.chaos.outages import FullDisk
from headway.daemon.chaos.outages import Healer
from headway.daemon.chaos.outages import StorageAway
healer = Healer()
FullDisk(healer).spread([int(sys.argv[1])])
StorageAway(Path(sys.argv[2]), healer).take()
print("taken", flush=True)
time.sleep(60)
"""


class Writer:
    """Another process that writes a byte when it is told to."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-c", _WRITER, str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    found = Writer(tmp_path / "file")
    yield found
    found.process.kill()
    found.process.communicate()


@pytest.fixture
def healer() -> Iterator[Healer]:
    found = Healer()
    yield found
    found.close()


def test_a_full_disk_takes_nothing_until_it_ends(writer: Writer, healer: Healer) -> None:
    """A process writes; under the fault each write fails with an errno; afterwards it writes again."""
    disk = FullDisk(healer)
    assert writer.answer() == "written"
    disk.spread([writer.process.pid])
    assert writer.answer() == str(errno.EFBIG)
    disk.end([])
    assert writer.answer() == "written"


def test_a_child_of_a_full_disk_gets_its_limit_back(writer: Writer, healer: Healer, tmp_path: Path) -> None:
    """A process that was started under the fault inherited the limit: the end of the fault lifts it too."""
    disk = FullDisk(healer)
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, -1))\n{_WRITER}"
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    child = Writer.__new__(Writer)
    child.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.answer() == str(errno.EFBIG)
        disk.end([child.process.pid])
        assert child.answer() == "written"
    finally:
        child.process.kill()
        child.process.communicate()


def test_a_checkpoint_folder_goes_and_comes_back(tmp_path: Path, healer: Healer) -> None:
    """Under the fault nothing can be written below the folder; afterwards its files are as they were."""
    folder = tmp_path / "checkpoints"
    (folder / "job").mkdir(parents=True)
    (folder / "job" / "layer").write_bytes(b"old")
    storage = StorageAway(folder, healer)
    storage.take()
    with pytest.raises(NotADirectoryError):
        (folder / "job").mkdir(parents=True)
    storage.bring_back()
    storage.bring_back()
    assert (folder / "job" / "layer").read_bytes() == b"old"


async def test_strikes_at_the_storage_that_overlap_are_one_outage(tmp_path: Path, healer: Healer) -> None:
    """A second strike begins and ends within the first: the folder comes back with the end of the last one."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "kept").touch()
    outages = Outages(None, None, healer)  # type: ignore[arg-type]
    first = asyncio.create_task(outages.storage_away(folder, 60))
    while not folder.is_file():
        await asyncio.sleep(0.001)
    await outages.storage_away(folder, 0.01)
    assert folder.is_file()
    second = asyncio.create_task(outages.storage_away(folder, 60))
    await asyncio.sleep(0)
    for strike in (first, second):
        assert folder.is_file()
        strike.cancel()
        await asyncio.wait([strike])
    assert (folder / "kept").exists()
    await outages.storage_away(folder, 0.0)
    assert (folder / "kept").exists()


async def test_a_killed_chaos_gives_everything_back(writer: Writer, tmp_path: Path) -> None:
    """A process takes disk and folder and is killed: both come back by themselves."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "kept").touch()
    command = [sys.executable, "-c", _KILLED, str(writer.process.pid), str(folder)]
    chaos = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert chaos.stdout is not None
    assert chaos.stdout.readline() == b"taken\n"
    assert writer.answer() == str(errno.EFBIG)
    assert folder.is_file()
    chaos.kill()
    chaos.communicate()
    async with asyncio.timeout(10):
        while not (folder / "kept").exists():
            await asyncio.sleep(0.01)
    assert writer.answer() == "written"


async def test_idle_connections_are_held_and_let_go() -> None:
    """Forty connections to a port are open at once, and closed afterwards."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        server.settimeout(5)
        async with IdleConnections("127.0.0.1", server.getsockname()[1], number=40):
            ends = [server.accept()[0] for _ in range(40)]
            ends[0].setblocking(False)
            with pytest.raises(BlockingIOError):
                ends[0].recv(1)
        for end in ends:
            end.settimeout(5)
            assert end.recv(1) == b""
            end.close()


@pytest.mark.parametrize("number", range(4))
def test_each_poison_is_something_that_submit_refuses(number: int) -> None:
    """A poisoned job breaks a rule; poisoned bytes are no record at all."""
    _, key, value = poison(number, "chaos-poison-0001", SpecRecord(spec=small_job("healthy")))
    assert key in (Keys.of("chaos-poison-0001", "spec"), Keys.node("chaos-poison-0001"))
    with suppress(ValueError):
        spec = decode(value, SpecRecord).spec
        with pytest.raises(ConfigError):
            check_job(spec, "chaos")


@pytest.mark.skipif(not can_destroy(), reason="needs root")
def test_a_pair_is_parted_and_reaches_everybody_else(tmp_path: Path) -> None:
    """Two processes' connection with each other is reset, whichever end is named first; one with a third stays."""
    code = "import socket, sys\ncall = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\nsys.stdin.read()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        command = [sys.executable, "-c", code, str(server.getsockname()[1])]
        one, other = (subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2))
        try:
            ends = [server.accept()[0] for _ in range(2)]
            assert destroy_connections([one.pid], others=[other.pid]) == 0
            assert destroy_connections([one.pid], others=[os.getpid()]) == 1
            assert destroy_connections([os.getpid()], others=[other.pid]) == 1
            for end in ends:
                with pytest.raises(ConnectionError):
                    end.recv(1)
                end.close()
        finally:
            for process in (one, other):
                process.kill()
                process.communicate()
