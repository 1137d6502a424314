"""A node that can only dial out stands by at the relays with the best measured paths."""

import socket
from dataclasses import replace

import pytest

from headway.daemon.errors import ConfigError
from headway.daemon.node.relays import (
    address_behind,
    best,
    candidates,
    measured,
    rates,
    read_relays,
    without_gone,
)
from headway.daemon.records.measurements import LinkProbe, ProbeRecord
from headway.daemon.records.records import NodeRecord, WorkerPort
from headway.daemon.view.cluster_view import ClusterView


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


def test_the_time_of_a_frame_decides() -> None:
    """A near relay with a slow line is worse than a far one with a fast one; where no rate is known, the trip is."""
    trips_s = {"near": 0.01, "far": 0.1, "unknown": 0.05, "farthest": 0.2}
    assert best(trips_s, {}) == ("near", "unknown", "far")
    assert best(trips_s, {"near": 1e6, "far": 1e9, "farthest": 1e9}) == ("unknown", "far", "farthest")


def test_another_relay_takes_the_place_of_one_that_is_gone() -> None:
    """Others dial the first one, so one that is gone is not it, even if nothing takes its place."""
    assert without_gone(["a", "b"], ["a"], ["c", "d", "e"], are_named=False) == ("b", "c", "d")
    assert without_gone(["a", "b"], ["a"], [], are_named=False) == ("b",)
    assert without_gone(["a", "b"], ["a", "b"], [], are_named=False) == ("a", "b")


def test_a_named_relay_that_is_gone_is_dialled_last() -> None:
    """When it is there again, it keeps its new place: nothing moves back and forth."""
    assert without_gone(["a", "b"], ["a"], [], are_named=True) == ("b", "a")
    assert without_gone(["b", "a"], [], [], are_named=True) == ("b", "a")
    assert without_gone(["a", "b", "c"], ["a"], ["d"], are_named=True) == ("b", "c", "d")
    assert without_gone(["a", "b"], ["a", "b"], [], are_named=True) == ("a", "b")


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


def test_a_rate_is_the_median_of_what_others_have_measured() -> None:
    view = ClusterView()
    view.nodes["open"] = node("open", "open:1")
    for name, rate in (("a", 1e6), ("b", 3e6), ("c", 9e6)):
        probe = LinkProbe(round_trip_s=0.01, bytes_per_s=rate)
        view.probes[name] = ProbeRecord(
            incarnation=name, peers={"open": probe, "gone": replace(probe, bytes_per_s=1.0)}
        )
    assert rates(view) == {"open:1": 3e6}


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
