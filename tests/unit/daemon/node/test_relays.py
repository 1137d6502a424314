"""A node that can only dial out stands by at the nearest relays."""

import socket

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.records import NodeRecord, WorkerPort
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.node.relays import (
    address_behind,
    candidates,
    measured,
    read_relays,
)


def node(name: str, address: str, worker: str = "") -> NodeRecord:
    workers = (WorkerPort(device_index=0, address=worker, incarnation="w"),) if worker else ()
    return NodeRecord(
        name=name,
        incarnation=name,
        address=address,
        host=name,
        site="here",
        devices=(),
        memory_bytes=0,
        arithmetic_class="any",
        workers=workers,
    )


def test_nodes_that_others_dial_at_one_port_are_candidates() -> None:
    """Not the node itself, not one behind a relay, and not one whose workers have ports of their own."""
    view = ClusterView()
    nodes = [
        node("own", "own:1"),
        node("open", "open:1", "open:1/w"),
        node("ports", "ports:1", "ports:7100"),
        node("far", "open:1/far~", "open:1/far~w"),
    ]
    view.nodes.update({each.name: each for each in nodes})
    assert candidates(view, "own") == ("open:1",)


async def test_a_relay_that_does_not_answer_is_not_measured() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        relay = f"127.0.0.1:{there.getsockname()[1]}"
        found = await measured([relay, "127.0.0.1:1"])
    assert list(found) == [relay]


async def test_an_address_that_is_none_keeps_no_node_from_a_relay() -> None:
    """Any node may write anything as its own address: the others are measured all the same."""
    with socket.create_server(("127.0.0.1", 0)) as there:
        relay = f"127.0.0.1:{there.getsockname()[1]}"
        found = await measured(["garbage", "h:99999", f"{'a' * 64}:1", "\0:1", "[::1:7", relay])
    assert list(found) == [relay]


def test_a_setting_names_relays_or_leaves_the_choice() -> None:
    assert read_relays("a:1, [::2]:2", "relay") == ("a:1", "[::2]:2")
    assert read_relays("auto", "relay") == ()
    assert address_behind(("a:1", "b:2"), "far") == "a:1,b:2/far~"
    with pytest.raises(ConfigError, match="is not host:port"):
        read_relays("a:1,,b:2", "relay")
