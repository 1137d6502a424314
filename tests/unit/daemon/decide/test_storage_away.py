"""A file system that is away when a job starts is nobody's failure: it is waited for, and said."""

from headway.daemon.cluster.records import Desired, Phase
from headway.daemon.decide.deadlines import START_DEADLINE_S
from headway.daemon.jobs.job import PLAIN_S, FaultSpec
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

AWAY_S = 3 * (PLAIN_S + START_DEADLINE_S)
"""Many times as long as a worker may take to be ready, and to run."""
STEP_S = 4.0


def cluster_of(*names: str) -> SimulatedCluster:
    """A node with two failures more would be left out."""
    cluster = SimulatedCluster()
    cluster.quarantine_after = 2
    for name in names:
        cluster.add_node(name)
    return cluster


def paused(cluster: SimulatedCluster) -> None:
    """A job that has trained and lies in its checkpoint."""
    cluster.submit(small_spec("first", batches=40, fault=FaultSpec(snapshot_every=4, checkpoint_every=0)))
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RUNNING)
    cluster.calm(until=lambda: (cluster.facts().jobs["first"].progress or False) is not False)
    cluster.want("first", Desired.PAUSED)
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.PAUSED)


def pass_time(cluster: SimulatedCluster, seconds: float) -> None:
    until = cluster.now + seconds
    cluster.calm(until=lambda: cluster.now >= until, step_s=STEP_S, max_rounds=int(seconds / STEP_S) + 2)


def assert_nobody_is_charged(cluster: SimulatedCluster) -> None:
    facts = cluster.facts()
    assert facts.failures == {}
    assert facts.jobs["first"].phase.failures.num_deaths == 0
    assert facts.jobs["first"].phase.phase not in (Phase.FAILED, Phase.FINISHED)


def without_its_checkpoint() -> SimulatedCluster:
    """A job goes on from its checkpoint, which no node can read."""
    cluster = cluster_of("a", "b")
    paused(cluster)
    for node in cluster.nodes.values():
        node.held.clear()
        node.lacks = {"checkpoint"}
    cluster.want("first", Desired.RUNNING)
    return cluster


def assert_it_ends_when_storage_answers(cluster: SimulatedCluster) -> None:
    for node in cluster.nodes.values():
        node.lacks.clear()
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.FINISHED)
    assert cluster.facts().failures == {}


def told_of(cluster: SimulatedCluster, path: str) -> bool:
    """Return whether an event of the job names the node's reason."""
    events = cluster.facts().jobs["first"].events.values()
    return any(
        f"cannot read the job's starting state or data: {path}: its file system" in event.text.lower()
        for event in events
    )


def test_an_outage_of_the_data_may_outlast_a_start() -> None:
    """Plans are dropped and made again with the reason until a node can read the data. Nobody is charged."""
    cluster = cluster_of("a", "b")
    for node in cluster.nodes.values():
        node.lacks = {"data"}
    cluster.submit(small_spec("first", batches=8))
    pass_time(cluster, AWAY_S)
    assert_nobody_is_charged(cluster)
    assert told_of(cluster, "/mnt/data")
    assert_it_ends_when_storage_answers(cluster)


def test_an_outage_of_the_checkpoint_may_outlast_a_start() -> None:
    """No node can read it: the job retries, says why, and charges nobody."""
    cluster = without_its_checkpoint()
    pass_time(cluster, AWAY_S)
    assert_nobody_is_charged(cluster)
    assert told_of(cluster, "/mnt/checkpoint")
    assert_it_ends_when_storage_answers(cluster)


def test_storage_that_returns_late_gives_workers_their_time_to_load() -> None:
    """It is back just before the deadline of the start."""
    cluster = without_its_checkpoint()
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RUNNING)
    began, generation = cluster.now, cluster.phase("first").generation
    pass_time(cluster, START_DEADLINE_S - STEP_S)
    for node in cluster.nodes.values():
        node.lacks.clear()
        node.workers[0].hangs = True
        cluster.deliver(node)
        for ailment in list(node.record.ailments):
            cluster._reads(node, "checkpoint", ailment)
    pass_time(cluster, START_DEADLINE_S / 2)
    assert cluster.now > began + START_DEADLINE_S
    assert (cluster.phase("first").phase, cluster.phase("first").generation) == (Phase.RUNNING, generation)


def test_a_worker_that_hangs_while_storage_answers_is_charged() -> None:
    """Its node reports no outage, so the worker counts as late."""
    cluster = cluster_of("a", "b")
    cluster.submit(small_spec("first", batches=8))
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.PREPARING)
    for node in cluster.nodes.values():
        node.workers[0].hangs = True
    pass_time(cluster, PLAIN_S + 4 * STEP_S)
    assert cluster.facts().failures
