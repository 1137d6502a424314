"""An error of the coordinator about one job: that job fails with the traceback, and the others are decided about."""

from dataclasses import replace
from typing import Any

import pytest

from headway.daemon.cluster.format import decode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Phase, PhaseRecord
from headway.daemon.decide import coordinator
from headway.daemon.decide.allocate import _Allocating
from headway.daemon.decide.commands import BrokenJob, Transaction
from headway.daemon.decide.coordinator import decide
from headway.daemon.decide.plans import Purpose
from headway.daemon.decide.situation import JobSituation
from headway.daemon.leader.leadership import JobTroubles
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec


def breaking(name: str, error: Exception, original: Any) -> Any:
    """A function of a case that raises for one job."""

    def broken(situation: JobSituation, *rest: Any) -> Any:
        if situation.job.name == name:
            raise error
        return original(situation, *rest)

    return broken


@pytest.mark.parametrize("place", ["waits", "first_row"])
def test_a_job_that_breaks_the_coordinator_fails_alone(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A condition, or what follows, raises about the first: it fails, with the traceback; the second begins."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.submit(small_spec("first"))
    cluster.submit(small_spec("second"))
    monkeypatch.setattr(
        coordinator, place, breaking("first", ZeroDivisionError("no layers"), getattr(coordinator, place))
    )
    decision = decide(cluster.truth(), now=cluster.now + 10.0)
    by_job = {command.job: command for command in decision.commands}
    failing, starting = by_job["first"], by_job["second"]
    assert isinstance(failing, Transaction)
    assert isinstance(starting, Transaction)
    phase = decode(failing.puts[Keys.of("first", "phase")], PhaseRecord)
    assert phase.phase is Phase.FAILED
    assert phase.reason == "the coordinator cannot decide about this job: ZeroDivisionError: no layers"
    assert "Traceback" in phase.error
    assert Keys.of("second", "next") in starting.puts
    assert [found.job for found in decision.broken] == ["first"]


def test_a_job_that_cannot_even_be_failed_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no command for it, and the leader is told. Memory shortage and finished jobs are exceptions."""
    cluster = SimulatedCluster()
    cluster.submit(small_spec("first"))
    view, error = cluster.truth(), RuntimeError("x")
    situation = JobSituation(job=view.jobs["first"], view=view, now=0.0, written_at=0.0)
    found = coordinator.broken("first", error)
    assert coordinator.give_up(situation, found, error) is not None
    assert coordinator.give_up(situation, found, MemoryError()) is None
    over = replace(situation.job, phase=PhaseRecord(phase=Phase.FAILED))
    assert coordinator.give_up(replace(situation, job=over), found, error) is None
    monkeypatch.setattr(coordinator, "move", breaking("first", error, None))
    assert coordinator.give_up(situation, found, error) is None


def test_the_leader_reports_a_job_that_it_cannot_serve() -> None:
    """Once while it lasts. A refused decision is retried with growing pauses."""
    told: list[tuple[str, str]] = []
    troubles = JobTroubles(tell=lambda job, reason: told.append((job, reason)), clock=lambda: 0.0)
    found = BrokenJob(job="first", reason="KeyError: 'x'", traceback="…")
    troubles.not_decided([found])
    troubles.not_decided([found])
    assert told == [("first", "the coordinator cannot decide about this job: KeyError: 'x'")]
    troubles.not_decided([])
    pauses = [troubles.not_carried_out("second", "too large") for _ in range(8)]
    assert pauses[-1] > 10 * pauses[0]
    troubles.carried_out("second")
    assert [reason for _, reason in told][1] == ""
    assert told[-2:] == [("second", "a decision was not carried out 8 times in a row: too large"), ("second", "")]


def test_a_removed_job_is_no_longer_reported_as_broken() -> None:
    told: list[tuple[str, str]] = []
    troubles = JobTroubles(tell=lambda job, reason: told.append((job, reason)), clock=lambda: 0.0)
    troubles.not_carried_out("first", "too large")
    troubles.keep_only({"first"})
    assert told == [("first", "a decision was not carried out: too large")]
    troubles.keep_only({"second"})
    assert told[1:] == [("first", "")]


def test_a_job_whose_claim_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan for its fair share raises; the other waiting job begins nevertheless."""
    cluster = SimulatedCluster()
    for name in ("a", "b"):
        cluster.add_node(name)
    cluster.submit(small_spec("first"), user="alice@one")
    cluster.submit(small_spec("second"), user="bob@two")
    original = _Allocating._plan

    def broken(self: _Allocating, situation: JobSituation, purpose: Purpose, busy: frozenset[tuple[str, int]]) -> Any:
        if situation.job.name == "first":
            raise ZeroDivisionError("no layers")
        return original(self, situation, purpose, busy)

    monkeypatch.setattr(_Allocating, "_plan", broken)
    decision = decide(cluster.truth(), now=cluster.now + 10.0)
    by_job = {command.job: command for command in decision.commands}
    failing, starting = by_job["first"], by_job["second"]
    assert isinstance(failing, Transaction)
    assert isinstance(starting, Transaction)
    assert decode(failing.puts[Keys.of("first", "phase")], PhaseRecord).phase is Phase.FAILED
    assert Keys.of("second", "next") in starting.puts


def test_one_kind_of_decision_does_not_hide_that_another_fails() -> None:
    """A manifest fails while transactions succeed: the job says so all the time, and the pause grows. When nobody tries
    it any more, the trouble is over."""
    told: list[str] = []
    now = [0.0]
    troubles = JobTroubles(tell=lambda _, reason: told.append(reason), clock=lambda: now[0])
    pauses = []
    for _ in range(3):
        pauses.append(troubles.not_carried_out("first", "disk full", kind="WriteManifest"))
        now[0] += pauses[-1]
        troubles.carried_out("first", kind="Transaction")
    assert all("disk full" in reason for reason in told)
    assert pauses[0] < pauses[-1]
    now[0] += 1000.0
    troubles.carried_out("first", kind="Transaction")
    assert told[-1] == ""
