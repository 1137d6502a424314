"""The process that serves a node's port is replaced when it hangs, and connections come through again."""

import asyncio
import os
import resource
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from headway.daemon.net import front_process
from headway.daemon.net.front import prepare
from headway.daemon.net.front_process import FrontProcess, falls_silent
from headway.stages.sockets.open_files import raise_open_file_limit


async def fed(*pieces: bytes, pause_s: float = 0.0) -> bool:
    """Feed pieces with a pause before each, then the end."""
    reader = asyncio.StreamReader()
    telling = asyncio.create_task(falls_silent(reader))
    for piece in pieces:
        await asyncio.sleep(pause_s)
        reader.feed_data(piece)
    await asyncio.sleep(pause_s)
    reader.feed_eof()
    return await telling


async def test_silence_is_told_from_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One silence may be the daemon's own, two in a row are the other process's."""
    assert not await fed(b".", b".")
    monkeypatch.setattr(front_process, "SILENT_S", 0.2)
    assert not await fed(b".", b".", b".", pause_s=0.3)
    assert await fed(b".", b"", b"", b".", pause_s=0.3)


@pytest.mark.parametrize("turns", range(6))
async def test_who_waits_for_a_byte_can_be_cancelled_when_it_arrives(turns: int) -> None:
    """A daemon that ends in that very turn of its loop must not go on watching for ever."""
    reader = asyncio.StreamReader()
    watching = asyncio.create_task(falls_silent(reader))
    await asyncio.sleep(0.01)
    reader.feed_data(b".")
    for _ in range(turns):
        await asyncio.sleep(0)
    watching.cancel()
    await asyncio.wait([watching], timeout=1.0)
    assert watching.cancelled()


def asked(port: int) -> bool:
    """Return whether the port sends away who speaks no TLS."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2.0) as one:
        one.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return one.recv(100).startswith(b"HTTP/1.1 400")
    return False


async def answers(port: int) -> bool:
    """Return the same, while the daemon's loop runs."""
    return await asyncio.to_thread(asked, port)


@pytest.mark.timeout(120)
async def test_a_stopped_process_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SIGSTOP: who dials waits in the kernel's queue, until a new process takes them."""
    monkeypatch.setattr(front_process, "SILENT_S", 2.0)
    front = FrontProcess("127.0.0.1", 0, daemon_port=1, folder=tmp_path)
    running = asyncio.create_task(front.run())
    try:
        while not await answers(front.port):
            await asyncio.sleep(0.1)
        assert front._process is not None
        stopped = front._process.pid
        os.kill(stopped, signal.SIGSTOP)
        assert not await answers(front.port)
        while not await answers(front.port):
            await asyncio.sleep(0.1)
        assert front._process.pid != stopped
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        front.close()


def resident_bytes(pid: int) -> int:
    """Return the memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def flood(port: int, said: bytes, number: int) -> list[socket.socket]:
    """Open connections that say something and wait."""
    opened = []
    for _ in range(number):
        with suppress(OSError):
            one = socket.socket()
            opened.append(one)
            one.settimeout(2.0)
            one.connect(("127.0.0.1", port))
            one.sendall(said)
    return opened


FLOODS = {
    "silent": b"",
    "slow": b"CONNECT work",
    "giant head": b"CONNECT " + b"a" * 4000,
    "no such server": b"CONNECT nobody:443 HTTP/1.1\r\n\r\n",
    "no such node": b"CONNECT nobody~worker:443 HTTP/1.1\r\n\r\n",
    "no such token": b"STANDBY 0123456789abcdef:0 HTTP/1.1\r\n\r\n",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("said", FLOODS.values(), ids=FLOODS.keys())
async def test_a_flood_takes_bounded_memory_and_stops_nobody(tmp_path: Path, said: bytes) -> None:
    """Thousands of connections that lead nowhere: who is connected talks on, and who comes is let in."""
    number = min(10_000, raise_open_file_limit() // 2)
    server = socket.create_server(("127.0.0.1", 0), backlog=4096)
    front = FrontProcess("127.0.0.1", 0, daemon_port=server.getsockname()[1], folder=tmp_path)
    running, opened = asyncio.create_task(front.run()), [server]
    try:
        while not await answers(front.port):
            await asyncio.sleep(0.1)
        assert front._process is not None
        friend = socket.create_connection(("127.0.0.1", front.port), timeout=10.0)
        friend.sendall(b"\x16first")
        inner = server.accept()[0]
        opened += [friend, inner]
        before = resident_bytes(front._process.pid)
        opened += await asyncio.to_thread(flood, front.port, said, number)
        assert resident_bytes(front._process.pid) - before < 64 << 20
        friend.sendall(b"second")
        inner.settimeout(10.0)
        heard = b""
        while len(heard) < len(b"\x16firstsecond"):
            heard += inner.recv(100)
        assert heard == b"\x16firstsecond"
        assert await answers(front.port)
        assert front._process is not None
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        front.close()
        for each in opened:
            each.close()


def test_a_connection_ends_when_the_other_machine_is_silent() -> None:
    """The kernel asks; a unix socket has nobody to ask."""
    with socket.socket() as one:
        prepare(one)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 15
    with socket.socket(socket.AF_UNIX) as one:
        prepare(one)
