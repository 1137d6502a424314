"""A damaged checkpoint is set aside by name, and the job goes on from the one before it."""

from headway.daemon.cluster.records import CheckpointRecord, Desired, Phase
from headway.daemon.jobs.job import FaultSpec
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec


def paused_after_checkpoints() -> tuple[SimulatedCluster, CheckpointRecord]:
    """A job with three checkpoints, of which the newest is damaged; nodes hold nothing of it."""
    cluster = SimulatedCluster()
    for name in ("a", "b"):
        cluster.add_node(name)
    fault = FaultSpec(snapshot_every=4, checkpoint_every=4, checkpoints_kept=3)
    cluster.submit(small_spec("first", batches=400, fault=fault))

    def has_some() -> bool:
        checkpoint = cluster.facts().jobs["first"].checkpoint
        return checkpoint is not None and len(checkpoint.earlier) == 2

    cluster.calm(until=has_some, max_rounds=2000)
    cluster.want("first", Desired.PAUSED)
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.PAUSED)
    for node in cluster.nodes.values():
        node.held.clear()
    checkpoint = cluster.facts().jobs["first"].checkpoint
    assert checkpoint is not None
    cluster.damaged.add(checkpoint.url)
    cluster.want("first", Desired.RUNNING)
    return cluster, checkpoint


def events_of(cluster: SimulatedCluster) -> list[str]:
    return [event.text for _, event in sorted(cluster.facts().jobs["first"].events.items())]


def test_the_job_goes_on_from_the_checkpoint_before() -> None:
    """The event names the file and what the loss costs; no node and no job is charged; the older one leads on."""
    cluster, damaged = paused_after_checkpoints()
    cluster.calm(until=lambda: any("goes back" in text for text in events_of(cluster)[-2:]), max_rounds=2000)
    (told,) = (text for text in events_of(cluster) if "is damaged" in text)
    taken = cluster.facts().jobs["first"].checkpoint
    assert taken is not None
    assert (taken.url, taken.earlier) == (damaged.earlier[0], damaged.earlier[1:])
    again = damaged.boundary - taken.boundary
    assert told == (
        f"The checkpoint before batch {damaged.boundary} is damaged (node a: a file has another checksum). It is set "
        f"aside; the one before batch {taken.boundary} is taken: {again} batches again"
    )
    cluster.want("first", Desired.PAUSED)
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.PAUSED, max_rounds=2000)
    facts = cluster.facts()
    assert (facts.failures, facts.jobs["first"].phase.failures.num_deaths) == ({}, 0)
    newest = facts.jobs["first"].checkpoint
    assert newest is not None
    assert newest.timeline > damaged.timeline, "its batches are computed again in a timeline of their own"


def test_damaged_ones_are_passed_over_until_none_is_left() -> None:
    """Each is set aside in turn; then the job fails at once, and its reason says what to do."""
    cluster, damaged = paused_after_checkpoints()
    cluster.damaged.update(damaged.earlier)
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.FAILED, max_rounds=2000)
    assert sum("It is set aside" in text for text in events_of(cluster)) == 2
    assert "no older one is kept; submit the job anew, or `submit --from`" in cluster.phase("first").reason
