"""Which jobs have metrics of their own."""

from dataclasses import replace

from headway.daemon.cluster.records import Phase, PhaseRecord
from headway.daemon.decide.job_view import JobView
from headway.daemon.node.metrics import MOST_JOBS, told_of


def test_jobs_that_run_and_the_newest_of_the_others_have_metrics() -> None:
    """Ten times as many jobs as fit, the oldest still running: their number as labels stays what it is."""
    jobs = [JobView(name=f"job-{number}", phase=PhaseRecord(phase=Phase.FINISHED)) for number in range(10 * MOST_JOBS)]
    jobs[0] = replace(jobs[0], phase=PhaseRecord(phase=Phase.RUNNING))
    told = told_of(jobs)
    assert [told[0].name, told[-1].name, len(told)] == ["job-0", f"job-{10 * MOST_JOBS - 1}", MOST_JOBS]
