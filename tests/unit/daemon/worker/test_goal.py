"""What is next for a worker, and what its daemon remembers of what it says."""

from dataclasses import replace

import msgspec
import pytest

from headway.daemon.cluster.records import Failure
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.worker.goal import (
    Action,
    Actual,
    FromWorker,
    Goal,
    Preparation,
    Source,
    SourceKind,
    Spacing,
    Start,
    ToWorker,
    next_action,
)
from tests.rigs.agent_views import G1, SPLIT, WHOLE, worker

SPEC = JobSpec(job=JobSection(name="j"))
FIRST = Start(plan=WHOLE, position=0, sources=(Source("embed", SourceKind.FILE, "/s/embed"),))
GOAL = Goal(job="j", spec=SPEC, start=FIRST)
READY = Actual(job="j", prepared=1)
RUNS = Actual(job="j", prepared=1, generation=1, has_journal=True)
STANDS = msgspec.structs.replace(RUNS, boundary=5, stop_at=5)
BROKEN = {1: Failure("it broke")}


def goal(**changes: object) -> Goal:
    return msgspec.structs.replace(GOAL, **changes)


@pytest.mark.parametrize(
    ("wanted", "actual", "action"),
    [
        (Goal(), Actual(), None),
        (goal(ends=True), RUNS, Action.END),
        (Goal(), RUNS, Action.RELEASE),
        (goal(job="k"), RUNS, Action.RELEASE),
        (goal(prepare=Preparation(plan=SPLIT, position=0)), RUNS, Action.PREPARE),
        (goal(prepare=Preparation(plan=WHOLE, position=0)), RUNS, None),
        (goal(start=None), READY, None),
        (GOAL, Actual(), None),
        (GOAL, READY, Action.START),
        (GOAL, msgspec.structs.replace(READY, num_damaged=1), None),
        (GOAL, msgspec.structs.replace(READY, failures=BROKEN), None),
        (GOAL, RUNS, None),
        (GOAL, msgspec.structs.replace(RUNS, generation=2), None),
        (goal(chooses_stop=True), RUNS, Action.CHOOSE_STOP),
        (goal(chooses_stop=True), msgspec.structs.replace(RUNS, chosen=5), None),
        (goal(stop_at=5), RUNS, Action.STOP_AT),
        (goal(stop_at=5), msgspec.structs.replace(RUNS, stop_at=5), None),
        (goal(stop_at=5, write=("head",)), msgspec.structs.replace(RUNS, stop_at=5), None),
        (goal(stop_at=5, write=("head",)), STANDS, Action.WRITE),
        (goal(stop_at=6, write=("head",)), STANDS, None),
        (goal(stop_at=5, write=("head",)), msgspec.structs.replace(STANDS, written=("head",)), None),
        (goal(stop_at=5, write=("head",)), msgspec.structs.replace(STANDS, failures=BROKEN), None),
        (goal(spacing=Spacing(2, 40)), RUNS, Action.SPACE_SNAPSHOTS),
        (goal(spacing=Spacing(2, 40)), msgspec.structs.replace(RUNS, spacing=Spacing(4, 80)), None),
        (goal(journal_from=20), RUNS, Action.TRIM_JOURNAL),
        (goal(journal_from=20), msgspec.structs.replace(RUNS, has_journal=False), None),
    ],
)
def test_the_next_action_follows_from_goal_and_actual(wanted: Goal, actual: Actual, action: Action | None) -> None:
    """Each wish alone, where it is not fulfilled yet, where it is, and where it cannot be."""
    assert next_action(wanted, actual) is action


@pytest.mark.parametrize(
    ("message", "kind"),
    [(GOAL, ToWorker), (msgspec.structs.replace(STANDS, failures=BROKEN), FromWorker)],
    ids=["goal", "actual"],
)
def test_a_message_arrives_as_it_was_sent(message: object, kind: type) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message


def test_a_failure_that_was_forgotten_is_not_learned_again() -> None:
    """Its plan is over; the worker repeats it with every heartbeat until it starts something else."""
    failed = worker(prepared=1, started=1)
    actual = msgspec.structs.replace(failed.actual, failures=BROKEN)
    failed = failed.told(actual)
    assert failed.failures == {G1: BROKEN[1]}
    over = failed.forgetting(frozenset({G1}))
    assert over.told(actual).failures == {}
    another = msgspec.structs.replace(actual, failures={2: Failure("again")})
    assert [key.generation for key in over.told(another).failures] == [2]


def test_an_earlier_failure_is_kept_and_its_process_may_be_another() -> None:
    """The daemon gave the generation up first; then the process dies, and the next one says hello."""
    given_up = worker(prepared=1, started=1).failed(Failure("no data"), run_key=G1)
    dead = replace(given_up, goal=goal(prepare=Preparation(plan=SPLIT, position=0))).died(Failure("killed"))
    assert {key.generation: why.text for key, why in dead.failures.items()} == {1: "no data", 2: "killed"}
    next_one = dead.attached("w2", pid=8, address="a:2")
    assert (next_one.failures, next_one.goal, next_one.actual) == (dead.failures, Goal(), Actual())
