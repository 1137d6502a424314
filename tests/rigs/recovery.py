"""Parts that tests of recovery share."""

from typing import Any

from headway.daemon.cluster.records import PlanRecord
from tests.rigs.scenarios import cluster_of, plan, running_at_full_speed
from tests.rigs.simulated_cluster import SimulatedCluster
from tests.rigs.simulated_node import Worker


def trained(*names: str, batches: int, **spec: Any) -> SimulatedCluster:
    """Nodes that have trained so many batches of the job `first`."""
    cluster = cluster_of(*names, **spec)
    running_at_full_speed(cluster)
    cluster.calm(until=lambda: all(worker.applied >= batches for worker in workers(cluster)))
    cluster.calm(max_rounds=2)
    return cluster


def workers(cluster: SimulatedCluster) -> list[Worker]:
    return [worker for node in cluster.nodes.values() for worker in node.workers if worker.started]


def lose(cluster: SimulatedCluster, name: str) -> None:
    cluster.kill(name)
    cluster.expire(name)


def recovered(cluster: SimulatedCluster) -> PlanRecord:
    """The plan that came into force after the one that is there now."""
    before = plan(cluster).generation
    cluster.calm(until=lambda: plan(cluster).generation > before)
    return plan(cluster)
