"""A job whose records leave etcd though nobody removed it is noticed by the nodes that worked for it."""

from headway.daemon.cluster.cluster_records import RetiredRecord
from headway.daemon.cluster.records import CheckpointRecord, Phase
from headway.daemon.decide.vanished_jobs import NUM_LOOKS, VanishedJobs, vanished_text
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec


def test_a_deleted_job_is_missed_and_a_removed_or_returned_one_is_not() -> None:
    """Its nodes say so after some looks, with its newest checkpoint, until it is back. Other nodes say nothing."""
    cluster = SimulatedCluster()
    cluster.add_node("a", num_devices=2)
    for name in ("deleted", "removed"):  # the second waits for devices of the first: the leader looks after it
        cluster.submit(small_spec(name, batches=400))
    cluster.calm(until=lambda: cluster.phase("deleted").phase is Phase.RUNNING)
    view = cluster.facts()
    worker, stranger = VanishedJobs("a"), VanishedJobs("b")
    for jobs in (worker, stranger):
        assert jobs.look(view) == {}
    deleted = view.jobs.pop("deleted")
    view.jobs.pop("removed")
    view.retired["removed"] = RetiredRecord(phase=Phase.PAUSED, generation=1, since=0.0, retired_at=0.0)
    for _ in range(NUM_LOOKS - 1):
        assert worker.look(view) == {}, "a listing may be under way"
        assert stranger.look(view) == {}
    assert worker.look(view).keys() == {"deleted"}
    assert stranger.look(view) == {}
    assert "submit it again" in vanished_text(worker.look(view)["deleted"], "")
    view.jobs["deleted"] = deleted
    assert worker.look(view) == {}


def test_the_checkpoint_of_the_moment_before_an_outage_is_named() -> None:
    """The first checkpoint comes just before etcd goes away, which comes back from a copy without the job."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.submit(small_spec("lost", batches=400))
    cluster.calm(until=lambda: cluster.phase("lost").phase is Phase.RUNNING)
    view, jobs = cluster.facts(), VanishedJobs("a")
    jobs.look(view)
    steady_since, view.steady_since = view.steady_since, None
    view.jobs["lost"].checkpoint = CheckpointRecord(timeline=1, boundary=40, url="kept/lost")
    jobs.look(view)
    view.steady_since = steady_since
    del view.jobs["lost"]
    found = [jobs.look(view) for _ in range(NUM_LOOKS)][-1]
    assert "`headway submit --from kept/lost` brings it back at batch 40" in vanished_text(found["lost"], "kept/lost")
