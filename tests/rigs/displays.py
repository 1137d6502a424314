"""Parts that tests of displays share."""

from headway.daemon.reports.job_report import (
    JobReport,
)


def report(batch: int, *, phase: str = "running") -> JobReport:
    """A job after a batch."""
    return JobReport(
        name="demo",
        phase=phase,
        desired="running",
        reason="",
        error="",
        generation=1,
        timeline=1,
        batch=batch,
        batches=100,
        loss=2.0,
        tokens_per_second=None,
        seconds_left=None,
        exact=True,
        exact_reason="",
        plan_reason="",
        layers=("embed", "head"),
        stages=(),
        next_stages=(),
        checkpoint_boundary=None,
        checkpoint_url="",
        submitted_at=0.0,
        since=0.0,
    )
