"""Measures an emulated line itself, for comparison with the links that bench/wan.py measures over it."""

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from lines.wan_line import Line, reno_bytes_per_s
from lines.wan_namespaces import NamespacesWan, connected
from lines.wan_proxy import HOST, ProxyWan

LOSSY_S = 10.0
"""Seconds of sending, the later half of which counts: TCP first finds its rate."""

FAR_BELOW = 0.9


class Wan(Protocol):
    """A line that can be changed; wan_proxy.py and wan_namespaces.py have one each."""

    def set(self, line: Line) -> None:
        """From now on."""
        ...

    def cut(self, seconds: float) -> None:
        """Let nothing pass for so long."""
        ...

    def cpu_s(self) -> float:
        """Processor seconds of the emulator so far."""
        ...


def ceiling(line: Line, seconds: float) -> tuple[float, float]:
    """(Mbit/s, processor seconds a second) of the proxy alone, one connection, one way."""
    with socket.create_server((HOST, 0)) as sink, ProxyWan(sink.getsockname()[1]) as wan:
        wan.set(line)
        near = socket.create_connection((HOST, wan.port))
        far, _ = sink.accept()
        return _carried(wan, near, far, seconds)


def ceiling_of_namespaces(line: Line, seconds: float) -> tuple[float, float]:
    """Measure the line between namespaces."""
    with NamespacesWan() as wan:
        wan.set(line)
        near, far = connected(wan)
        return _carried(wan, near, far, seconds)


def _carried(wan: Wan, near: socket.socket, far: socket.socket, seconds: float) -> tuple[float, float]:
    """Return the rate in the later half of the sending."""
    taken = _Counter()
    reader = threading.Thread(target=taken.drain, args=(far,))
    reader.start()
    piece, began = bytes(1 << 18), time.monotonic()
    mark: tuple[float, int, float] | None = None
    while (now := time.monotonic()) < began + seconds:
        near.sendall(piece)
        if mark is None and now > began + seconds / 2:
            mark = now, taken.number, wan.cpu_s()
    assert mark is not None
    spent_s = time.monotonic() - mark[0]
    found = (taken.number - mark[1]) * 8 / 1e6 / spent_s, (wan.cpu_s() - mark[2]) / spent_s
    near.close()
    far.shutdown(socket.SHUT_RDWR)
    reader.join()
    far.close()
    return found


class _Counter:
    number = 0

    def drain(self, end: socket.socket) -> None:
        with suppress(OSError):
            while data := end.recv(1 << 20):
                self.number += len(data)


def ceilings(wan: Wan, line: Line, congestion: str, numbers: Sequence[int]) -> dict[int, float]:
    """Mbit/s of so many TCP connections together: measured between namespaces, which keep that congestion control."""
    if not isinstance(wan, NamespacesWan):
        one = reno_bytes_per_s(line.loss, line.round_trip_ms / 1e3) * 8 / 1e6
        return {number: min(line.mbit_s, number * one) for number in numbers}
    wan.set(line)
    wan.set_congestion(congestion)
    found = {}
    with ThreadPoolExecutor(max(numbers)) as threads:
        for number in numbers:
            pairs = [connected(wan) for _ in range(number)]
            carrying = [threads.submit(_carried, wan, near, far, LOSSY_S) for near, far in pairs]
            found[number] = sum(each.result()[0] for each in carrying)
    if max(found.values()) < FAR_BELOW * line.mbit_s:  # the line is in nobody's way: all are samples of one
        found[1] = sum(found.values()) / sum(found)
    return found
