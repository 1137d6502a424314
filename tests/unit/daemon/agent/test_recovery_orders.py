"""A node's steps for a plan that goes back to a boundary, and for one that etcd forgot."""

from dataclasses import replace

from headway.daemon.agent.layer_sources import HEARD_AFTER_S
from headway.daemon.agent.steps import FetchState, GiveUp, RegisterState
from headway.daemon.agent.steps_due import next_steps
from headway.daemon.records.records import Phase, PhaseRecord, Save, StopRecord, WorkerState
from headway.daemon.storage.state_key import JOURNAL
from headway.daemon.view.cluster_view import JobView
from headway.daemon.workers.orders import OrderPrepare, OrderStart, SourceKind
from headway.daemon.workers.status import JobGeneration
from tests.unit.daemon.agent.order_views import (
    G2,
    LAYERS,
    RUNNING,
    RUNNING_RECORD,
    STOPPED,
    WHOLE,
    held,
    job,
    node,
    of_kind,
    plan,
    record,
    state_record,
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
    """It computes generation 1 and recovery plans 2: it is prepared, and nothing of the old plan is ordered."""
    state = {(1, 5): {"a": state_record(*PARTS)}}
    view = view_of(recovering(state=state, stop=StopRecord(generation=1, save=Save.MOVES)))
    assert next_steps(view, node(RUNNING, held=held(*PARTS))) == [OrderPrepare(0, G2, 0, BACK_TO_5, "/data")]


def test_a_recoverys_files_come_while_workers_are_prepared() -> None:
    """`next` starts from files that b has: they are fetched before the plan is in force."""
    state = {(1, 5): {"b": state_record(*PARTS, name="b")}}
    steps = of_kind(next_steps(view_of(recovering(state=state)), node(RUNNING)), FetchState)
    assert [step.key.layer for step in steps if isinstance(step, FetchState)] == list(PARTS)


def test_after_a_rollback_nothing_is_live() -> None:
    """The worker stands at 5 with its state live; on the new timeline it loads its own files all the same."""
    workers = {(2, 0): record(WorkerState.READY)}
    view = view_of(job(plan=BACK_TO_5, workers=workers, state={(1, 5): {"a": state_record(*PARTS)}}))
    (start,) = of_kind(next_steps(view, node(STOPPED.did_prepare(G2), held=held(*PARTS))), OrderStart)
    assert isinstance(start, OrderStart)
    assert {source.kind for source in start.sources} == {SourceKind.FILE}


def test_a_file_of_another_incarnation_is_not_asked_for() -> None:
    """b's record is of the daemon before: one waits until it goes; with c's record beside it, c is asked."""
    workers = {(2, 0): record(WorkerState.READY)}
    old = replace(state_record(*PARTS, name="b"), incarnation="b-0")
    gone = job(plan=BACK_TO_5, workers=workers, state={(1, 5): {"b": old}})
    status = worker().did_prepare(G2)
    assert next_steps(view_of(gone), node(status)) == []
    both = replace(gone, state={(1, 5): {"b": old, "c": state_record(*PARTS, name="c")}})
    steps = of_kind(next_steps(view_of(both), node(status)), FetchState)
    assert {step.holders for step in steps if isinstance(step, FetchState)} == {("c",)}


def test_what_no_node_holds_is_given_up() -> None:
    """Its file was damaged and dropped, and nobody else has one: the generation fails, and the next goes elsewhere."""
    files = {key: file for key, file in held(*PARTS).items() if key.layer != "head"}
    ready = {(2, 0): record(WorkerState.READY)}
    view = view_of(job(plan=BACK_TO_5, workers=ready, state={(1, 5): {"a": state_record(*PARTS)}}))
    steps = next_steps(view, node(worker().did_prepare(G2), held=files))
    assert of_kind(steps, GiveUp) == [GiveUp(0, G2, "no node holds head at boundary 5 of j, timeline 1")]
    assert of_kind(steps, RegisterState) == [
        RegisterState("j", 1, 5, state_record(*(part for part in PARTS if part != "head")))
    ]


def test_what_etcd_forgot_while_it_was_away_is_waited_for() -> None:
    """It was away for longer than a lease while the worker was to start: b registers again, or HEARD_AFTER_S pass."""
    of = job(plan=BACK_TO_5, workers={(2, 0): record(WorkerState.READY)})
    view, ready = view_of(of), node(worker().did_prepare(G2), now=100.0)
    for since, expected in ((None, []), (99.0, []), (100.0 - HEARD_AFTER_S, [GiveUp] * len(PARTS))):
        assert [type(step) for step in next_steps(replace(view, steady_since=since), ready)] == expected
    of.state[1, 5] = {"b": state_record(*PARTS, name="b")}
    assert [type(step) for step in next_steps(view, ready)] == [FetchState] * len(PARTS)


def test_a_plan_from_a_backup_of_etcd_is_ignored() -> None:
    """This node saw generation 4 in force; etcd says 1: no order, no release, nothing deleted. Plan 5 is obeyed."""
    files = held(*PARTS)
    old = job(plan=WHOLE, workers=RUNNING_RECORD)
    assert next_steps(view_of(old), node(worker(job="j"), held=files, in_force={"j/": 4})) == []
    newer = replace(BACK_TO_5, generation=5)
    steps = next_steps(view_of(replace(old, next=newer)), node(RUNNING, held=files, in_force={"j/": 4}))
    assert steps == [OrderPrepare(0, JobGeneration("j", 5), 0, newer, "/data")]
