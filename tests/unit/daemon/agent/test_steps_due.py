"""A node's next steps, scenario by scenario: a worker's life is walked through against the protocol's records."""

from dataclasses import replace
from typing import Any

import pytest

from headway.daemon.agent.local_state import is_over
from headway.daemon.agent.steps import Delete, Fetch, GiveUp, OpenData, Register, Upload
from headway.daemon.agent.steps_due import is_awaited, is_named, next_steps
from headway.daemon.cluster.records import CheckpointRecord, PlanRecord, Save, StopRecord, WorkerState
from headway.daemon.cluster.state_key import JOURNAL, StateKey
from headway.daemon.jobs.job import DataSpec, SourceSpec
from headway.daemon.worker.goal import (
    Action,
    Failure,
    Goal,
    Neighbour,
    Neighbours,
    Preparation,
    Source,
    SourceKind,
    Start,
    WorkerStatus,
    next_action,
)
from headway.stages.state.file_digest import FileDigest
from tests.rigs.agent_views import (
    BACK,
    FRONT,
    G1,
    G2,
    LAYERS,
    RUNNING,
    RUNNING_RECORD,
    SPLIT,
    STOP,
    STOPPED,
    STOPPED_RECORD,
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
    told_of_worker,
    view_of,
    worker,
)

# --- First start ------------------------------------------------------------------------------------------------------


def preparation(of: PlanRecord, *data_paths: str, position: int = 0) -> Preparation:
    """The goal of a worker that is to get ready."""
    return Preparation(plan=of, position=position, data_paths=data_paths, data_states=("",) * len(data_paths))


def test_the_first_stage_opens_its_data_before_it_prepares() -> None:
    """`next` names us as first stage and the data is not open: it is opened; then the worker is prepared with it."""
    view = view_of(job(next=WHOLE))
    assert due(view, node(worker(), data_paths={})) == [OpenData(0, G1)]
    assert due(view, node(worker())) == [Action.PREPARE]
    goal = goal_by(view, node(worker()))
    assert (goal.job, goal.prepare, goal.start) == ("j", preparation(WHOLE, "/data"), None)


def test_a_new_job_under_an_old_name_opens_its_own_data() -> None:
    """Data opened for a removed job is not reused for a new job of the same name."""
    view = view_of(job(next=WHOLE, data_sha256="sha-other"))
    assert due(view, node(worker())) == [OpenData(0, G1)]


def test_every_source_is_opened_before_the_first_stage_prepares() -> None:
    """One of two sources is open: the rest is opened; then the worker gets both paths in the order of the job."""
    mixed = job(next=WHOLE)
    assert mixed.spec is not None
    assert mixed.submission is not None
    sources = SourceSpec(source="a", sha256="sha-a"), SourceSpec(source="b", sha256="sha-b")
    spec = replace(mixed.spec, data=DataSpec(source="", sha256="sha-both", sources=sources))
    view = view_of(replace(mixed, submission=replace(mixed.submission, spec=spec)))
    assert due(view, node(worker(), data_paths={"sha-a": "/a"})) == [OpenData(0, G1)]
    both = node(worker(), data_paths={"sha-b": "/b", "sha-a": "/a"})
    assert goal_by(view, both).prepare == preparation(WHOLE, "/a", "/b")


def test_a_later_stage_needs_no_data() -> None:
    """Node b is the second stage: it prepares without data."""
    goal = goal_by(view_of(job(next=SPLIT)), node(worker(), name="b", data_paths={}))
    assert goal.prepare == preparation(SPLIT, position=1)


def test_a_goal_is_set_once_and_its_data_is_not_opened_again() -> None:
    """The worker gets ready. The agent has forgotten the data, which the next preparation verifies again."""
    view = view_of(job(next=WHOLE))
    busy = replace(worker(), goal=goal_by(view, node(worker())))
    assert next_steps(view, node(busy, data_paths={})) == []


