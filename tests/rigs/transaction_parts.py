"""Parts that tests of transaction parts share."""

from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Phase, PhaseRecord, PlanRecord, WorkerPart
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec
from tests.rigs.simulated_etcd import Store


def running_on(num_nodes: int, *survivors: str, store: Store | None = None) -> SimulatedCluster:
    """A job in force on so many nodes, one layer each, and nodes beside them that may lead."""
    cluster = SimulatedCluster()
    cluster.store = store or cluster.store
    for name in survivors:
        cluster.add_node(name)
    spec = small_spec("first", num_blocks=num_nodes - 2, batches=20)
    cluster.submit(spec)
    nodes = [cluster.add_node(f"node-{number:03d}") for number in range(num_nodes)]
    stages = tuple(
        WorkerPart(node=node.name, node_incarnation=node.lease, device_index=0, layers=(layer,), depth=1)
        for node, layer in zip(nodes, spec.layers, strict=True)
    )
    plan = PlanRecord(generation=1, timeline=1, workers=stages)
    phase = PhaseRecord(phase=Phase.RUNNING, generation=1, num_events=0)
    cluster.store.transact({}, {Keys.of("first", "plan"): encode(plan), Keys.of("first", "phase"): encode(phase)})
    cluster.generations["first"] = 1
    return cluster
