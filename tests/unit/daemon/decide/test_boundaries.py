"""The boundaries that a job could go back to, and those that are kept, when two timelines have equal numbers."""

from dataclasses import replace

import pytest

from headway.daemon.cluster.records import (
    CheckpointRecord,
    NodeRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    StateFile,
    StateRecord,
    WorkerPart,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.decide.boundaries import (
    copier,
    depends_on,
    due_checkpoint,
    fewest_holders,
    find_origin,
    kept,
    newest_complete,
    own_places,
    restorable,
)
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from headway.daemon.plan.stage_memory import num_host_states
from headway.stages.spec import ModelSpec

LAYERS = ("embed", "block.0", "head")
FRONT, BACK = LAYERS[:2], (*LAYERS[2:], JOURNAL)
PARTS = (*LAYERS, JOURNAL)
PLAN = PlanRecord(
    generation=3,
    timeline=3,
    ancestry=((1, 20),),
    workers=(
        WorkerPart(node="a", node_incarnation="a-1", device_index=0, layers=FRONT, depth=4),
        WorkerPart(node="b", node_incarnation="b-1", device_index=0, layers=LAYERS[2:], depth=4),
    ),
)
NODES = {
    name: NodeRecord(
        name=name, incarnation=f"{name}-1", address="", host=name, site="", devices=(), memory_bytes=0,
        arithmetic_class="",
    )
    for name in "ab"
}  # fmt: skip


def told(name: str, *parts: str, of: str = "") -> StateRecord:
    """Return a node's record; files that differ in `of` differ in their content."""
    files = {part: StateFile(size_bytes=10, checksum=f"{of}{part}") for part in parts}
    return StateRecord(incarnation=f"{name}-1", generation=3, files=files)


def both(*parts: str) -> dict[str, StateRecord]:
    return {name: told(name, *parts) for name in "ab"}


def job(state: dict[tuple[int, int], dict[str, StateRecord]], **fields: object) -> JobView:
    """It runs on a and b on timeline 3, which began at boundary 20 of timeline 1."""
    fault = FaultSpec(snapshot_every=20, checkpoint_every=40)
    spec = JobSpec(job=JobSection(name="j"), model=ModelSpec(num_hidden_layers=1), fault=fault)
    running = WorkerRecord(node="a", incarnation="w", address="a:1", pid=1, state=WorkerState.RUNNING)
    known: dict[str, object] = {
        "submission": SpecRecord(spec=spec, uid="u"),
        "plan": PLAN,
        "phase": PhaseRecord(phase=Phase.RUNNING, generation=3),
        "workers": {(3, 0): running, (3, 1): replace(running, node="b")},
        "state": state,
    }
    return JobView(name="j", **(known | fields))  # type: ignore[arg-type]


def test_a_boundary_is_never_put_together_from_two_timelines() -> None:
    """a has half of boundary 20 of timeline 1 and b the other half of timeline 3's: nobody has 20."""
    two = {
        (1, 20): {"a": told("a", *FRONT, of="old ")},
        (3, 20): {"b": told("b", *BACK, of="new ")},
        (1, 0): both(*PARTS),
    }
    assert [fewest_holders(job(two), place, NODES) for place in ((1, 20), (3, 20))] == [0, 0]
    assert newest_complete(job(two), NODES) == (1, 0)
    assert restorable(job(two), NODES) == ((1, 0),)
    origin = find_origin(job(two), NODES, generation=4)
    assert (origin.source_timeline, origin.boundary) == (1, 0)


def test_boundaries_after_the_point_of_return_do_not_count() -> None:
    """The job left timeline 1 at 20, so 40 and 60 are useless there; timeline 2 has no boundaries."""
    state = {place: both(*PARTS) for place in ((1, 20), (1, 40), (1, 60), (2, 60))}
    assert own_places(job(state)) == ((1, 20),)
    assert newest_complete(job(state), NODES) == (1, 20)
    assert kept(job(state), NODES) == {(1, 20)}


def test_a_new_timeline_remembers_where_each_older_one_was_left() -> None:
    """Back from timeline 3 to boundary 20 of timeline 1, as generation 4: nothing of timeline 3 counts any more."""
    origin = find_origin(job({(1, 20): both(*PARTS), (3, 40): both(*FRONT)}), NODES, generation=4)
    assert (origin.lineage.timeline, origin.lineage.ancestry) == (4, ((1, 20),))
    assert [origin.lineage.has(*place) for place in ((4, 40), (3, 20), (1, 20), (1, 21))] == [True, False, True, False]


def test_only_a_living_daemons_own_records_make_it_a_holder() -> None:
    """Records of b's earlier daemon are no copies."""
    state = {(3, 40): both(*PARTS), (3, 60): {"b": told("b", *PARTS)}}
    assert newest_complete(job(state), NODES) == (3, 60)
    assert restorable(job(state), NODES) == ((3, 40),)
    anew = NODES | {"b": replace(NODES["b"], incarnation="b-2")}
    assert newest_complete(job(state), anew) == (3, 40)
    assert restorable(job(state), anew) == ()
    assert newest_complete(job(state), {"a": NODES["a"]}) == (3, 40)


def test_two_restorable_boundaries_are_kept_and_what_is_newer() -> None:
    """80 has one holder only, 60 and 40 have two: 20 may go. With one copy of 60, 20 is the second safe one."""
    state = {(3, boundary): both(*PARTS) for boundary in (20, 40, 60)} | {(3, 80): {"a": told("a", *PARTS)}}
    saved = CheckpointRecord(timeline=3, boundary=80, url="c")
    assert kept(job(state, checkpoint=saved), NODES) == {(3, 40), (3, 60), (3, 80)}
    state[3, 60] = {"a": told("a", *PARTS)}
    assert kept(job(state, checkpoint=saved), NODES) == {(3, 20), (3, 40), (3, 60), (3, 80)}


def test_a_due_checkpoint_is_of_the_jobs_past_and_written_once() -> None:
    """Of 40 on timeline 1 nothing is copied after the job went back to 20; back to 40 itself, that is still due."""
    state = {(1, 20): both(*PARTS), (1, 40): both(*PARTS), (3, 80): both(*PARTS), (3, 100): both(*PARTS)}
    assert due_checkpoint(job(state)) == (3, 80)
    longer = replace(PLAN, ancestry=((1, 40),))
    assert due_checkpoint(job(state, plan=longer)) == (1, 40)
    written = CheckpointRecord(timeline=1, boundary=40, url="c")
    assert due_checkpoint(job(state, plan=longer, checkpoint=written)) == (3, 80)
    assert due_checkpoint(job(state, checkpoint=CheckpointRecord(timeline=3, boundary=80, url="c"))) is None
    assert [copier(job(state), (3, 80), part, NODES) for part in PARTS] == ["a", "a", "b", "b"]


def test_a_due_checkpoint_that_a_stage_missed_gives_way() -> None:
    """b took no snapshot at 40: 40 is waited for until 80 is whole, then given up for 80."""
    half = {"a": told("a", *FRONT)}
    state = {(3, 40): half, (3, 60): both(*PARTS), (3, 80): half}
    assert due_checkpoint(job(state)) == (3, 40)
    state[3, 80] = {"a": told("a", *FRONT), "b": told("b", *BACK)}
    assert due_checkpoint(job(state)) == (3, 80)
    state[3, 40] = {"a": told("a", *FRONT), "b": told("b", *BACK)}
    assert due_checkpoint(job(state)) == (3, 40)


def test_a_boundary_that_a_stage_missed_goes_when_a_newer_one_is_safe() -> None:
    """b missed 60; 80 is safe: nobody will ever go back to 60."""
    state = {(3, boundary): both(*PARTS) for boundary in (40, 80)} | {(3, 60): {"a": told("a", *FRONT)}}
    saved = CheckpointRecord(timeline=3, boundary=80, url="c")
    assert kept(job(state, checkpoint=saved), NODES) == {(3, 40), (3, 80)}
    del state[3, 80]
    assert kept(job(state, checkpoint=saved), NODES) == {(3, 40), (3, 60)}


@pytest.mark.parametrize("checkpoint_every", [0, 40])
def test_a_node_alone_keeps_no_more_states_than_its_plan_counts(checkpoint_every: int) -> None:
    """Boundary after boundary on one node, the oldest waiting for a slow folder: those that are kept, and the next one
    while it is written, are as many as the plan has room for.
    """
    fault = FaultSpec(snapshot_every=20, checkpoint_every=checkpoint_every)
    spec = JobSpec(job=JobSection(name="j"), model=ModelSpec(num_hidden_layers=1), fault=fault)
    nodes, held, most = {"a": NODES["a"]}, set[tuple[int, int]](), 0
    for boundary in range(40, 400, 20):
        most = max(most, len(held) + 1)
        state = {place: {"a": told("a", *PARTS)} for place in {*held, (3, boundary)}}
        held = set(kept(job(state, submission=SpecRecord(spec=spec, uid="u")), nodes))
        assert (3, boundary) in held
        assert len(held) == min(2, boundary // 20 - 1)
    assert most == num_host_states(fault)


@pytest.mark.parametrize("has_begun_safe", [True, False])
@pytest.mark.parametrize("has_copies", [True, False])
def test_kept_files_stay_bounded_while_a_stage_misses_its_snapshots(has_begun_safe: bool, has_copies: bool) -> None:
    """a goes on to write, alone, for a thousand batches: what was safe stays, with a handful of what came after."""
    state = {(3, boundary): both(*PARTS) for boundary in (40, 60)} if has_begun_safe else {}
    state |= {(3, 80): {"a": told("a", *PARTS)}}
    alone = {"a": told("a", *FRONT)} | ({"b": told("b", *FRONT)} if has_copies else {})
    state |= {(3, boundary): alone for boundary in range(100, 1100, 20)}
    found = kept(job(state), NODES)
    assert set(state) - {(3, boundary) for boundary in range(100, 1100, 20)} <= found
    assert {(3, boundary) for boundary in range(1020, 1100, 20)} <= found
    assert len(found) <= 10


def test_safe_boundaries_stay_while_holders_register_again() -> None:
    """After an outage only a is back, with what it wrote meanwhile: 40 and 60 are whole again once b is back."""
    state = {(3, boundary): {"a": told("a", *FRONT)} for boundary in range(40, 400, 20)}
    assert {(3, 40), (3, 60)} <= kept(job(state), NODES)


def test_copies_that_lag_do_not_fill_the_store() -> None:
    """Every boundary is complete, none has its second copy: the oldest is copied next, the newest is gone back to."""
    state = {(3, boundary): {"a": told("a", *PARTS)} for boundary in range(40, 1040, 20)}
    found = kept(job(state), NODES)
    assert {(3, 40), (3, 1020)} <= found
    assert len(found) <= 6


def test_a_node_stays_while_a_job_would_go_back_further_without_it() -> None:
    """a alone has the front of 60. It may go once b has a copy, a checkpoint is as new, or 80 is complete without a."""
    state = {(3, 40): both(*PARTS), (3, 60): {"a": told("a", *FRONT), "b": told("b", *BACK)}}
    assert [depends_on(job(state), NODES, name) for name in "ab"] == [True, True]
    assert not depends_on(job(state, checkpoint=CheckpointRecord(timeline=3, boundary=60, url="c")), NODES, "a")
    assert not depends_on(job(state | {(3, 80): {"b": told("b", *PARTS)}}), NODES, "a")
    assert not depends_on(job(state | {(3, 60): {"a": told("a", *FRONT), "b": told("b", *PARTS)}}), NODES, "a")
    assert not depends_on(job(state), {"a": NODES["a"]}, "a"), "nobody is left who could take over"
    going = NODES | {"b": replace(NODES["b"], is_draining=True), "c": replace(NODES["a"], name="c", incarnation="c-1")}
    assert depends_on(job(state | {(3, 60): {"a": told("a", *FRONT), "b": told("b", *PARTS)}}), going, "a")
