"""Measures an emulated line itself, for comparison with the links that bench/wan.py measures over it."""

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from lines.wan_line import Line
from lines.wan_namespaces import NamespacesWan, connected

LOSSY_S = 10.0
"""Seconds of sending, the later half of which counts: TCP first finds its rate."""

FAR_BELOW = 0.9


def ceiling(line: Line, seconds: float) -> tuple[float, float]:
    """(Mbit/s, processor seconds a second) of the emulator alone, one connection, one way."""
    with NamespacesWan() as wan:
        wan.set(line)
        near, far = connected(wan)
        return _carried(wan, near, far, seconds)


def _carried(wan: NamespacesWan, near: socket.socket, far: socket.socket, seconds: float) -> tuple[float, float]:
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


def ceilings(wan: NamespacesWan, line: Line, congestion: str, numbers: Sequence[int]) -> dict[int, float]:
    """Mbit/s of so many TCP connections together, with that congestion control."""
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
