"""A node that does not believe a job's record takes no step of the job: it knows default sizes alone."""

from pathlib import Path

import pytest

from headway.daemon.agent.steps_due import next_steps
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import CheckpointRecord, Phase, PhaseRecord
from headway.daemon.records.signature import Signature
from headway.daemon.runtime.activities import Activities
from headway.daemon.view.job_view import JobView
from headway.stages.state.file_digest import FileDigest
from tests.fakes.agent_scene import QuietSupervisor, make_scene
from tests.fakes.agent_views import (
    LAYERS,
    RUNNING,
    RUNNING_RECORD,
    SPLIT,
    WHOLE,
    held,
    job,
    node,
    state_record,
    view_of,
    worker,
)

WHY = "its signer's certificate is not of this cluster's authority, or was not valid when it was signed"


def refused(found: JobView) -> JobView:
    """Return the job in the view of a node that does not believe its record."""
    found.signed_so(Signature(WHY))
    return found


@pytest.mark.parametrize(
    "told",
    [
        {"next": WHOLE},
        {"plan": WHOLE, "phase": PhaseRecord(phase=Phase.RUNNING, generation=1)},
        {"plan": SPLIT, "next": WHOLE, "phase": PhaseRecord(phase=Phase.RECOVERING, generation=1)},
    ],
)
def test_a_node_takes_no_step_of_a_job_that_it_does_not_believe(told: dict[str, object]) -> None:
    """It opens no data, prepares no worker, and fetches nothing for a plan that names it."""
    assert next_steps(view_of(job(**told)), node(worker()))  # type: ignore[arg-type]
    assert not next_steps(view_of(refused(job(**told))), node(worker()))  # type: ignore[arg-type]


def test_files_of_a_job_that_is_not_believed_stay_as_they_are() -> None:
    """Nothing is registered, copied, judged or deleted, also of a boundary that nobody needs."""
    told: dict[str, object] = {
        "plan": WHOLE,
        "workers": RUNNING_RECORD,
        "state": {(1, 4): {"a": state_record(*LAYERS)}, (1, 5): {"a": state_record(*LAYERS)}},
        "checkpoint": CheckpointRecord(
            timeline=1, boundary=5, url="u", files={"embed": FileDigest(size_bytes=1, checksum="ab")}
        ),
    }
    files = held(*LAYERS, boundary=3) | held(*LAYERS)
    assert next_steps(view_of(job(**told)), node(RUNNING, held=files))  # type: ignore[arg-type]
    assert not next_steps(view_of(refused(job(**told))), node(RUNNING, held=files))  # type: ignore[arg-type]


def test_a_node_says_which_job_it_refuses_and_why(tmp_path: Path) -> None:
    """The reason stands among its ailments until it believes the record, or until the job is over."""
    activities, worth = Activities(), Signature(WHY)
    scene = make_scene(tmp_path, activities=activities)
    scene.view.judge_signature = lambda _raw, _record: worth
    submission = scene.job.submission

    def ailments_after(leaf: str, record: object) -> dict[str, str]:
        scene.etcd.revision += 1
        scene.etcd.show(Keys.of("j", leaf), encode(record))
        scene.agent._node_state(QuietSupervisor())  # type: ignore[arg-type]
        return activities.ailments

    assert ailments_after("spec", submission) == {"refuses job j": WHY}
    worth = Signature()
    assert not ailments_after("spec", submission)
    worth = Signature(WHY)
    assert ailments_after("spec", submission)
    assert not ailments_after("phase", PhaseRecord(phase=Phase.FAILED))
