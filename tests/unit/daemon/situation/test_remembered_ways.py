"""What follows from all nodes and ways is the same whether it is remembered or found anew."""

import random
from copy import copy
from dataclasses import replace

from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import LinkProbe, ProbeRecord
from headway.daemon.records.records import Device
from headway.daemon.situation.outlook import all_ways, measured_ways, on_probation, planned_nodes, slowest_way
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.derived import Derived
from tests.unit.daemon.costs.test_blocked_ways import node as registered

NODES = [f"n{number}" for number in range(8)]


def test_ways_and_speeds_follow_every_node() -> None:
    """Nodes come in another incarnation or the same one, go, and measure their devices and ways to any others."""
    chance, view, num_ways = random.Random(1), ClusterView(), 0
    view.set_in_sight(True, now=0.0)
    for revision in range(1, 600):
        name = chance.choice(NODES)
        record: object | None = None
        match chance.randrange(4):
            case 0:
                key = Keys.node(name)
            case 1 | 2:
                speed = chance.choice((1.0, 1.0, 2.0))
                device = Device(kind="cpu", index=0, model=chance.choice(("", "one", "two")), speed=speed)
                life = f"{name}-{chance.randrange(2)}"
                key, record = Keys.node(name), replace(registered(name), incarnation=life, devices=(device,))
            case _:
                peers = chance.sample(NODES, 3)
                ways = {peer: LinkProbe(round_trip_s=0.01, bytes_per_s=chance.choice((1e6, 1e8))) for peer in peers}
                key, record = Keys.probes(name), ProbeRecord(incarnation=f"{name}-0", peers=ways)
        value = encode(record) if record is not None else None
        view.apply(key, value, mod_revision=revision, create_revision=revision, now=float(revision))
        bare, now = copy(view), float(revision)
        bare.derived = Derived()
        assert all_ways(view) == all_ways(bare)
        assert slowest_way(view) == slowest_way(bare)
        assert measured_ways(view, NODES[:4]) == measured_ways(bare, NODES[:4])
        assert [*planned_nodes(view).items()] == [*planned_nodes(bare).items()], "in one order too"
        assert on_probation(None, view, now=now) == on_probation(None, bare, now=now)
        num_ways += len(all_ways(view))
    assert num_ways > 600, "there are ways to compare"
