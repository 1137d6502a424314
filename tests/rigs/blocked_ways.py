"""Parts that tests of blocked ways share."""

from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import Port, ReachFact, ReachRecord
from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.decide.cluster_view import ClusterView

REFUSED = "connection refused"


def node(name: str, incarnation: str = "") -> NodeRecord:
    return NodeRecord(
        name=name,
        incarnation=incarnation or f"{name}-1",
        address=f"{name}:7001",
        host=name,
        site="here",
        devices=(Device(kind="cpu"),),
        memory_bytes=0,
        arithmetic_class="one",
    )


def fact(to: str, reason: str = REFUSED, *, incarnation: str = "") -> ReachFact:
    return ReachFact(
        to=to, to_incarnation=incarnation or f"{to}-1", port=Port.WORKER, address=f"{to}:7100", reason=reason
    )


class Scene:
    def __init__(self, *names: str) -> None:
        self.view = ClusterView()
        self.revision = 0
        for name in names:
            self.put(Keys.node(name), node(name))

    def put(self, key: str, record: object) -> None:
        self.revision += 1
        raw = encode(record) if record is not None else None
        self.view.apply(key, raw, mod_revision=self.revision, create_revision=self.revision)

    def found(self, name: str, *facts: ReachFact, incarnation: str = "") -> None:
        self.put(Keys.reach(name), ReachRecord(incarnation=incarnation or f"{name}-1", facts=facts))