@pytest.mark.parametrize(
    "status",
    [WorkerStatus(device_index=0), replace(worker(job="other", prepared=1), goal=Goal())],
    ids=["worker not up", "another job is being let go of"],
)
def test_prepare_waits(status: WorkerStatus) -> None:
    """The worker is not up, or serves another job."""
    assert due(view_of(job(next=WHOLE)), node(status)) == []


def test_a_prepared_worker_is_registered_as_ready_once() -> None:
    """The worker is ready: that is registered; when etcd says so, nothing is due."""
    status = worker(prepared=1)
    ready = record(WorkerState.READY)
    assert due(view_of(job(next=WHOLE)), node(status)) == [told_of_worker(1, ready, leaf="next")]
    assert due(view_of(job(next=WHOLE, workers={(1, 0): ready})), node(status)) == []


def test_a_plan_in_force_is_started_from_initial_weights() -> None:
    """The plan came into force at boundary 0: every layer, and the journal on the last stage, starts as initial."""
    view, status = view_of(job(plan=WHOLE, workers={(1, 0): record(WorkerState.READY)})), worker(prepared=1)
    assert due(view, node(status)) == [Action.START]
    start = start_by(view, node(status))
    assert start.sources == tuple(Source(layer, SourceKind.INITIAL) for layer in (*LAYERS, JOURNAL))
    assert (start.plan, start.position, start.neighbours) == (WHOLE, 0, Neighbours())


def test_start_waits_for_the_neighbours_address() -> None:
    """Stage 0 of 2 starts only when stage 1's worker is registered, and dials the address registered there."""
    first = plan(2, ("a", FRONT), ("b", BACK))
    status = worker(prepared=2)
    mine = {(2, 0): record(WorkerState.READY)}
    assert due(view_of(job(plan=first, workers=mine)), node(status)) == []
    both = mine | {(2, 1): record(WorkerState.READY, name="b")}
    start = start_by(view_of(job(plan=first, workers=both)), node(status))
    assert start.neighbours == Neighbours(downstream=(Neighbour(1, "a:1", "w"),))


def test_a_start_is_not_made_anew_while_the_worker_runs() -> None:
    """Its sources were live or have been deleted since."""
    running = replace(RUNNING, goal=Goal(job="j", start=Start(plan=WHOLE, position=0, state_dir="/s/j/1")))
    goal = goal_by(view_of(job(plan=WHOLE, workers=RUNNING_RECORD)), node(running))
    assert goal.start == running.goal.start


def test_a_damaged_file_is_replaced_before_the_worker_tries_again() -> None:
    """It refused a file, which was dropped: it is fetched; then the start says that it is the next attempt."""
    parts = (*LAYERS, JOURNAL)
    back = plan(2, ("a", LAYERS), source="nodes", boundary=5)
    view = view_of(
        job(
            plan=back,
            workers={(2, 0): record(WorkerState.READY)},
            state={(1, 5): {name: state_record(*parts, name=name) for name in "ab"}},
        )
    )
    waits = worker(prepared=2)
    waits = replace(now(waits, num_damaged=1), goal=goal_by(view, node(waits, held=held(*parts))))
    assert waits.goal.start is not None
    assert next_action(waits.goal, waits.actual) is None
    steps = due(view, node(waits, held=held(*parts[1:])))
    assert [step.key.layer for step in steps if isinstance(step, Fetch)] == ["embed"]
    assert due(view, node(waits, held=held(*parts))) == [Action.START]


def test_a_plan_for_an_earlier_incarnation_is_ignored() -> None:
    view = view_of(job(next=replace(WHOLE, workers=(replace(WHOLE.workers[0], node_incarnation="a-0"),))))
    assert next_steps(view, node(worker())) == []
    assert not is_named(view, "a", "a-1")


# --- A change ---------------------------------------------------------------------------------------------------------


