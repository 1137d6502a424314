"""A node's steps for a plan that goes back to a boundary, and for one that etcd forgot."""

from dataclasses import replace

from headway.daemon.agent.goals import HEARD_AFTER_S
from headway.daemon.agent.steps import Fetch, GiveUp
from headway.daemon.agent.steps_due import next_steps
from headway.daemon.cluster.records import Phase, PhaseRecord, Save, StopRecord, WorkerState
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.decide.job_view import JobView
from headway.daemon.worker.goal import Action, SourceKind
from tests.rigs.agent_views import (
    G2,
    LAYERS,
    RUNNING,
    RUNNING_RECORD,
    STOPPED,
    WHOLE,
    due,
    goal_by,
    held,
    job,
    node,
    now,
    of_kind,
    of_state,
    plan,
    record,
    start_by,
    state_record,
    told_of_state,
    view_of,
    worker,
)

BACK_TO_5 = replace(plan(2, ("a", LAYERS), source="nodes", boundary=5), timeline=2, ancestry=((1, 5),))
PARTS = (*LAYERS, JOURNAL)


def recovering(**fields: object) -> JobView:
    """The job goes back to boundary 5 of timeline 1 on a new timeline; the old plan is still there."""
    known: dict[str, object] = {"plan": WHOLE, "next": BACK_TO_5, "phase": PhaseRecord(phase=Phase.RECOVERING)}
    return job(**(known | {"workers": RUNNING_RECORD} | fields))  # type: ignore[arg-type]


def test_a_survivor_is_prepared_and_its_old_generation_is_left_alone() -> None:
    """A worker computes generation 1 when a recovery plans generation 2: it is prepared, and told nothing about 1."""
    state = {(1, 5): {"a": state_record(*PARTS)}}
    view = view_of(recovering(state=state, stop=StopRecord(generation=1, save=Save.MOVES)))
    assert due(view, node(RUNNING, held=held(*PARTS))) == [Action.PREPARE]
    goal = goal_by(view, node(RUNNING, held=held(*PARTS)))
    assert goal.prepare is not None
    assert (goal.prepare.plan, goal.chooses_stop, goal.stop_at) == (BACK_TO_5, False, None)


def test_a_recovery_fetches_files_while_workers_prepare() -> None:
    """`next` starts from files on b: they are fetched before the plan is in force."""
    state = {(1, 5): {"b": state_record(*PARTS, name="b")}}
    steps = of_kind(next_steps(view_of(recovering(state=state)), node(RUNNING)), Fetch)
    assert [step.key.layer for step in steps if isinstance(step, Fetch)] == list(PARTS)


def test_after_a_rollback_no_live_state_is_reused() -> None:
    """The worker stands at the boundary with live state, but loads its files, because the timeline is new."""
    workers = {(2, 0): record(WorkerState.READY)}
    view = view_of(job(plan=BACK_TO_5, workers=workers, state={(1, 5): {"a": state_record(*PARTS)}}))
    start = start_by(view, node(now(STOPPED, prepared=2), held=held(*PARTS)))
    assert {source.kind for source in start.sources} == {SourceKind.FILE}


def test_files_are_not_fetched_from_a_record_of_another_incarnation() -> None:
    """b's record is from its earlier daemon: the fetch waits until it goes, or asks c."""
    workers = {(2, 0): record(WorkerState.READY)}
    old = replace(state_record(*PARTS, name="b"), incarnation="b-0")
    gone = job(plan=BACK_TO_5, workers=workers, state={(1, 5): {"b": old}})
    status = worker(prepared=2)
    assert due(view_of(gone), node(status)) == []
    both = replace(gone, state={(1, 5): {"b": old, "c": state_record(*PARTS, name="c")}})
    steps = of_kind(next_steps(view_of(both), node(status)), Fetch)
    assert {step.holders for step in steps if isinstance(step, Fetch)} == {("c",)}


def test_a_file_that_no_node_holds_fails_the_generation() -> None:
    """The file was damaged and dropped, and there is no copy."""
    files = {key: file for key, file in held(*PARTS).items() if key.layer != "head"}
    ready = {(2, 0): record(WorkerState.READY)}
    view = view_of(job(plan=BACK_TO_5, workers=ready, state={(1, 5): {"a": state_record(*PARTS)}}))
    steps = next_steps(view, node(worker(prepared=2), held=files))
    assert of_kind(steps, GiveUp) == [GiveUp(0, G2, "no node holds head at boundary 5 of j, timeline 1")]
    assert of_state(steps) == [told_of_state(1, 5, state_record(*(part for part in PARTS if part != "head")))]


def test_records_lost_in_an_etcd_outage_are_waited_for() -> None:
    """The outage outlasts a lease while a worker is to start: b may register again until HEARD_AFTER_S has passed."""
    of = job(plan=BACK_TO_5, workers={(2, 0): record(WorkerState.READY)})
    view, ready = view_of(of), node(worker(prepared=2), now=100.0)
    for since, expected in ((None, []), (99.0, []), (100.0 - HEARD_AFTER_S, [GiveUp] * len(PARTS))):
        assert [type(step) for step in due(replace(view, steady_since=since), ready)] == expected
    of.state[1, 5] = {"b": state_record(*PARTS, name="b")}
    assert [type(step) for step in due(view, ready)] == [Fetch] * len(PARTS)


def test_a_plan_from_a_backup_of_etcd_is_ignored() -> None:
    """The node has seen generation 4 and etcd says 1: no order, release or deletion follows. It obeys plan 5."""
    files = held(*PARTS)
    old = job(plan=WHOLE, workers=RUNNING_RECORD)
    assert next_steps(view_of(old), node(worker(job="j"), held=files, in_force={"j/": 4})) == []
    newer = replace(BACK_TO_5, generation=5)
    view, behind = view_of(replace(old, next=newer)), node(RUNNING, held=files, in_force={"j/": 4})
    assert due(view, behind) == [Action.PREPARE]
    goal = goal_by(view, behind)
    assert (goal.prepare is not None and goal.prepare.plan, goal.start) == (newer, None)
