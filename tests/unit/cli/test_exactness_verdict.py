"""Whether a job is exact stays known when its plan is gone: its checkpoint remembers on what it was computed."""

import pytest

from headway.daemon.client.job_report import report_job
from headway.daemon.coordination.cluster_view import ClusterView
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.records import CheckpointRecord, Keys, Phase, PhaseRecord, SpecRecord, encode


@pytest.mark.parametrize(
    ("classes", "is_exact", "reason"),
    [
        ((), None, ""),
        (("one",), True, "all its workers were of one arithmetic class (one)"),
        (("one", "two"), False, "it has run on several arithmetic classes: one; two"),
    ],
)
def test_a_finished_job_tells_whether_it_was_exact(
    classes: tuple[str, ...], is_exact: bool | None, reason: str
) -> None:
    """A finished job has no plan; the verdict comes from the arithmetic classes of its last checkpoint."""
    records: dict[str, object] = {
        Keys.of("j", "spec"): SpecRecord(spec=JobSpec(job=JobSection(name="j"))),
        Keys.of("j", "phase"): PhaseRecord(phase=Phase.FINISHED),
        Keys.of("j", "checkpoint"): CheckpointRecord(timeline=1, boundary=150, url="u", arithmetic_classes=classes),
    }
    view = ClusterView()
    for revision, (key, record) in enumerate(records.items(), start=1):
        view.apply(key, encode(record), mod_revision=revision, create_revision=revision)
    report = report_job(view.jobs["j"], view.nodes)
    assert (report.exact, report.exact_reason) == (is_exact, reason)
