"""Parts that tests of scenarios share."""

from typing import Any

from headway.daemon.cluster.format import decode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import (
    EventRecord,
    Phase,
    PlanRecord,
)
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec


def cluster_of(*names: str, **spec: Any) -> SimulatedCluster:
    """Nodes that are there, and a job `first` of 5 layers."""
    cluster = SimulatedCluster()
    for name in names:
        cluster.add_node(name)
    cluster.submit(small_spec("first", **({"batches": 200} | spec)))
    return cluster


def run_until(cluster: SimulatedCluster, phase: Phase, job: str = "first", *, max_rounds: int = 400) -> None:
    cluster.calm(until=lambda: cluster.phase(job).phase is phase, max_rounds=max_rounds)


def plan(cluster: SimulatedCluster, job: str = "first") -> PlanRecord:
    return decode(cluster.store.values[Keys.of(job, "plan")], PlanRecord)


def events(cluster: SimulatedCluster, job: str = "first") -> list[str]:
    prefix = Keys.job(job) + "events/"
    found = sorted(key for key in cluster.store.values if key.startswith(prefix))
    return [decode(cluster.store.values[key], EventRecord).text for key in found]


def running_at_full_speed(cluster: SimulatedCluster) -> None:
    """Run until the plan is in force and all its workers report that they run."""
    run_until(cluster, Phase.RUNNING)
    cluster.calm(max_rounds=3)
