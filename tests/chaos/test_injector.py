"""The injector's effect on real processes and files, and how it is undone."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.cluster.format import decode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import PlanRecord, SpecRecord, WorkerPart, WorkerRecord, WorkerState
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.rules import check_job
from headway.daemon.local.fault_schedule import FaultKind, Strike
from headway.daemon.local.injector import Injector
from headway.daemon.local.outages import (
    FullDisk,
    Healer,
    IdleConnections,
    LocalTargets,
    Outages,
    Parting,
    StorageAway,
    can_destroy,
    destroy_connections,
    poison,
)
from tests.chaos.processes import stand_ins
from tests.integration.exactness.training import small_job

NO_SESSION = cast(ClusterSession, None)
"""Nothing here asks etcd."""
Pids = tuple[int, int, int, int]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store" / "job" / "1" / "20"
    folder.mkdir(parents=True)
    (folder / "embed.safetensors").write_bytes(bytes(1000))
    (folder / "head.partial").write_bytes(bytes(1000))
    return tmp_path / "store"


@pytest.fixture
def pids(store: Path) -> Iterator[Pids]:
    with stand_ins(store) as found:
        yield found


def strike(kind: FaultKind, *, seconds: float = 0.0, share: float = 0.5) -> Strike:
    return Strike(number=1, at_s=0.0, kind=kind, ordinal=12, seconds=seconds, share=share)


def view_with(worker_pid: int) -> ClusterView:
    """A job of one stage, whose worker has this pid."""
    stage = WorkerPart(node="node-1", node_incarnation="x", device_index=0, layers=("embed",), depth=1)
    job = JobView(name="job", plan=PlanRecord(generation=1, timeline=1, workers=(stage,)))
    job.workers[1, 0] = WorkerRecord(
        node="node-1", incarnation="w", address="", pid=worker_pid, state=WorkerState.RUNNING
    )
    return ClusterView(jobs={"job": job})


def state_of(pid: int) -> str:
    """`T` when it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def until_state(pid: int, *, is_stopped: bool) -> None:
    async with asyncio.timeout(5):
        while (state_of(pid) == "T") is not is_stopped:
            await asyncio.sleep(0.005)


async def test_a_paused_node_is_stopped_whole_and_goes_on(pids: Pids) -> None:
    """Daemon and worker are stopped, and go on by themselves; etcd and the cluster's process are left alone."""
    cluster, daemon, worker, etcd = pids
    async with Injector(NO_SESSION, targets=LocalTargets(cluster)) as injector:
        blow = await injector.strike(strike(FaultKind.PAUSE, seconds=0.3), ClusterView())
        assert blow is not None
        await until_state(daemon, is_stopped=True)
        await until_state(worker, is_stopped=True)
        assert blow.until_s is None
        assert state_of(etcd) != "T"
        assert state_of(cluster) != "T"
        await injector.finish()
        await until_state(daemon, is_stopped=False)
        await until_state(worker, is_stopped=False)
        assert blow.until_s is not None
        assert blow.until_s - blow.at_s >= 0.3


async def test_leaving_lets_everything_go_on(pids: Pids) -> None:
    """etcd is stopped for an hour; the injector is closed: etcd goes on."""
    cluster, _, _, etcd = pids
    injector = Injector(NO_SESSION, targets=LocalTargets(cluster))
    await injector.strike(strike(FaultKind.ETCD_STOP, seconds=3600), ClusterView())
    await until_state(etcd, is_stopped=True)
    await injector.close()
    await until_state(etcd, is_stopped=False)


async def test_what_was_stopped_goes_on_when_the_injector_is_killed(pids: Pids) -> None:
    """A process stops etcd and is killed: etcd goes on."""
    etcd = pids[3]
    code = "import sys, time\nfrom headway.daemon.local.outages import Healer\n"
    code += "healer = Healer()\nhealer.stop(int(sys.argv[1]))\nprint('stopped', flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(etcd)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"stopped\n"
    await until_state(etcd, is_stopped=True)
    process.kill()
    process.communicate()
    await until_state(etcd, is_stopped=False)


async def test_a_worker_of_the_plan_is_killed_and_no_stranger(pids: Pids) -> None:
    """The worker that etcd names is killed; a pid in etcd that is none of the cluster's processes is left alone."""
    cluster, _, worker, _ = pids
    async with Injector(NO_SESSION, targets=LocalTargets(cluster), job="job") as injector:
        assert await injector.strike(strike(FaultKind.KILL), view_with(os.getpid())) is None
        blow = await injector.strike(strike(FaultKind.KILL), view_with(worker))
        assert blow is not None
        assert blow.takes_worker
        async with asyncio.timeout(5):
            while LocalTargets(cluster).workers("node-1"):
                await asyncio.sleep(0.005)


