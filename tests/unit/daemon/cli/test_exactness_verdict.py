"""A job's exactness stays known when its plan is gone: the checkpoint has its arithmetic classes."""

import pytest

from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import CheckpointRecord, Phase, PhaseRecord, SpecRecord
from headway.daemon.reports.job_report import JobReport, report_job
from headway.daemon.view.cluster_view import ClusterView


def finished(checkpoint: CheckpointRecord) -> JobReport:
    """Return the report of a job whose plan is gone."""
    records: dict[str, object] = {
        Keys.of("j", "spec"): SpecRecord(spec=JobSpec(job=JobSection(name="j"))),
        Keys.of("j", "phase"): PhaseRecord(phase=Phase.FINISHED),
        Keys.of("j", "checkpoint"): checkpoint,
    }
    view = ClusterView()
    for revision, (key, record) in enumerate(records.items(), start=1):
        view.apply(key, encode(record), mod_revision=revision, create_revision=revision)
    return report_job(view.jobs["j"], view.nodes)


@pytest.mark.parametrize(
    ("classes", "is_exact", "reason"),
    [
        ((), None, ""),
        (("one",), True, "all its workers had one arithmetic class (one)"),
        (("one", "two"), False, "it ran on several arithmetic classes: one; two"),
    ],
)
def test_a_finished_job_tells_whether_it_was_exact(
    classes: tuple[str, ...], is_exact: bool | None, reason: str
) -> None:
    """A finished job has no plan; the verdict comes from the arithmetic classes of its last checkpoint."""
    report = finished(CheckpointRecord(timeline=1, boundary=150, url="u", arithmetic_classes=classes))
    assert (report.exact, report.exact_reason) == (is_exact, reason)


def test_a_job_that_wire_compression_has_rounded_is_not_exact() -> None:
    """The job is finished and of one arithmetic class, but one of its plans compressed a link."""
    told = CheckpointRecord(timeline=1, boundary=150, url="u", arithmetic_classes=("one",), was_rounded=True)
    report = finished(told)
    assert report.exact is False
    assert report.exact_reason == "wire compression has rounded what some of its links carried"