def test_a_running_worker_prepares_the_next_plan_meanwhile() -> None:
    """`next` names the running worker too: it is prepared, and its running record stays."""
    view = view_of(job(plan=WHOLE, next=SPLIT, workers=RUNNING_RECORD))
    assert due(view, node(RUNNING)) == [Action.PREPARE]
    assert goal_by(view, node(RUNNING)).prepare == preparation(SPLIT, "/data")


def test_the_first_stage_chooses_where_to_stop_and_answers() -> None:
    """A stop without boundary: the worker is to choose; its choice is written into the stop record."""
    view = view_of(job(plan=WHOLE, workers=RUNNING_RECORD, stop=StopRecord(generation=1, save=Save.MOVES)))
    assert due(view, node(RUNNING)) == [Action.CHOOSE_STOP]
    assert due(view, node(now(RUNNING, chosen=5, stop_at=5))) == [
        Register("/headway/jobs/j/stop", "j", STOP, ("plan", "stop"), is_leased=False)
    ]


def test_later_stages_are_told_the_boundary() -> None:
    """Stage 1 does nothing while the boundary is open, then stops at it. The stage that chose it knows already."""
    two = plan(1, ("b", FRONT), ("a", BACK))
    workers = {(1, 1): record(WorkerState.RUNNING)}
    is_open = view_of(job(plan=two, workers=workers, stop=StopRecord(generation=1, save=Save.MOVES)))
    assert due(is_open, node(RUNNING)) == []
    known = view_of(job(plan=two, workers=workers, stop=StopRecord(generation=1, save=Save.MOVES, boundary=5)))
    assert due(known, node(RUNNING)) == [Action.STOP_AT]
    assert goal_by(known, node(RUNNING)).stop_at == 5
    assert due(known, node(now(RUNNING, chosen=5, stop_at=5))) == []


def test_only_layers_that_move_and_the_journal_are_written() -> None:
    """Stopped at 5 and the back half goes to b: those layers and the journal are written."""
    view = view_of(job(plan=WHOLE, next=SPLIT, stop=STOP, workers=STOPPED_RECORD))
    status = now(STOPPED, prepared=2)
    assert Action.WRITE in due(view, node(status))
    goal = goal_by(view, node(status))
    assert (goal.stop_at, goal.write) == (5, (*BACK, JOURNAL))
    assert next_action(goal, now(status, written=goal.write).actual) is None


def test_written_files_are_registered_once() -> None:
    """The files are in the store: they are registered in one record, unless etcd says so already."""
    files = held("block.1", "head", JOURNAL)
    record = state_record("block.1", "head", JOURNAL)
    fields: dict[str, Any] = {"plan": WHOLE, "next": SPLIT, "stop": STOP, "workers": STOPPED_RECORD}
    older = {(1, 5): {"a": state_record("head")}}
    status = node(now(STOPPED, prepared=2), held=files)
    steps = of_state(next_steps(view_of(job(state=older, **fields)), status))
    assert steps == [told_of_state(1, 5, record)]
    known = {(1, 5): {"a": record}}
    assert of_state(next_steps(view_of(job(state=known, **fields)), status)) == []


def test_layers_that_stay_are_taken_from_the_live_buffers() -> None:
    """The new plan is in force at 5: the front stays live here and starts at once."""
    after = replace(SPLIT, boundary=5)
    workers = {(2, 0): record(WorkerState.READY), (2, 1): record(WorkerState.READY, name="b")}
    start = start_by(view_of(job(plan=after, workers=workers)), node(now(STOPPED, prepared=2)))
    assert start.sources == (Source("embed", SourceKind.LIVE), Source("block.0", SourceKind.LIVE))


def test_a_node_fetches_its_new_layers_before_it_starts() -> None:
    """Node b takes over the back half: it fetches each file from a, then starts from the files."""
    after = replace(SPLIT, boundary=5)
    parts = (*BACK, JOURNAL)
    state = {(1, 5): {"a": state_record(*parts)}}
    workers = {(2, 0): record(WorkerState.READY), (2, 1): record(WorkerState.READY, name="b")}
    view = view_of(job(plan=after, workers=workers, state=state))
    status = worker(prepared=2)
    assert of_kind(next_steps(view, node(status, name="b")), Fetch) == [
        Fetch(0, G2, StateKey("j", 1, 5, part), ("a",), "", FileDigest(size_bytes=10, checksum=f"sha-{part}"))
        for part in parts
    ]
    start = start_by(view, node(status, name="b", held=held(*parts)))
    assert start.sources == tuple(Source(part, SourceKind.FILE, f"/s/{part}") for part in parts)


