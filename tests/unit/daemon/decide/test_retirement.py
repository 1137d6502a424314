"""Ended jobs are retired by number, a job that may go on is not; and a job that etcd has lost is noticed."""

from dataclasses import replace
from typing import Any

import pytest

from headway.daemon.cluster.cluster_records import RetiredRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import (
    CheckpointRecord,
    Desired,
    DesiredRecord,
    NodeRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
)
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.retirement import (
    NUM_LOOKS,
    VanishedJobs,
    jobs_to_retire,
    names_to_forget,
    retired_record,
    vanished_text,
)
from headway.daemon.decide.situation import JobSituation
from headway.daemon.reports.node_list import retired_line, sentence_on
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

DAY_S = 86400.0
NOW = 100 * DAY_S


class Scene:
    """A view of jobs."""

    def __init__(self) -> None:
        self.view = ClusterView()
        self.revision = 0

    def put(self, key: str, record: Any) -> None:
        self.revision += 1
        self.view.apply(key, encode(record), mod_revision=self.revision, create_revision=self.revision)

    def job(self, name: str, phase: Phase, *, days: float, **records: Any) -> None:
        """A job that entered its phase so many days ago."""
        self.put(Keys.of(name, "spec"), SpecRecord(spec=small_spec(name), uid=f"uid of {name}"))
        self.put(Keys.of(name, "phase"), PhaseRecord(phase=phase, generation=3, since=NOW - days * DAY_S))
        for leaf, record in records.items():
            self.put(Keys.of(name, leaf), record)

    def due(self, *, most: int = 200) -> list[str]:
        return [job.name for job in jobs_to_retire(self.view, most=most)]


def test_of_many_ended_jobs_the_oldest_are_retired() -> None:
    scene = Scene()
    for days, phase in enumerate((Phase.FINISHED, Phase.FAILED, Phase.CANCELLED, Phase.FINISHED), start=1):
        scene.job(f"j{days}", phase, days=days)
    assert scene.due() == []
    assert scene.due(most=2) == ["j4", "j3"]
    assert scene.due(most=0) == ["j4", "j3", "j2", "j1"]


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase not in ("finished", "failed", "cancelled")])
def test_a_job_that_has_not_ended_stays(phase: Phase) -> None:
    scene = Scene()
    scene.job("j", phase, days=99)
    assert scene.due(most=0) == []


def test_a_failed_job_that_is_to_continue_stays() -> None:
    """Somebody has just asked for it: the coordinator has not seen the request yet."""
    scene = Scene()
    scene.job("j", Phase.FAILED, days=99, desired=DesiredRecord(state=Desired.RUNNING, request=1))
    assert scene.due(most=0) == []


def test_an_ended_job_with_a_record_that_cannot_be_read_stays() -> None:
    """Nothing is decided about it until somebody mends or deletes the record."""
    scene = Scene()
    scene.job("j", Phase.FINISHED, days=99)
    scene.view.apply(Keys.of("j", "checkpoint"), b"rubbish", mod_revision=99, create_revision=99)
    assert scene.due(most=0) == []


def test_a_later_job_of_the_name_begins_above_every_generation() -> None:
    """What the job's records, earlier jobs of its name and the nodes know is kept."""
    scene = Scene()
    scene.job("j", Phase.FINISHED, days=1)
    node = NodeRecord(
        name="a", incarnation="a-1", address="", host="a", site="", devices=(), memory_bytes=0, arithmetic_class=""
    )
    assert retired_record(scene.view, scene.view.jobs["j"], now=NOW).generation == 3
    scene.put(Keys.retired("j"), RetiredRecord(phase=Phase.FAILED, generation=7))
    assert retired_record(scene.view, scene.view.jobs["j"], now=NOW).generation == 7
    scene.put(Keys.node("a"), replace(node, generations={"j": 9}))
    assert retired_record(scene.view, scene.view.jobs["j"], now=NOW).generation == 9
    scene.put(Keys.node("a"), node)
    scene.put(Keys.of("j", "plan"), PlanRecord(generation=4, timeline=1))
    situation = JobSituation(job=scene.view.jobs["j"], view=scene.view, now=0.0, written_at=0.0)
    assert situation.generation == 8


def test_the_oldest_of_very_many_retired_jobs_are_forgotten() -> None:
    scene = Scene()
    for at in range(5):
        record = RetiredRecord(phase=Phase.FINISHED, generation=1, retired_at=float(at))
        scene.put(Keys.retired(f"j{at}"), record)
    assert names_to_forget(scene.view, most=3) == ["j0", "j1"]
    assert names_to_forget(scene.view) == []


def test_one_line_tells_of_a_retired_job() -> None:
    record = RetiredRecord(
        phase=Phase.FINISHED, generation=1, since=0.0, retired_at=0.0, batch=99, loss=1.5, checkpoint="/c/j-1"
    )
    told = sentence_on(record)
    assert "is retired: finished at" in told
    assert "after batch 99 with loss 1.5000" in told
    assert told.endswith("its newest checkpoint stays at /c/j-1")
    assert "\n" not in told
    assert retired_line(0) == ""
    assert retired_line(2).startswith("2 retired jobs")


@pytest.mark.parametrize("raw", [b'{"phase": "finished"}', b'{"phase": "finished", "generation": -1}', b"[]"])
def test_an_impossible_record_is_set_aside(raw: bytes) -> None:
    view = ClusterView()
    view.apply(Keys.retired("j"), raw, mod_revision=1, create_revision=1)
    assert not view.retired
    assert Keys.retired("j") in view.unreadable


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
