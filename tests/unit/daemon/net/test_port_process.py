"""The process that serves a node's port is replaced when it hangs, and connections come through again."""

import asyncio
import os
import resource
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from headway.daemon.net import port_process
from headway.daemon.net.port import MAX_OPENINGS
from headway.daemon.net.port_process import PortProcess, falls_silent
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
    monkeypatch.setattr(port_process, "SILENT_S", 0.2)
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
    monkeypatch.setattr(port_process, "SILENT_S", 2.0)
    process = PortProcess("127.0.0.1", 0, daemon_port=1, folder=tmp_path)
    running = asyncio.create_task(process.run())
    try:
        while not await answers(process.port):
            await asyncio.sleep(0.1)
        assert process._process is not None
        stopped = process._process.pid
        os.kill(stopped, signal.SIGSTOP)
        assert not await answers(process.port)
        while not await answers(process.port):
            await asyncio.sleep(0.1)
        assert process._process.pid != stopped
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        process.close()


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


FLOODS = (
    b"",
    b"CONNECT work",
    b"CONNECT " + b"a" * 4000,
    b"CONNECT nobody:443 HTTP/1.1\r\n\r\n",
    b"CONNECT nobody~worker:443 HTTP/1.1\r\n\r\n",
    b"STANDBY 0123456789abcdef:0 HTTP/1.1\r\n\r\n",
)


@pytest.mark.timeout(120)
async def test_a_flood_takes_bounded_memory_and_stops_nobody(tmp_path: Path) -> None:
    """More connections of each kind than may be unheard: who is connected talks on, and who comes is let in."""
    raise_open_file_limit()
    server = socket.create_server(("127.0.0.1", 0), backlog=4096)
    process = PortProcess("127.0.0.1", 0, daemon_port=server.getsockname()[1], folder=tmp_path)
    running, opened = asyncio.create_task(process.run()), [server]
    try:
        while not await answers(process.port):
            await asyncio.sleep(0.1)
        assert process._process is not None
        friend = socket.create_connection(("127.0.0.1", process.port), timeout=10.0)
        friend.sendall(b"\x16first")
        inner = server.accept()[0]
        opened += [friend, inner]
        before = resident_bytes(process._process.pid)
        for said in FLOODS:
            opened += await asyncio.to_thread(flood, process.port, said, MAX_OPENINGS + 100)
        assert resident_bytes(process._process.pid) - before < 64 << 20
        friend.sendall(b"second")
        inner.settimeout(10.0)
        heard = b""
        while len(heard) < len(b"\x16firstsecond"):
            piece = inner.recv(100)
            assert piece, "the friend was sent away"
            heard += piece
        assert heard == b"\x16firstsecond"
        assert await answers(process.port)
        assert process._process is not None
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        process.close()
        for each in opened:
            each.close()
