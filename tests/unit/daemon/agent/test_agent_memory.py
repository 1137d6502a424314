"""An agent forgets about objects that are gone: a daemon runs for a year."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.daemon.agent import agent as agents
from headway.daemon.agent.steps import StepFailures
from headway.daemon.errors import StoreUnreachableError
from headway.daemon.etcd.transaction import Compare, Delete, Put
from headway.daemon.jobs.job import DataSpec
from headway.daemon.records.records import seen_key
from tests.fakes.agent_scene import QuietSupervisor, make_scene

NUM_JOBS = 500


def test_repeated_failures_are_counted_and_logged_once() -> None:
    """The same reason twice, another one, a success, and the first again."""
    failures = StepFailures()
    told = [failures.failed("step", reason) for reason in ("a", "a", "b")]
    assert told == [(1, True), (2, False), (3, True)]
    failures.start_over("step")
    assert failures.failed("step", "b") == (1, False)
    failures.succeeded("step")
    assert failures.failed("step", "b") == (1, True)


def test_a_step_that_is_not_due_any_more_is_forgotten() -> None:
    failures = StepFailures()
    for number in range(NUM_JOBS):
        failures.failed(number, "refused")
        failures.keep_only({number, number - 1})
        assert len(failures) <= 2
    assert failures.failed(NUM_JOBS - 1, "refused") == (2, False)
    failures.keep_only(())
    assert not failures


async def test_failures_of_a_removed_job_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No registration of its files succeeds, then the job is removed: the agent keeps nothing about it."""
    scene = make_scene(tmp_path, library=SimpleNamespace(state_of=str))
    monkeypatch.setattr(agents, "REST_S", 0.001)

    async def refused(conditions: Sequence[Compare], changes: Sequence[Put | Delete]) -> int:
        raise StoreUnreachableError("etcd", "is full")

    monkeypatch.setattr(scene.etcd, "transaction", refused)
    async with scene.at_work():
        for boundary in (20, 40, 60):
            await scene.write(boundary)
        await scene.until(lambda: len(scene.agent._failures) > 0)
        del scene.view.jobs["j"]
        scene.agent.cluster_changed()
        await scene.until(lambda: len(scene.agent._failures) == 0)


def test_jobs_that_are_over_leave_no_generation_and_no_data(tmp_path: Path) -> None:
    """A name is submitted again and again with new data. The agent remembers only what etcd has or the node has written
    down.
    """
    remembered: dict[str, int] = {}
    scene = make_scene(tmp_path, remembered=lambda: remembered)
    supervisor = QuietSupervisor()
    job = scene.job
    assert job.submission is not None
    for number in range(NUM_JOBS):
        spec = replace(job.submission.spec, data=DataSpec(sha256=f"sha-{number}"))
        job.submission = replace(job.submission, uid=f"u{number}", spec=spec)
        scene.agent._data_paths[f"sha-{number}"] = "/data"
        remembered = {seen_key("j", f"u{number - 1}"): 1}
        state = scene.agent._node_state(supervisor)  # type: ignore[arg-type]
        assert state.in_force.keys() <= {seen_key("j", f"u{number}"), seen_key("j", f"u{number - 1}")}
        assert state.in_force[seen_key("j", f"u{number}")] == 1
        assert state.data_paths.keys() == {f"sha-{number}"}
