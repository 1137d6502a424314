"""Which interface NCCL takes: what is told, or the first one that is usual."""

import socket

import pytest

from headway.daemon.base.interfaces import interface_addresses, interface_of, nccl_takes

HERE = [
    ("lo", "127.0.0.1"),
    ("docker0", "172.17.0.1"),
    ("eth0", "192.168.1.5"),
    ("eth1", "10.0.0.7"),
    ("ib0", "10.1.0.7"),
    ("lo", "::1"),
    ("eth1", "fd00::7"),
]


def test_this_machine_has_the_loopback() -> None:
    """By C's own list: IPv4 and, where it is on, IPv6."""
    names = socket.if_nameindex()
    found = interface_addresses()
    assert ("lo", "127.0.0.1") in found
    assert {name for name, _ in found} <= {name for _, name in names}


@pytest.mark.parametrize(
    ("told", "taken"),
    [
        ("", "ib0"),
        ("eth", "eth0"),
        ("=eth1", "eth1"),
        ("=eth", ""),
        ("^ib,eth0", "lo"),
        ("^=ib0,eth0,lo", "docker0"),
        ("nothing,eth1", "eth1"),
    ],
)
def test_nccl_takes_what_is_told(told: str, taken: str) -> None:
    """Starts of names, whole names, and all but these."""
    assert nccl_takes(HERE, {"NCCL_SOCKET_IFNAME": told} if told else {}) == taken


def test_nccl_takes_the_first_usual_one() -> None:
    """InfiniBand, then what is neither a container's nor the loopback, then those."""
    without_ib = [each for each in HERE if each[0] != "ib0"]
    assert nccl_takes(without_ib, {}) == "eth0"
    assert nccl_takes([each for each in without_ib if "eth" not in each[0]], {}) == "docker0"
    assert nccl_takes([("lo", "127.0.0.1"), ("lo", "::1")], {}) == "lo"
    assert nccl_takes([("lo", "::1")], {}) == ""


@pytest.mark.parametrize(
    ("host", "name"), [("10.0.0.7", "eth1"), ("fd00::7", "eth1"), ("[fd00::7]", "eth1"), ("127.0.0.1", ""), ("a.b", "")]
)
def test_the_interface_of_an_address(host: str, name: str) -> None:
    """A name, a router's address, and what leads to this machine alone have none."""
    assert interface_of(host, HERE) == name
