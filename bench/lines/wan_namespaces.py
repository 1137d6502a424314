"""A line between two network namespaces of this machine, as two tap devices and one process that carries the packets.

Needs root and /dev/net/tun. Unlike the proxy it leaves TCP to the kernel: its windows, its congestion control and its
retransmissions are the real ones, and loss is loss of packets. Each packet waits for the line, is late by the delay,
and is dropped where the queue of the router is full. The namespaces belong to one process, and are gone when it is.
"""

import ctypes
import fcntl
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Self

from lines.wan_line import QUEUE_S, Line
from lines.wan_process import TIMEOUT_S, LineProcess

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TAP_WITHOUT_HEADER = 0x1002
DEVICE = "wan0"
ADDRESSES = ("10.213.7.1", "10.213.7.2")
NETWORK = "10.213.7.0/24"
LARGE_MTU, PLAIN_MTU = 9000, 1500
"""Bytes: fewer packets to carry, and, where packets are lost, as many as there would be."""
WINDOW_BYTES = 16 << 20
"""Maximum size of the kernel's socket buffers, so that a long fast line can be filled."""


def is_possible() -> bool:
    """Return whether this machine lets this user make the line."""
    return os.geteuid() == 0 and os.access("/dev/net/tun", os.R_OK | os.W_OK) and shutil.which("ip") is not None


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts from now on, to the namespace. Raises OSError."""
    number = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(number, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(number)


class _Carrier:
    """Packets from either tap to the other."""

    def __init__(self, namespaces: list[str], mtu: int) -> None:
        own = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._taps = []
        for namespace, address in zip(namespaces, ADDRESSES, strict=True):
            enter(namespace)
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH14x", DEVICE.encode(), IFF_TAP_WITHOUT_HEADER))
            for command in (
                "ip link set lo up",
                f"ip link set {DEVICE} mtu {mtu} up",
                f"ip addr add {address}/24 dev {DEVICE}",
                f"sysctl -qw net.ipv4.tcp_rmem=4096\t131072\t{WINDOW_BYTES}",
                f"sysctl -qw net.ipv4.tcp_wmem=4096\t131072\t{WINDOW_BYTES}",
            ):
                subprocess.run(command.split(" "), check=True, timeout=TIMEOUT_S)
            self._taps.append(tap)
        ctypes.CDLL(None).setns(own, CLONE_NEWNET)
        self._line = Line()
        self._free_at = [0.0, 0.0]
        self._last_arrival = [0.0, 0.0]
        self._under_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]
        self._cut_until = 0.0
        self._draw = random.Random(1)

    def run(self) -> None:
        """Run until the standard input ends."""
        poll = select.epoll()
        for number in (*self._taps, sys.stdin.fileno()):
            poll.register(number, select.EPOLLIN)
        print("up", flush=True)
        while True:
            now, next_at = time.monotonic(), float("inf")
            for way in (0, 1):
                self._deliver(way, now)
                if self._under_way[way]:
                    next_at = min(next_at, self._under_way[way][0][0])
            for number, _ in poll.poll(min(1.0, max(0.0, next_at - time.monotonic()))):
                if number == sys.stdin.fileno():
                    if not self._command(sys.stdin.readline()):
                        return
                else:
                    self._take(self._taps.index(number))

    def _command(self, text: str) -> bool:
        if not text:
            return False
        told = json.loads(text)
        if "line" in told:
            self._line = Line(**told["line"])
        if "cut_s" in told:
            self._cut_until = time.monotonic() + told["cut_s"]
            for packets in self._under_way:
                packets.clear()
        print(json.dumps({"cpu_s": time.process_time()}), flush=True)
        return True

    def _take(self, way: int) -> None:
        line = self._line
        for _ in range(64):
            try:
                packet = os.read(self._taps[way], 65536)
            except BlockingIOError:
                return
            now = time.monotonic()
            begins = max(now, self._free_at[way])
            is_dropped = now < self._cut_until or begins - now > QUEUE_S
            if is_dropped or (line.loss and self._draw.random() < line.loss):
                continue
            self._free_at[way] = begins + len(packet) / line.bytes_per_s
            arrives = self._free_at[way] + line.round_trip_ms / 2e3 + self._draw.random() * line.jitter_ms / 1e3
            self._last_arrival[way] = max(arrives, self._last_arrival[way])
            self._under_way[way].append((self._last_arrival[way], packet))

    def _deliver(self, way: int, now: float) -> None:
        packets = self._under_way[way]
        while packets and packets[0][0] <= now:
            try:
                os.write(self._taps[1 - way], packets.popleft()[1])
            except OSError:
                continue  # the device is going down


class NamespacesWan(LineProcess):
    """Two namespaces and the line between them. A context manager; afterwards all is gone."""

    _numbers = count()

    def __init__(self, *, mtu: int = LARGE_MTU) -> None:
        tag = f"hw{os.getpid()}-{next(self._numbers)}"
        self.namespaces = (f"{tag}-a", f"{tag}-b")
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "add", namespace], check=True, timeout=TIMEOUT_S)
        super().__init__(__file__, *self.namespaces, str(mtu))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def set_congestion(self, name: str) -> None:
        """TCP's congestion control for connections that are made from now on: that of the route."""
        for namespace in self.namespaces:
            route = ["ip", "-n", namespace, "route", "replace", NETWORK, "dev", DEVICE, "congctl", name]
            subprocess.run(route, check=True, timeout=TIMEOUT_S)


def in_namespace(namespace: str, make: Callable[[], socket.socket]) -> socket.socket:
    """A socket that lives in a namespace, whoever uses it."""

    def inside() -> socket.socket:
        enter(namespace)
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(inside).result(timeout=20)


def connected(wan: NamespacesWan) -> tuple[socket.socket, socket.socket]:
    """A connection from one namespace to the other."""
    upper, lower = wan.namespaces
    sink = in_namespace(lower, lambda: socket.create_server((ADDRESSES[1], 0)))
    port = sink.getsockname()[1]
    near = in_namespace(upper, lambda: socket.create_connection((ADDRESSES[1], port)))
    far, _ = sink.accept()
    sink.close()
    return near, far


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _Carrier(sys.argv[1:3], int(sys.argv[3])).run()
    finally:  # whoever asked for them may have been killed
        for name in sys.argv[1:3]:
            subprocess.run(["ip", "netns", "delete", name], check=False, timeout=TIMEOUT_S)
