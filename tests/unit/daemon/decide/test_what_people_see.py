"""What `status` and `jobs` say of a job: that it waits, and what it has reached."""

from dataclasses import replace
from typing import Literal

import pytest

from headway.daemon.cluster.cluster_records import UsageRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import ProgressRecord
from headway.daemon.cluster.records import Desired, Phase, PlanRecord, SpecRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.waiting import queue
from headway.daemon.reports import job_report
from headway.daemon.reports.job_report import losses_and_rate, report_job, report_line, reports_in
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec


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
    reports = {report.name: report for report in reports_in(view, view.jobs.values())}
    assert {name: report.queue_position for name, report in reports.items()} == {
        "now": None,
        "urgent": 1,
        "of-bob": 2,
        "next": 3,
    }
    urgent = reports["urgent"]
    assert (urgent.user, urgent.priority, urgent.queue_length) == ("alice", 7, 3)
    assert report_line(urgent, now=0.0) == (
        "urgent: queued · 1 of 3 in the queue · "
        "waits for devices of job now: keeps its devices until it has run for 600 s"
    )


@pytest.mark.parametrize(("loss", "told"), [("cross_entropy", "2.0000 (perplexity 7.389)"), ("m:Own", "2.0000")])
def test_only_a_cross_entropy_has_a_perplexity(loss: str, told: str) -> None:
    """What a loss of one's own means is not known."""
    spec, progress = small_spec("one"), ProgressRecord(generation=1, batch=9, loss=2.0, tokens_per_second=1.0)
    spec = spec.with_values({"train.loss": loss})
    job = JobView(name="one", submission=SpecRecord(spec=spec), progress=replace(progress, evaluations=((8, 2.0),)))
    assert losses_and_rate(report_job(job, {}))[1] == f"held-out loss {told} at batch 8"
    ended = replace(job, progress=replace(progress, evaluations=((8, 3.0),), final_eval_loss=2.0))
    assert losses_and_rate(report_job(ended, {}))[1] == f"held-out loss {told} after the last update"


def test_the_time_that_is_left_is_told_by_batches_with_a_delay_alone() -> None:
    """100 of 200 batches have none, and take twice as long: until 108 are done nobody knows what the others take."""
    spec = small_spec("one", batches=200).with_values({"train.sync_batches": 100})
    view = ClusterView()
    view.apply(Keys.of("one", "spec"), encode(SpecRecord(spec=spec)), mod_revision=1, create_revision=1)
    left: dict[int, float | None] = {}
    for batch in range(80, 120, 4):
        rate = spec.train.tokens_per_batch * (0.5 if batch < 100 else 1.0)
        plan = PlanRecord(generation=1, timeline=1)
        progress = ProgressRecord(generation=1, batch=batch, loss=2.0, tokens_per_second=rate)
        for leaf, record in (("plan", plan), ("progress", progress)):
            view.apply(Keys.of("one", leaf), encode(record), mod_revision=batch, create_revision=1)
        report = report_job(view.jobs["one"], {})
        left[batch] = report.seconds_left
    assert [batch for batch, seconds in left.items() if seconds is None] == [80, 84, 88, 92, 96, 100, 104]
    assert left[108] == pytest.approx(200 - 109)
    assert report.schedule == "2bw"


def test_the_queue_is_sorted_once_for_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 jobs wait, and each has its own place."""
    cluster = SimulatedCluster()
    names = [f"job-{number}" for number in range(300)]
    for name in names:
        cluster.submit(small_spec(name))
    view, looks = cluster.truth(), 0

    def counted(view: ClusterView, *, now: float) -> list[JobView]:
        nonlocal looks
        looks += 1
        return queue(view, now=now)

    monkeypatch.setattr(job_report, "queue", counted)
    reports = job_report.reports_in(view, view.jobs_in_order())
    assert [(report.name, report.queue_position) for report in reports] == list(zip(names, range(1, 301), strict=True))
    assert {report.queue_length for report in reports} == {300}
    assert looks == 1


@pytest.mark.parametrize("exactness", ["preferred", "required"])
def test_a_job_resumed_by_another_torch_says_so_or_waits(exactness: Literal["preferred", "required"]) -> None:
    """Its checkpoint was written by torch 2.12; the cluster has 2.13 now. `exact: no` has both; required waits for one.

    Nothing of the first release's classes is on any node.
    """
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.say("a", arithmetic_class="torch 2.12")
    spec = small_spec("old", batches=10**6)
    cluster.submit(replace(spec, train=replace(spec.train, exactness=exactness)))
    cluster.calm(until=lambda: cluster.truth().jobs["old"].checkpoint is not None, max_rounds=2000)
    cluster.want("old", Desired.PAUSED)
    cluster.calm(until=lambda: cluster.phase("old").phase is Phase.PAUSED, max_rounds=2000)
    cluster.nodes["a"].held.clear()
    cluster.say("a", arithmetic_class="torch 2.13")
    cluster.want("old", Desired.RUNNING)
    cluster.calm(max_rounds=30)
    (report,) = reports_in(view := cluster.truth(), view.jobs.values())
    if exactness == "required":
        why = 'exactness = "required" and the job began on torch 2.12, which no free device has'
        assert (report.phase, report.reason) == (Phase.QUEUED, why)
        return
    assert (report.phase, report.exact) == (Phase.RUNNING, False)
    assert report.exact_reason == "the job has run on several arithmetic classes: torch 2.12, torch 2.13"
