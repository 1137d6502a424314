"""What `status` and `jobs` say of jobs that wait."""

from headway.daemon.client.job_report import report_in, report_line
from headway.daemon.record_format import encode
from headway.daemon.record_keys import Keys
from headway.daemon.records import Phase, UsageRecord
from tests.fakes.simulated_cluster import SimulatedCluster, small_spec


def test_place_in_the_queue_is_by_priority_use_and_time() -> None:
    """Alice runs; her next job, bob's, and an urgent one wait: urgent, bob (who has used less), alice."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.submit(small_spec("now", batches=10**6), user="alice@host")
    cluster.calm(until=lambda: cluster.phase("now").phase is Phase.RUNNING)
    cluster.submit(small_spec("next"), user="alice@host")
    cluster.submit(small_spec("of-bob"), user="bob@host")
    cluster.submit(small_spec("urgent").with_priority(7), user="alice@elsewhere")
    cluster.store.transact({}, {Keys.USAGE: encode(UsageRecord(seconds={"alice": 500.0}))})
    cluster.calm(max_rounds=4)
    view = cluster.truth()
    reports = {name: report_in(view, job) for name, job in view.jobs.items()}
    assert {name: report.queue_position for name, report in reports.items()} == {
        "now": None,
        "urgent": 1,
        "of-bob": 2,
        "next": 3,
    }
    urgent = reports["urgent"]
    assert (urgent.user, urgent.priority, urgent.queue_length) == ("alice", 7, 3)
    assert report_line(urgent, now=0.0) == (
        "urgent: queued · 1 of 3 in the queue · waits for devices of job now: is left alone until it has run for 600 s"
    )
