"""Parts that tests of nodes that stay out share."""

from headway.daemon.cluster.records import Phase
from tests.rigs.recovery import trained
from tests.rigs.scenarios import run_until
from tests.rigs.simulated_cluster import SimulatedCluster


def recovering(*names: str, **spec: object) -> SimulatedCluster:
    """A job whose worker on `a` has died; its next plan is offered, and nobody has heard of that yet."""
    cluster = trained(*names, batches=6, **spec)
    cluster.fail_worker("a")
    run_until(cluster, Phase.RECOVERING)
    return cluster