def test_live_state_at_another_boundary_is_not_used() -> None:
    """The worker stands at 5 and the plan begins at 7, for which nobody has files."""
    after = replace(SPLIT, boundary=7)
    workers = {(2, 0): record(WorkerState.READY), (2, 1): record(WorkerState.READY, name="b")}
    steps = due(view_of(job(plan=after, workers=workers)), node(now(STOPPED, prepared=2)))
    assert steps == [GiveUp(0, G2, f"no node holds {part} at boundary 7 of j, timeline 1") for part in FRONT]


# --- Pause and end ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_writes_everything_copies_it_and_registers_it_as_durable() -> None:
    """Stop with save checkpoint: all layers and the journal are written, copied, then registered."""
    stop = replace(STOP, save=Save.CHECKPOINT)
    view = view_of(job(plan=WHOLE, stop=stop, workers=STOPPED_RECORD))
    parts = (*LAYERS, JOURNAL)
    assert due(view, node(STOPPED)) == [Action.WRITE]
    assert goal_by(view, node(STOPPED)).write == parts
    files = held(*parts)
    registered = told_of_state(1, 5, state_record(*parts))
    assert due(view, node(STOPPED, held=files)) == [*map(Upload, files), registered]
    assert due(view, node(STOPPED, held=files, durable=set(files))) == [
        told_of_state(1, 5, state_record(*parts, durable=parts))
    ]


def test_a_checkpoint_copy_that_fails_is_reported_and_retried() -> None:
    """The reason is in the record, the copy stays due, and the worker has not failed."""
    stop = replace(STOP, save=Save.CHECKPOINT)
    parts = (*LAYERS, JOURNAL)
    files = held(*parts)
    head = StateKey("j", 1, 5, "head")
    view = view_of(job(plan=WHOLE, stop=stop, workers=STOPPED_RECORD))
    steps = due(view, node(STOPPED, held=files, durable=set(files) - {head}, troubles={head: "disk full"}))
    durable = tuple(part for part in parts if part != "head")
    told = replace(state_record(*parts, durable=durable), trouble="disk full")
    assert steps == [Upload(head), told_of_state(1, 5, told)]


def test_a_worker_at_its_last_boundary_is_registered_as_stopped() -> None:
    """The worker reaches the job's last batch without a stop order."""
    steps = due(view_of(job(plan=WHOLE, workers=RUNNING_RECORD)), node(now(RUNNING, boundary=5)))
    assert steps == [told_of_worker(1, record(WorkerState.STOPPED, boundary=5))]


def test_after_the_plan_is_over_the_worker_is_released_and_only_the_journal_kept() -> None:
    """The plan was deleted: Release is ordered once; layers are deleted, the newest journal is kept."""
    files = held("head", JOURNAL) | held(JOURNAL, boundary=3)
    serving = replace(STOPPED, goal=Goal(job="j"))
    assert due(view_of(job()), node(serving, held=files)) == [
        Action.RELEASE,
        Delete("j", 1, 3, (JOURNAL,)),
        told_of_state(1, 5, state_record(JOURNAL), has_plan=False),
        Delete("j", 1, 5, ("head",)),
    ]
    assert next_steps(view_of(job()), node(replace(STOPPED, goal=Goal()))) == []
    assert next_steps(view_of(job()), node(worker())) == []


def test_a_removed_job_leaves_nothing() -> None:
    """No key of the job is left: its journal goes too."""
    assert due(view_of(), node(worker(), held=held(JOURNAL))) == [Delete("j", 1, 5, (JOURNAL,))]


