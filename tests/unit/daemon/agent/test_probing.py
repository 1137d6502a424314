"""A node measures some peers, and records what is news."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from headway.daemon.agent import probing
from headway.daemon.agent.probing import (
    EVERY_S,
    MAX_PEERS,
    RETRY_S,
    PeerWay,
    Probing,
    has_moved,
    peers_by_way,
    peers_of,
)
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import LinkProbe, ProbeRecord
from headway.daemon.cluster.records import NodeRecord, PlanRecord, WorkerPart
from headway.daemon.decide.cluster_view import ClusterView
from tests.rigs.agent_views import node_record
from tests.rigs.cluster_member import member


def node(name: str, host: str) -> NodeRecord:
    return node_record(name, address=f"{host}:1", host=host)


def cluster(num_nodes: int) -> ClusterView:
    view = ClusterView()
    view.nodes = {f"n{index}": node(f"n{index}", f"host-{index}") for index in range(num_nodes)}
    return view


def test_nobody_measures_itself_or_its_own_machine() -> None:
    view = cluster(3)
    view.nodes["twin"] = node("twin", "host-0")
    assert {peer.name for peer in peers_of(view, "n0")} == {"n1", "n2"}
    assert peers_of(view, "stranger") == []


def test_of_many_a_node_measures_those_of_its_plans_and_some() -> None:
    """Of a hundred nodes sixteen, among them all of the plan; which others is by lot, the same every time."""
    view = cluster(100)
    before = [peer.name for peer in peers_of(view, "n0")]
    assert len(before) == MAX_PEERS
    assert [peer.name for peer in peers_of(view, "n0")] == before
    wanted = [name for name in view.nodes if name not in before][1:4]
    stages = tuple(
        WorkerPart(node=name, node_incarnation="", device_index=0, layers=(name,), depth=1) for name in ["n0", *wanted]
    )
    plan = PlanRecord(generation=1, timeline=1, workers=stages)
    view.apply(Keys.of("demo", "plan"), encode(plan), mod_revision=1, create_revision=1)
    assert set(wanted) <= {peer.name for peer in peers_of(view, "n0")}


def test_every_link_of_a_long_pipeline_is_measured() -> None:
    """A plan of 64 stages has 63 links, and each node measures sixteen of its fellows: both ends measure each link."""
    view = cluster(100)
    names = [f"n{index}" for index in range(64)]
    stages = tuple(
        WorkerPart(node=name, node_incarnation="", device_index=0, layers=(name,), depth=1) for name in names
    )
    plan = PlanRecord(generation=1, timeline=1, workers=stages)
    view.apply(Keys.of("demo", "plan"), encode(plan), mod_revision=1, create_revision=1)
    measured = {name: {peer.name for peer in peers_of(view, name)} for name in names}
    links = list(pairwise(names))
    assert [link for link in links if link[1] not in measured[link[0]]] == []
    assert [link for link in links if link[0] not in measured[link[1]]] == []


def test_a_peer_with_another_relay_is_another_way() -> None:
    """So it is due at once, as one that was never measured; a node that is its peer's relay dials it directly."""
    view = cluster(3)
    for address, via in (("host-1:1,host-2:1/n1~", "host-1:1"), ("host-2:1,host-1:1/n1~", "host-2:1")):
        view.nodes["n1"] = replace(view.nodes["n1"], address=address)
        assert set(peers_by_way(view, "n0")) == {PeerWay("n1", "n1-1", via), PeerWay("n2", "n2-1", "")}
    assert PeerWay("n1", "n1-1", "") in peers_by_way(view, "n2")


@pytest.mark.parametrize(("dialled", "is_kept"), [("host-2:1", True), ("host-1:1", False)])
async def test_a_measurement_through_another_relay_than_the_first_is_not_kept(
    dialled: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first relay does not answer, and so the calls went through the second one: links are not dialled so."""
    view = cluster(3)
    view.nodes["n1"] = replace(view.nodes["n1"], address="host-2:1,host-1:1/n1~")
    probe = LinkProbe(round_trip_s=0.01, bytes_per_s=1e8)

    async def measured(*_: object) -> LinkProbe:
        return probe

    async def close() -> None:
        pass

    monkeypatch.setattr(probing, "measure", measured)
    monkeypatch.setattr(probing, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    client: Any = SimpleNamespace(port_to=lambda _: dialled, close=close)
    around: Any = SimpleNamespace(anew=lambda: client)
    found = Probing(member("n0", view=view), around)
    way = PeerWay("n1", "n1-1", "host-2:1")
    await found._probe(way, view.nodes["n1"])
    assert found._found == ({way: replace(probe, via="host-2:1")} if is_kept else {})
    assert found._due_at[way] >= 1000.0 + 0.8 * EVERY_S if is_kept else found._due_at[way] == 1000.0 + RETRY_S


def test_a_measurement_of_another_way_is_news() -> None:
    """Plans do not use the old one."""
    probe = LinkProbe(round_trip_s=0.01, bytes_per_s=1e8, via="host-1:1")
    assert has_moved({"b": probe}, {"b": replace(probe, via="host-2:1")})
    assert not has_moved({"b": probe}, {"b": probe})


def test_noise_is_not_told() -> None:
    probe = LinkProbe(round_trip_s=0.01, bytes_per_s=1e8)
    assert has_moved({}, {"b": probe})
    assert not has_moved({"b": probe}, {}), "everybody sees who has gone"
    assert not has_moved({"b": probe}, {"b": LinkProbe(round_trip_s=0.012, bytes_per_s=0.9e8)})
    assert has_moved({"b": probe}, {"b": LinkProbe(round_trip_s=0.02, bytes_per_s=1e8)})
    assert has_moved({"b": probe}, {"b": LinkProbe(round_trip_s=0.01, bytes_per_s=5e7)})


def test_loss_is_told_when_it_comes_goes_or_more_than_doubles() -> None:
    """A dozen lost packets are counted, or a few more: that is no news."""

    def probe(loss: float) -> dict[str, LinkProbe]:
        return {"b": LinkProbe(round_trip_s=0.01, bytes_per_s=1e8, loss=loss)}

    assert has_moved(probe(0.0), probe(3e-4))
    assert has_moved(probe(1e-3), probe(0.0))
    assert has_moved(probe(1e-3), probe(3e-3))
    assert not has_moved(probe(1e-3), probe(2e-3))


def test_a_record_of_before_loss_was_counted_is_one_without() -> None:
    record = decode(b'{"incarnation": "a-1", "peers": {"b": {"round_trip_s": 0.01, "bytes_per_s": 1e8}}}', ProbeRecord)
    assert record.peers == {"b": LinkProbe(round_trip_s=0.01, bytes_per_s=1e8, loss=0.0)}


def test_the_view_has_the_probes_until_their_lease_ends() -> None:
    view = ClusterView()
    record = ProbeRecord(incarnation="a-1", peers={"b": LinkProbe(round_trip_s=0.01, bytes_per_s=1e8)})
    view.apply(Keys.probes("a"), encode(record), mod_revision=1, create_revision=1)
    assert view.probes == {"a": record}
    view.apply(Keys.probes("a"), None, mod_revision=2, create_revision=0)
    assert view.probes == {}
