"""The burial of a dead daemon, with a cluster view that changes in the middle of it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from headway.daemon.base.activities import Activities
from headway.daemon.cluster.client import KeyValue
from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.node.peer_liveness import PeerLiveness, is_refused
from headway.daemon.node.registration import leases_of
from headway.proto import control_pb2
from headway.stages.errors import UnavailableError
from tests.rigs.agent_views import node_record
from tests.rigs.cluster_member import member
from tests.rigs.running import running

LEASES = {Keys.node("node-1"): 17, Keys.LEADER: 18}


def _unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


class _Watch:
    """A view of a leader and a follower; without the leader as soon as the first lease has ended."""

    def __init__(self) -> None:
        self.version = 0
        leader = LeaderRecord(node="node-1", incarnation="node-1-a")
        nodes = {
            "node-1": node_record("node-1", "node-1-a", address=_unused_address()),
            "node-2": node_record("node-2", "node-2-a", address=""),
        }
        self.view = ClusterView(nodes=nodes, leader=leader)
        self._signal = asyncio.Event()

    def lose_the_leader(self) -> None:
        self.view = ClusterView(nodes={"node-2": self.view.nodes["node-2"]})
        self.version += 1
        self._signal.set()

    async def changed(self, seen: int) -> None:
        while self.version == seen:
            self._signal.clear()
            await self._signal.wait()


class _Etcd:
    """Two leases, whose end takes a moment and is seen at once."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch
        self.revoked: list[int] = []
        self.all_revoked = asyncio.Event()

    async def get(self, key: str) -> KeyValue:
        view = self._watch.view
        record = view.leader if key == Keys.LEADER else view.nodes["node-1"]
        return cast(KeyValue, _Found(encode(record), LEASES[key]))

    async def revoke_lease(self, lease_id: int) -> None:
        self.revoked.append(lease_id)
        self._watch.lose_the_leader()
        await asyncio.sleep(0.02)
        if len(self.revoked) == len(LEASES):
            self.all_revoked.set()


class _Records:
    """etcd that only reads: key to (value, lease)."""

    def __init__(self, **found: tuple[bytes, int]) -> None:
        self._found = found

    async def get(self, key: str) -> KeyValue | None:
        value, lease_id = self._found["leader" if key == Keys.LEADER else "node"]
        return cast(KeyValue, _Found(value, lease_id))


class _Found:
    def __init__(self, value: bytes, lease_id: int) -> None:
        self.value = value
        self.lease_id = lease_id


class _Client:
    """The stream to the leader's daemon: one word, and then its end."""

    async def accompany(self, address: str, _: str) -> AsyncIterator[control_pb2.AccompanyReply]:
        yield control_pb2.AccompanyReply(incarnation="node-1-a")
        raise UnavailableError(address, "the stream was reset")


async def test_revoking_a_dead_peers_leases_survives_its_own_effect() -> None:
    """The first lease that ends removes the dead leader from the view; the second is revoked nevertheless."""
    watch = _Watch()
    etcd = _Etcd(watch)
    peer_liveness = PeerLiveness(member("node-2", etcd=etcd, cluster=watch), cast(Any, _Client()), Activities())
    async with running(peer_liveness.run()):
        async with asyncio.timeout(5):
            await etcd.all_revoked.wait()
    assert sorted(etcd.revoked) == sorted(LEASES.values())


@pytest.mark.parametrize("garbage", [b"\xff", b'{"format":99}', b"[]", b"{}"])
async def test_a_record_that_cannot_be_read_hides_no_other_lease(garbage: bytes) -> None:
    """A dead leader's node record is garbage, or its leader record is: the other one's lease is found."""
    node, leader = (
        encode(node_record("node-1", "node-1-a", address="")),
        encode(LeaderRecord(node="node-1", incarnation="node-1-a")),
    )
    for records, expected in (
        ({"node": (garbage, 17), "leader": (leader, 18)}, [18]),
        ({"node": (node, 17), "leader": (garbage, 18)}, [17]),
        ({"node": (node, 17), "leader": (leader, 18)}, [17, 18]),
        ({"node": (node, 0), "leader": (leader, 18)}, [18]),
    ):
        assert await leases_of(cast(Any, _Records(**records)), "node-1", "node-1-a") == expected
        assert await leases_of(cast(Any, _Records(**records)), "node-1", "node-1-b") == []


@pytest.mark.parametrize(("behind", "is_proof"), [("", True), ("/far~", False)])
async def test_the_refusal_of_a_relay_proves_nothing_of_the_node_behind_it(behind: str, is_proof: bool) -> None:
    assert await is_refused(_unused_address() + behind) is is_proof
