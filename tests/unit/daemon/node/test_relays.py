"""A node that can only dial out stands by at the nearest relays, and says so if it stands by at none."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.connection import EtcdAccess
from headway.daemon.cluster.records import NodeRecord, WorkerPort
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.node import relays as standing_by
from headway.daemon.node.relays import (
    StandingBy,
    address_behind,
    candidates,
    measured,
    read_relays,
)
from headway.proto import control_pb2
from headway.stages.errors import UnavailableError
from tests.rigs.agent_views import node_record


def node(name: str, address: str, worker: str = "") -> NodeRecord:
    workers = (WorkerPort(device_index=0, address=worker, incarnation="w"),) if worker else ()
    return node_record(name, address=address, workers=workers)


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


WRONG = "10.0.0.1:7070"
WHY = "its certificate does not carry the expected name 10.0.0.1"


class Relays:
    """What a client finds at the relays' addresses."""

    def __init__(self) -> None:
        self.is_right = False

    async def stand_by(self, endpoint: NodeEndpoint, node: str) -> AsyncGenerator[control_pb2.StandByReply]:
        """Serve a node as long as the relay is one."""
        if not self.is_right:
            raise UnavailableError(str(endpoint), WHY)
        yield control_pb2.StandByReply(token=node)
        while self.is_right:
            await asyncio.sleep(0.001)


class Posts:
    """A front that dials nobody."""

    def stand_by(self, *_: object) -> None:
        """Take what it is told."""


async def test_a_node_at_an_address_that_is_no_relay_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once with the name that was expected; no more once it stands by; and later only if it is gone for long."""
    monkeypatch.setattr(standing_by, "PAUSE_S", 0.002)
    monkeypatch.setattr(standing_by, "GONE_S", 0.3)
    relays, told = Relays(), list[str]()
    front: Any = Posts()
    client: Any = relays
    cluster = ClusterWatch(EtcdClient(EtcdAccess(endpoints=("127.0.0.1:1",))))
    outside = StandingBy(front, client, cluster, node="b", relays=(WRONG,))
    outside.tell = told.append
    outside._take((WRONG,))
    monkeypatch.setattr(outside, "_look", lambda: asyncio.sleep(0))

    async def until(trouble: str) -> float:
        began, told[:] = asyncio.get_running_loop().time(), []
        async with asyncio.timeout(20):
            while told[-1:] != [trouble]:
                await asyncio.sleep(0.001)
        return asyncio.get_running_loop().time() - began

    working = asyncio.create_task(outside.run())
    trouble = f"stands by at no relay: {WRONG}: {WHY}"
    try:
        await until(trouble)
        relays.is_right = True
        await until("")
        relays.is_right = False
        assert await until(trouble) >= 0.2, "a relay that restarts is no trouble"
    finally:
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working


async def test_a_relay_that_is_gone_is_dialled_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named one may come back; of those that were found others take the places, once all are gone."""
    found, moved = {"c:1": 0.2, "d:1": 0.1}, list[str]()

    async def measured(_: object) -> dict[str, float]:
        return found

    monkeypatch.setattr(standing_by, "measured", measured)
    nobody: Any = None
    cluster = ClusterWatch(EtcdClient(EtcdAccess(endpoints=("127.0.0.1:1",))))
    for named, expected in (
        ((), ["b:1,a:1/n~", "d:1,c:1/n~"]),
        (("a:1", "b:1"), ["b:1,a:1/n~"]),
    ):
        outside = StandingBy(nobody, nobody, cluster, node="n", relays=named)
        outside.moved, moved[:] = moved.append, []
        outside._gone_since = {"a:1": 0.0, "b:1": float("inf")}
        await outside._look()
        outside._gone_since["b:1"] = 0.0
        await outside._look()
        assert moved == expected
