"""Five nodes at five places by the deployment page, one port each: a job's bits are those of the plain loop."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machines.observer import TIMEOUT_S, assert_same_bits, nobody_is_blamed
from tests.machines.sites import ME, NODES, PORT, Sites

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
Plain = Callable[[Sites, Path], dict[str, bytes]]
CLOSED = (22, 2379, 2380, 7069, 7071, 7100, 9090, 33333, 50000)
DIAL = """\
import select, socket, sys, time
poll, dialled = select.poll(), {}
for text in sys.argv[2:]:
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex((sys.argv[1], int(text)))
    dialled[one.fileno()] = one, text
    poll.register(one, select.POLLOUT)
time.sleep(1.5)
print(*(dialled[number][1] for number, _ in poll.poll(0)))
"""
LISTENING = "0A"
"""In /proc/net/tcp."""


def test_a_job_over_five_places(sites: Sites, plain: Plain) -> None:
    """One is plain, one has a mapped port, three can only dial out. The process that serves the port through which two
    of them are reached is killed in the middle: links resume, nothing is computed again.
    """
    told = sites.look()["nodes"]
    assert told["node-b"]["address"] == "203.0.113.7:41022"
    assert told["node-e"]["address"].endswith("/node-e~")
    job = sites.submit("places", batches=40, min_nodes=5)
    told = sites.until_batch("places", 5)["jobs"]["places"]
    assert sorted(told["plan"]) == [*NODES]
    os.kill(front_of(sites, "node-a"), signal.SIGKILL)
    model = sites.finished("places")
    assert sites.look()["jobs"]["places"]["generation"] == told["generation"], "batches were computed again"
    assert_same_bits(model, plain(sites, job))
    nobody_is_blamed(sites)
    for name in NODES:
        assert listeners(sites, name) == {PORT}, name


def test_everything_but_the_one_port_is_dropped(sites: Sites) -> None:
    """From another machine: no answer at other ports, nor at routers that map nothing, nor at etcd beside its own."""
    assert open_ports(sites, "10.0.0.7", PORT, *CLOSED) == {PORT}
    assert open_ports(sites, "203.0.113.7", 41022, PORT, *CLOSED) == {41022}
    assert open_ports(sites, "203.0.113.20", PORT, 41022, *CLOSED) == set()
    assert open_ports(sites, "10.0.0.5", PORT, *CLOSED) == {2379, 2380}


def open_ports(sites: Sites, address: str, *ports: int) -> set[int]:
    """Return the ports that answer the person's machine, be it with a refusal."""
    command = sites.inside(ME, "python3", "-c", DIAL, address, *map(str, ports))
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return {int(text) for text in done.stdout.split()}


def listeners(sites: Sites, name: str) -> set[int]:
    """Return the ports at which a machine listens for others."""
    command = sites.inside(name, "cat", "/proc/net/tcp", "/proc/net/tcp6")
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found = set()
    for line in done.stdout.splitlines():
        words = line.split()
        if words[3] == LISTENING and "0100007F:" not in words[1]:
            found.add(int(words[1].rpartition(":")[2], 16))
    return found


def front_of(sites: Sites, name: str) -> int:
    """Return the process that serves a node's port."""
    number = sites.process(name).pid
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            words = (entry / "cmdline").read_bytes()
            if b"headway.daemon.net.port" in words and f"PPid:\t{number}\n" in (entry / "status").read_text():
                return int(entry.name)
    raise AssertionError("nobody serves the port")
