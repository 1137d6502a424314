"""Failures cost a node its place: its own for all jobs, a job's errors for that job."""

import pytest

from headway.daemon.cluster.cluster_records import NodeFailureRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Failure, Phase
from headway.daemon.decide.failures import MAX_DEATHS, LostWorker
from headway.daemon.decide.quarantine import charged_by, left_out, num_counted
from headway.daemon.jobs.job import FaultSpec
from tests.rigs.recovery import lose, recovered, trained
from tests.rigs.scenarios import plan
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec


def error_of(job: str) -> NodeFailureRecord:
    return NodeFailureRecord(at=0.0, text="its worker failed", job=job, is_jobs_error=True)


LOST = NodeFailureRecord(at=0.0, text="it was lost", job="a")
OLD = NodeFailureRecord(at=0.0, text="of before jobs were named")


@pytest.mark.parametrize(
    ("failures", "for_job", "number"),
    [
        ([error_of("a")] * 9, "b", 1),
        ([error_of("a")] * 9, "a", 9),
        ([error_of("a"), error_of("b"), error_of("c"), error_of("c")], "", 3),
        ([LOST, LOST, OLD], "b", 3),
        ([LOST, error_of("a")], "b", 2),
    ],
)
def test_what_counts(failures: list[NodeFailureRecord], for_job: str, number: int) -> None:
    """Errors of one job count once for the others, each for itself; a node's own failures count for all."""
    assert num_counted(failures, for_job=for_job) == number
    found = left_out({"n": failures}, limit=3, for_job=for_job)
    assert found == ({"n"} if number >= 3 else set())
    assert not left_out({"n": failures}, limit=0, for_job=for_job)


def test_who_charges_a_node() -> None:
    """For people, in one clause."""
    assert charged_by([LOST, OLD, error_of("b"), error_of("a"), error_of("a")]) == (
        "2 failures of its own and errors of jobs a and b"
    )
    assert charged_by([error_of("a")]) == "errors of job a"


def failures_of(cluster: SimulatedCluster) -> dict[str, list[NodeFailureRecord]]:
    found: dict[str, list[NodeFailureRecord]] = {}
    for key, value in sorted(cluster.store.values.items()):
        if key.startswith(Keys.FAILURES):
            found.setdefault(key.split("/")[3], []).append(decode(value, NodeFailureRecord))
    return found


def test_a_job_that_raises_costs_the_next_user_no_node() -> None:
    """It raises another error each time until its budget is spent: the next job starts at once, on all nodes."""
    cluster = trained("a", "b", "c", batches=6, fault=FaultSpec(snapshot_every=100, checkpoint_every=200))
    cluster.quarantine_after = 3
    done = (Phase.RUNNING, Phase.FAILED)
    for number in range(MAX_DEATHS):
        used = sorted(stage.node for stage in plan(cluster).workers)
        cluster.fail_worker(used[number % len(used)], f"Traceback of {number}", fault=f"ValueError: {number}")
        cluster.calm(until=lambda: cluster.phase("first").phase is not Phase.RUNNING)
        cluster.calm(until=lambda: cluster.phase("first").phase in done)
        cluster.calm(max_rounds=4)
    assert cluster.phase("first").phase is Phase.FAILED
    charges = [charge for found in failures_of(cluster).values() for charge in found]
    assert len(charges) == MAX_DEATHS
    assert {(charge.is_jobs_error, charge.job) for charge in charges} == {(True, "first")}
    for node in cluster.nodes.values():
        node.workers[0].failure = None  # the fake knows no job's name
    cluster.submit(small_spec("next", batches=20))
    cluster.calm(until=lambda: cluster.phase("next").phase is Phase.RUNNING, max_rounds=30)
    assert {stage.node for stage in plan(cluster, "next").workers} == {"a", "b", "c"}


def test_a_daemon_whose_loss_another_job_has_charged_is_not_charged_again() -> None:
    """Two jobs lose the same node: it failed once."""
    cluster = trained("a", "b", "c", batches=6)
    victim = next(name for name in ("a", "b", "c") if name != cluster.leader)
    lost = NodeFailureRecord(at=0.0, text="lost", job="other", incarnation=cluster.nodes[victim].lease)
    cluster.store.transact({}, {Keys.failure(victim, 0): encode(lost)})
    lose(cluster, victim)
    recovered(cluster)
    assert failures_of(cluster) == {victim: [lost]}


def test_two_deaths_of_one_name_are_two_failures() -> None:
    """The daemon comes back as another process, and is lost again."""
    cluster = trained("a", "b", "c", batches=6)
    victim = next(name for name in ("a", "b", "c") if name != cluster.leader)
    lose(cluster, victim)
    recovered(cluster)
    cluster.add_node(victim)
    cluster.calm(until=lambda: victim in {stage.node for stage in plan(cluster).workers})
    cluster.calm(max_rounds=4)
    if victim == cluster.leader:
        cluster.elect()
    lose(cluster, victim)
    cluster.calm(max_rounds=2)
    assert len(failures_of(cluster)[victim]) == 2


def test_a_job_that_waits_for_a_node_in_quarantine_says_who_charges_it() -> None:
    """Its only node was lost twice and raised in another job: the reason has both."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.quarantine_after = 3
    for number, record in enumerate((LOST, LOST, error_of("other"))):
        cluster.store.transact({}, {Keys.failure("a", number): encode(record)})
    cluster.submit(small_spec("first"))
    cluster.calm(max_rounds=8)
    assert cluster.phase("first").reason == (
        "waits for 1 node; node a is in quarantine; a has 2 failures of its own and errors of job other"
    )


def test_the_death_of_a_worker_with_a_jobs_own_code_is_that_jobs() -> None:
    """A crash in it looks like a kill: three of them would cost all other jobs a healthy node."""
    cluster = trained("a", "b", batches=6)
    lost = LostWorker(position=0, plan=plan(cluster), failure=Failure("ended by signal SIGSEGV"))
    own, other = (lost.charge("j", at=0.0, brings_code=brings_code) for brings_code in (True, False))
    assert (own.is_jobs_error, other.is_jobs_error) == (True, False)
    assert left_out({"n": [other] * 3}, limit=3, for_job="k") == {"n"}
    assert not left_out({"n": [own] * 3}, limit=3, for_job="k")