async def test_one_bit_of_a_finished_file_is_flipped(pids: Pids, store: Path) -> None:
    """Exactly one bit of 1000 zero bytes is set afterwards; the file that is still being written is left alone."""
    async with Injector(NO_SESSION, targets=LocalTargets(pids[0])) as injector:
        blow = await injector.strike(strike(FaultKind.CORRUPT), ClusterView())
    damaged = (store / "job/1/20/embed.safetensors").read_bytes()
    assert sum(byte.bit_count() for byte in damaged) == 1
    assert len(damaged) == 1000
    assert not any((store / "job/1/20/head.partial").read_bytes())
    assert blow is not None
    assert blow.target.endswith("embed.safetensors at byte 500")


async def test_a_file_is_cut_short(pids: Pids, store: Path) -> None:
    async with Injector(NO_SESSION, targets=LocalTargets(pids[0])) as injector:
        await injector.strike(strike(FaultKind.TRUNCATE), ClusterView())
    assert (store / "job/1/20/embed.safetensors").stat().st_size == 500


async def test_a_node_that_is_not_named_is_left_alone(pids: Pids) -> None:
    async with Injector(NO_SESSION, targets=LocalTargets(pids[0]), nodes=("node-9",)) as injector:
        assert await injector.strike(strike(FaultKind.DAEMON_KILL), ClusterView()) is None
    os.kill(pids[1], signal.SIGCONT)  # it is there


async def test_a_distant_cluster_is_struck_by_its_records_only(pids: Pids) -> None:
    """A kill needs this machine's processes: refused in a line that says what is possible."""
    async with Injector(NO_SESSION, targets=None) as injector:
        injector.refuse([FaultKind.LEASE_LOSS, FaultKind.DRAIN])
        with pytest.raises(ConfigError, match="lease-loss"):
            injector.refuse([FaultKind.DRAIN, FaultKind.KILL])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as lonely:
        with pytest.raises(ConfigError, match="no daemon"):
            LocalTargets(lonely.pid)
        lonely.kill()


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
from headway.daemon.local.outages import FullDisk
from headway.daemon.local.outages import Healer
from headway.daemon.local.outages import StorageAway
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


pytestmark = pytest.mark.skipif(not can_destroy(), reason="needs root")

_NODE = """
import socket, sys
calls = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(3)]
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
accepted = server.accept()
print("accepted", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        yield server


@pytest.fixture
def node(listener: socket.socket) -> Iterator[subprocess.Popen[str]]:
    """Another process, which called the listener three times and awaits one call; it tells the port."""
    command = [sys.executable, "-c", _NODE, str(listener.getsockname()[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_process_is_parted_and_no_other(listener: socket.socket, node: subprocess.Popen[str]) -> None:
    """Its three calls and the one that it took are reset; a connection that this process has with itself stays."""
    assert node.stdout is not None
    call = socket.create_connection(("127.0.0.1", int(node.stdout.readline())), timeout=10)
    assert node.stdout.readline() == "accepted\n"
    ends = [call, *(listener.accept()[0] for _ in range(3))]
    own = socket.create_connection(listener.getsockname(), timeout=10)
    answered, _ = listener.accept()
    assert destroy_connections([node.pid]) == 4
    for end in ends:
        end.settimeout(10)
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    own.sendall(b"x")
    assert answered.recv(1) == b"x"
    assert destroy_connections([node.pid]) == 0
    for end in (*ends, own, answered):
        end.close()


def test_a_parted_process_stays_so_until_the_end(listener: socket.socket, node: subprocess.Popen[str]) -> None:
    """Calls during the parting are reset; afterwards calls succeed again."""
    assert node.stdout is not None
    address = ("127.0.0.1", int(node.stdout.readline()))
    for _ in range(3):
        listener.accept()[0].close()
    with Parting() as parting:
        parting.pids = [node.pid]
        for _ in range(5):
            with pytest.raises(ConnectionError):
                _call(address, wait_s=10)
    with pytest.raises(TimeoutError):
        _call(address, wait_s=0.5)


def _call(address: tuple[str, int], *, wait_s: float) -> None:
    """Connect and wait for a word, which never comes."""
    with socket.create_connection(address, timeout=wait_s) as connection:
        connection.recv(1)