def test_a_job_starts_from_its_checkpoint() -> None:
    """Source checkpoint: files are fetched from its folder with the hashes of its record; a gap is a failure."""
    resumed = plan(1, ("a", LAYERS), source="checkpoint", boundary=5)
    files = {part: FileDigest(size_bytes=10, checksum=f"sha-{part}") for part in (*LAYERS, JOURNAL)}
    checkpoint = CheckpointRecord(timeline=1, boundary=5, url="c/j/5", files=files)
    workers = {(1, 0): record(WorkerState.READY)}
    status = worker(prepared=1)
    steps = due(view_of(job(plan=resumed, checkpoint=checkpoint, workers=workers)), node(status))
    assert steps == [Fetch(0, G1, StateKey("j", 1, 5, part), (), "c/j/5", files[part]) for part in (*LAYERS, JOURNAL)]
    gap = replace(checkpoint, files={part: file for part, file in files.items() if part != "head"})
    steps = due(view_of(job(plan=resumed, checkpoint=gap, workers=workers)), node(status))
    assert [step.reason for step in steps if isinstance(step, GiveUp)] == [
        "the checkpoint c/j/5 has no head at boundary 5 of j, timeline 1"
    ]


# --- Failure ----------------------------------------------------------------------------------------------------------


def test_a_dead_worker_fails_every_generation_it_served() -> None:
    """It ran generation 1 and was prepared for 2: both records say failed, with the reason; nothing else is ordered."""
    status = now(RUNNING, prepared=2).died(Failure("killed"))
    failed = replace(record(WorkerState.FAILED, error="killed"), incarnation="", address="", pid=0)
    view = view_of(job(plan=WHOLE, next=SPLIT, workers=RUNNING_RECORD))
    view.nodes["a"] = replace(view.nodes["a"], down_devices=(0,))
    assert due(view, node(status)) == [told_of_worker(2, failed, leaf="next"), told_of_worker(1, failed)]


def test_a_failure_is_reported_only_once_the_state_of_the_device_is_known() -> None:
    """The next plan follows the report, and must not count on a process that still imports."""
    dead = RUNNING.died(Failure("killed"))
    replaced = dead.attached("spare", pid=8, address="a:2")
    view = view_of(job(plan=WHOLE, workers=RUNNING_RECORD))
    assert not of_kind(next_steps(view, node(dead)), Register)
    assert of_kind(next_steps(view, node(replaced)), Register)
    view.nodes["a"] = replace(view.nodes["a"], down_devices=(0,))
    assert of_kind(next_steps(view, node(dead)), Register)
    assert not of_kind(next_steps(view, node(replaced)), Register)


def test_a_respawned_worker_does_not_take_up_a_failed_generation() -> None:
    """The generation stays failed until it is over, even with a new process."""
    status = replace(worker(), failures=RUNNING.died(Failure("killed")).failures)
    view = view_of(job(plan=WHOLE, workers={(1, 0): record(WorkerState.FAILED, error="killed")}))
    assert due(view, node(status)) == []
    assert not is_over(view, G1)
    assert is_over(view_of(job()), G1)


def test_the_death_of_an_idle_worker_fails_no_generation() -> None:
    assert worker().died(Failure("killed")).failures == {}


# --- Leaving ----------------------------------------------------------------------------------------------------------


def test_files_are_kept_until_every_worker_of_the_new_plan_runs() -> None:
    """Layers that moved off this node are needed while b is only ready."""
    after = plan(2, ("b", LAYERS), source="nodes", boundary=5)
    files = held("head", JOURNAL)
    ready = view_of(job(plan=after, workers={(2, 0): record(WorkerState.READY, name="b")}))
    assert is_awaited(ready, files)
    assert not is_named(ready, "a", "a-1")
    running = view_of(job(plan=after, workers={(2, 0): record(WorkerState.RUNNING, name="b")}))
    assert not is_awaited(running, files)
