"""Which port a process dials for an address, and which next when one led nowhere."""

import pytest

from headway.stages.sockets import shared_port
from headway.stages.sockets.shared_port import (
    dial_within,
    dialled_port,
    listening_port,
    listening_ports,
    shared_address,
)

OUTER, INNER = "203.0.113.7:41022", "127.0.0.1:7070"


@pytest.mark.parametrize("behind", ["", "/worker", "/node-e~", "/node-e~worker"])
def test_a_mapped_port_of_this_machine_is_dialled_inside(monkeypatch: pytest.MonkeyPatch, behind: str) -> None:
    """A router may send nothing back to where it came from; nodes that stand by there are reached inside too."""
    monkeypatch.setattr(shared_port, "_inner", {})
    assert dialled_port(f"{OUTER}{behind}") == OUTER
    dial_within(OUTER, INNER)
    assert dialled_port(f"{OUTER}{behind}") == INNER
    assert listening_port(f"{OUTER}{behind}") == OUTER
    assert dialled_port(f"203.0.113.7:7070{behind}") == "203.0.113.7:7070"
    target, options = shared_port._way(f"{OUTER}{behind}")
    assert (target, *options) == ((f"{behind[1:]}:443", ("grpc.http_proxy", f"http://{INNER}")) if behind else (INNER,))


def test_each_attempt_that_led_nowhere_is_followed_by_the_next_relay() -> None:
    address = shared_address("one:1,[::2]:2,three:3/far~", "0123456789abcdef")
    assert listening_ports(address) == ("one:1", "[::2]:2", "three:3")
    assert [listening_port(address, attempt) for attempt in range(4)] == ["one:1", "[::2]:2", "three:3", "one:1"]


@pytest.mark.parametrize("address", ["one:1", "one:1/worker"])
def test_a_single_port_is_dialled_again(address: str) -> None:
    assert [listening_port(address, attempt) for attempt in range(2)] == ["one:1", "one:1"]


def test_an_address_of_very_many_ports_is_dialled_at_a_few() -> None:
    """Any node may write one, and each silent port takes whoever dials it two seconds."""
    address = f"{','.join(f'silent:{port}' for port in range(1, 300))}/evil~"
    assert listening_ports(address) == tuple(f"silent:{port}" for port in range(1, 9))
    assert listening_port(address, 8) == "silent:1"
