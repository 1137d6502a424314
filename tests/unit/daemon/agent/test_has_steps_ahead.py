"""A daemon hears changes at once while others wait for its steps."""

import pytest

from headway.daemon.agent.steps_due import has_steps_ahead
from headway.daemon.records.records import Phase, PhaseRecord, PlanRecord, WorkerPart
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView


def plan(node: str) -> PlanRecord:
    """One stage on a node."""
    stage = WorkerPart(node=node, node_incarnation=f"{node}-1", device_index=0, layers=("embed",), depth=1)
    return PlanRecord(generation=1, timeline=1, workers=(stage,))


@pytest.mark.parametrize(
    ("phase", "present", "coming", "waiting"),
    [
        (Phase.RUNNING, "a", "", ""),
        (Phase.CHANGING, "a", "b", "ab"),
        (Phase.RUNNING, "a", "b", "ab"),
        (Phase.STOPPING, "a", "", "a"),
        (Phase.RECOVERING, "a", "b", "ab"),
        (Phase.QUEUED, "", "b", "b"),
        (Phase.FINISHED, "a", "", ""),
    ],
)
def test_a_node_of_a_plan_that_is_not_settled_has(phase: Phase, present: str, coming: str, waiting: str) -> None:
    """Also in a plan that is prepared while the job trains under the present one."""
    view = ClusterView()
    view.jobs["j"] = JobView(
        name="j",
        phase=PhaseRecord(phase=phase),
        plan=plan(present) if present else None,
        next=plan(coming) if coming else None,
    )
    assert {name for name in "abc" if has_steps_ahead(view, name)} == set(waiting)
