"""A job may fail a limited number of times: by batch, by deaths, by equal errors elsewhere; progress restarts the
count.
"""

from headway.daemon.cluster.records import (
    Failure,
    FailureCount,
    Phase,
    PlanRecord,
)
from headway.daemon.decide.failures import (
    MAX_DEATHS,
    MAX_SAME_BATCH,
    MAX_SAME_FAULT,
    Death,
    broken_rule,
    counted,
    was_killed,
)
from tests.rigs.transaction_parts import running_on


def rule_after(*deaths: Death, boundary: int = 0) -> str:
    count = FailureCount()
    for death in deaths[:-1]:
        count = counted(count, [death], boundary=boundary)
        assert not broken_rule(count, [death])
    return broken_rule(counted(count, deaths[-1:], boundary=boundary), deaths[-1:])


def test_the_same_batch_three_times() -> None:
    """Twice is bad luck; the third time names the batch. Other batches between, or an unknown one, start it anew."""
    again = [Death("a", Failure(batch=7))] * MAX_SAME_BATCH
    assert rule_after(*again) == "batch 7 failed 3 times without a new boundary to go back to"
    assert not rule_after(*again[:2], Death("a", Failure(batch=8)), *again[:2])
    assert not rule_after(*again[:2], Death("a", Failure()))


def test_ten_deaths() -> None:
    """At different batches, of different nodes, one after another."""
    deaths = [Death(f"n{batch}", Failure(batch=batch)) for batch in range(MAX_DEATHS)]
    assert rule_after(*deaths) == "it failed 10 times without a new boundary to go back to"


def test_workers_that_fail_together_are_one_incident() -> None:
    """A switch takes forty workers: that is one failure, and the tenth such one is the last."""
    together = [Death(f"n{number}", Failure()) for number in range(40)]
    count = FailureCount()
    for incident in range(1, MAX_DEATHS + 1):
        count = counted(count, together, boundary=0)
        assert bool(broken_rule(count, together)) == (incident == MAX_DEATHS)


def test_the_same_error_on_two_nodes() -> None:
    """Twice on one node may be the node; on two nodes it is the job."""
    one, other = Death("a", Failure(fault="ValueError: x")), Death("b", Failure(fault="ValueError: x"))
    assert not rule_after(one, one)
    assert not rule_after(one, Death("b", Failure(fault="ValueError: y")))
    assert rule_after(one, other) == "the same error occurred on a and b: ValueError: x"


def test_one_error_on_one_node_again_and_again() -> None:
    """After the third a plan may leave the node out; the fourth at one boundary ends the job, whatever the batches.

    Workers of one node that fail together are one incident, and a newer boundary starts the count anew.
    """
    errors = [Death("a", Failure(batch=batch, fault="OSError: x")) for batch in range(MAX_SAME_FAULT)]
    told = "the same error occurred 4 times on a without a new boundary to go back to: OSError: x"
    assert rule_after(*errors) == told
    assert not rule_after(*errors[:3], Death("a", Failure(batch=3, fault="OSError: y")), Death("a", Failure(batch=4)))
    count = counted(FailureCount(), errors, boundary=0)
    assert not broken_rule(count, errors)
    for boundary in (10, 20, 30, 40):
        count = counted(count, errors[:1], boundary=boundary)
    assert not broken_rule(count, errors[:1])


def test_hopeless_at_once() -> None:
    """A loss that is not finite comes again."""
    assert rule_after(Death("a", Failure(is_hopeless=True))) == "another attempt would end in the same error"


def test_a_newer_boundary_resets_the_failure_budget() -> None:
    """The job made progress. An older boundary, after files were lost, is no progress."""
    count = FailureCount(boundary=40, num_deaths=9, batch=47, num_same_batch=2, faults=(("x", "a"),))
    assert counted(count, [Death("b", Failure(batch=47))], boundary=60).num_deaths == 1
    assert counted(count, [Death("b", Failure(batch=47))], boundary=20).num_deaths == 10
    assert counted(count, [], boundary=40) == count, "a node's loss is no worker's failure"


def test_progress_after_lost_files_resets_the_failure_budget() -> None:
    """The job goes back from 40 to 0, and each of ten kills finds it further."""
    before, again = PlanRecord(generation=1, timeline=1), PlanRecord(generation=2, timeline=2)
    count = counted(FailureCount(boundary=40, timeline=1, num_deaths=1), [], boundary=0, plan=before)
    for boundary in (0, 5, 10, 15, 20, 25, 30, 35, 40):
        count = counted(count, [Death("a", Failure(batch=boundary + 2))], boundary=boundary, plan=again)
    assert count.num_deaths == 1


def test_a_boundary_whose_holders_come_and_go_is_no_progress() -> None:
    """40, 0, 40 and so on, under one plan, and under those that go back to 40 each time: ten deaths are ten deaths."""
    count = FailureCount()
    for number in range(1, MAX_DEATHS + 1):
        plan = PlanRecord(generation=number, timeline=(number + 1) // 2, boundary=40 if number > 2 else 0)
        count = counted(count, [Death("a", Failure(batch=number))], boundary=40 * (number % 2), plan=plan)
    assert count.num_deaths == MAX_DEATHS


def test_a_job_that_began_with_a_parents_checkpoint_has_a_budget() -> None:
    """Its plans begin at 100 on a timeline of their own each time, and get nowhere."""
    count = FailureCount()
    for number in range(1, MAX_DEATHS + 1):
        plan = PlanRecord(generation=number, timeline=number, boundary=100)
        count = counted(count, [Death("a", Failure(batch=100 + number))], boundary=100, plan=plan)
    assert count.num_deaths == MAX_DEATHS


def test_killed_or_failed() -> None:
    """A process ended from outside, against an error that the worker told of."""

    assert was_killed(Failure("node a: worker-0 (pid 7) ended by signal SIGKILL\nlast words"))
    assert was_killed(Failure("node a: worker-0 stood still; it was killed\nworker-0 (pid 7) ended by signal 9"))
    assert not was_killed(Failure("worker-0: the link to stage 1 is lost"))
    assert not was_killed(Failure("node a: worker-0 (pid 7) ended with exit status 1\nTraceback", fault="ValueError"))


def test_twelve_late_workers_are_one_incident_of_the_job() -> None:
    """They were all told to start, and none of them ever runs: one failure of the budget's ten, and the job goes on."""
    cluster = running_on(12, "survivor")
    for node in cluster.nodes.values():
        node.is_frozen = node.name != "survivor"
    cluster.elect()
    cluster.calm(until=lambda: cluster.phase("first").phase is not Phase.RUNNING)
    assert cluster.phase("first").phase is Phase.RECOVERING
    assert cluster.phase("first").failures.num_deaths == 1
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.FINISHED)
