"""A node's next steps, scenario by scenario: a worker's life is walked through against the protocol's records."""

from dataclasses import replace
from typing import Any

import pytest

from headway.daemon.agent.local_state import is_over
from headway.daemon.agent.steps import (
    AnswerStop,
    CopyToCheckpoint,
    DeleteState,
    FetchState,
    GiveUp,
    OpenData,
    RegisterState,
    RegisterWorker,
)
from headway.daemon.agent.steps_due import is_awaited, is_named, next_steps
from headway.daemon.jobs.job import DataSpec, SourceSpec
from headway.daemon.records.records import CheckpointRecord, Save, StopRecord, WorkerState
from headway.daemon.storage.state_key import JOURNAL, StateKey
from headway.daemon.workers.orders import (
    Neighbour,
    Neighbours,
    OrderChooseStop,
    OrderPrepare,
    OrderRelease,
    OrderStart,
    OrderStopAt,
    OrderWrite,
    Source,
    SourceKind,
)
from headway.daemon.workers.status import Failure, JobGeneration, OrderKind, Standstill, WorkerStatus
from headway.stages.state.file_digest import FileDigest
from tests.unit.daemon.agent.order_views import (
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

# --- First start ------------------------------------------------------------------------------------------------------


def test_the_first_stage_opens_its_data_before_it_prepares() -> None:
    """`next` names us as first stage and the data is not open: it is opened; then the worker is prepared with it."""
    view = view_of(job(next=WHOLE))
    assert next_steps(view, node(worker(), data_paths={})) == [OpenData(0, G1)]
    assert next_steps(view, node(worker())) == [OrderPrepare(0, G1, 0, WHOLE, ("/data",))]


def test_a_new_job_under_an_old_name_opens_its_own_data() -> None:
    """Data opened for a removed job is not reused for a new job of the same name."""
    view = view_of(job(next=WHOLE, data_sha256="sha-other"))
    assert next_steps(view, node(worker())) == [OpenData(0, G1)]


def test_every_source_is_opened_before_the_first_stage_prepares() -> None:
    """One of two sources is open: the rest is opened; then the worker gets both paths in the order of the job."""
    mixed = job(next=WHOLE)
    assert mixed.spec is not None
    assert mixed.submission is not None
    sources = SourceSpec(source="a", sha256="sha-a"), SourceSpec(source="b", sha256="sha-b")
    spec = replace(mixed.spec, data=DataSpec(source="", sha256="sha-both", sources=sources))
    view = view_of(replace(mixed, submission=replace(mixed.submission, spec=spec)))
    assert next_steps(view, node(worker(), data_paths={"sha-a": "/a"})) == [OpenData(0, G1)]
    both = {"sha-b": "/b", "sha-a": "/a"}
    assert next_steps(view, node(worker(), data_paths=both)) == [OrderPrepare(0, G1, 0, WHOLE, ("/a", "/b"))]


def test_a_later_stage_needs_no_data() -> None:
    """Node b is the second stage: it prepares without data."""
    steps = next_steps(view_of(job(next=SPLIT)), node(worker(), name="b", data_paths={}))
    assert steps == [OrderPrepare(0, G2, 1, SPLIT, ())]


@pytest.mark.parametrize(
    "status",
    [
        worker().ordered(OrderKind.PREPARE, G1),
        WorkerStatus(device_index=0),
        worker(job="other", prepared=JobGeneration("other", 1)).ordered(OrderKind.RELEASE, JobGeneration("other", 0)),
    ],
    ids=["order under way", "worker not up", "another job is being let go of"],
)
def test_prepare_waits(status: WorkerStatus) -> None:
    """No Prepare is ordered while one is under way, the worker is not up, or it serves another job."""
    assert next_steps(view_of(job(next=WHOLE)), node(status)) == []


def test_a_prepared_worker_is_registered_as_ready_once() -> None:
    """The worker answered: `ready` is registered; when etcd says so, nothing is due."""
    status = worker().ordered(OrderKind.PREPARE, G1).did_prepare(G1)
    ready = record(WorkerState.READY)
    assert next_steps(view_of(job(next=WHOLE)), node(status)) == [RegisterWorker(G1, 0, ready)]
    assert next_steps(view_of(job(next=WHOLE, workers={(1, 0): ready})), node(status)) == []


def test_a_plan_in_force_is_started_from_initial_weights() -> None:
    """The plan came into force at boundary 0: every layer, and the journal on the last stage, starts as initial."""
    status = worker().did_prepare(G1)
    steps = next_steps(view_of(job(plan=WHOLE, workers={(1, 0): record(WorkerState.READY)})), node(status))
    sources = tuple(Source(layer, SourceKind.INITIAL) for layer in (*LAYERS, JOURNAL))
    assert steps == [OrderStart(0, G1, 0, WHOLE, sources, Neighbours())]


def test_start_waits_for_the_neighbours_address() -> None:
    """Stage 0 of 2 starts only when stage 1's worker is registered, and dials the address registered there."""
    first = plan(2, ("a", FRONT), ("b", BACK))
    status = worker().did_prepare(G2)
    mine = {(2, 0): record(WorkerState.READY)}
    assert next_steps(view_of(job(plan=first, workers=mine)), node(status)) == []
    both = mine | {(2, 1): record(WorkerState.READY, name="b")}
    (start,) = next_steps(view_of(job(plan=first, workers=both)), node(status))
    assert isinstance(start, OrderStart)
    assert start.neighbours == Neighbours(downstream=(Neighbour(1, "a:1", "w"),))


def test_a_plan_for_an_earlier_incarnation_is_ignored() -> None:
    view = view_of(job(next=replace(WHOLE, workers=(replace(WHOLE.workers[0], node_incarnation="a-0"),))))
    assert next_steps(view, node(worker())) == []
    assert not is_named(view, "a", "a-1")


# --- A change ---------------------------------------------------------------------------------------------------------


def test_a_running_worker_prepares_the_next_plan_meanwhile() -> None:
    """`next` names the running worker too: it is prepared, and its running record stays."""
    steps = next_steps(view_of(job(plan=WHOLE, next=SPLIT, workers=RUNNING_RECORD)), node(RUNNING))
    assert steps == [OrderPrepare(0, G2, 0, SPLIT, ("/data",))]


def test_the_first_stage_chooses_where_to_stop_and_answers() -> None:
    """A stop without boundary: ChooseStop is ordered once; its answer is written into the stop record."""
    view = view_of(job(plan=WHOLE, workers=RUNNING_RECORD, stop=StopRecord(generation=1, save=Save.MOVES)))
    assert next_steps(view, node(RUNNING)) == [OrderChooseStop(0, G1)]
    assert next_steps(view, node(RUNNING.ordered(OrderKind.CHOOSE_STOP, G1))) == []
    chosen = RUNNING.did_choose(Standstill(G1, 5))
    assert next_steps(view, node(chosen)) == [AnswerStop(G1, 5)]


def test_later_stages_are_told_the_boundary() -> None:
    """Stage 1 does nothing while the boundary is open, then stops at it."""
    two = plan(1, ("b", FRONT), ("a", BACK))
    workers = {(1, 1): record(WorkerState.RUNNING)}
    is_open = view_of(job(plan=two, workers=workers, stop=StopRecord(generation=1, save=Save.MOVES)))
    assert next_steps(is_open, node(RUNNING)) == []
    known = view_of(job(plan=two, workers=workers, stop=StopRecord(generation=1, save=Save.MOVES, boundary=5)))
    assert next_steps(known, node(RUNNING)) == [OrderStopAt(0, G1, 5)]


def test_only_layers_that_move_and_the_journal_are_written() -> None:
    """Stopped at 5 and the back half goes to b: those layers and the journal are written."""
    view = view_of(job(plan=WHOLE, next=SPLIT, stop=STOP, workers=STOPPED_RECORD))
    status = STOPPED.did_prepare(G2)
    written = of_kind(next_steps(view, node(status)), OrderWrite)
    assert written == [OrderWrite(0, G1, 1, 5, (*BACK, JOURNAL))]
    assert of_kind(next_steps(view, node(status.ordered(OrderKind.WRITE, G1))), OrderWrite) == []


def test_written_files_are_registered_once() -> None:
    """The files are in the store: they are registered in one record, unless etcd says so already."""
    files = held("block.1", "head", JOURNAL)
    record = state_record("block.1", "head", JOURNAL)
    fields: dict[str, Any] = {"plan": WHOLE, "next": SPLIT, "stop": STOP, "workers": STOPPED_RECORD}
    older = {(1, 5): {"a": state_record("head")}}
    status = node(STOPPED.did_prepare(G2), held=files)
    steps = of_kind(next_steps(view_of(job(state=older, **fields)), status), RegisterState)
    assert steps == [RegisterState("j", 1, 5, record)]
    known = {(1, 5): {"a": record}}
    assert of_kind(next_steps(view_of(job(state=known, **fields)), status), RegisterState) == []


def test_layers_that_stay_are_taken_from_the_live_buffers() -> None:
    """The new plan is in force at 5: the front stays live here and starts at once."""
    after = replace(SPLIT, boundary=5)
    workers = {(2, 0): record(WorkerState.READY), (2, 1): record(WorkerState.READY, name="b")}
    (start,) = of_kind(next_steps(view_of(job(plan=after, workers=workers)), node(STOPPED.did_prepare(G2))), OrderStart)
    assert isinstance(start, OrderStart)
    assert start.sources == (Source("embed", SourceKind.LIVE), Source("block.0", SourceKind.LIVE))


def test_a_node_fetches_its_new_layers_before_it_starts() -> None:
    """Node b takes over the back half: it fetches each file from a, then starts from the files."""
    after = replace(SPLIT, boundary=5)
    parts = (*BACK, JOURNAL)
    state = {(1, 5): {"a": state_record(*parts)}}
    workers = {(2, 0): record(WorkerState.READY), (2, 1): record(WorkerState.READY, name="b")}
    view = view_of(job(plan=after, workers=workers, state=state))
    status = worker().did_prepare(G2)
    assert of_kind(next_steps(view, node(status, name="b")), FetchState) == [
        FetchState(0, G2, StateKey("j", 1, 5, part), ("a",), "", FileDigest(size_bytes=10, checksum=f"sha-{part}"))
        for part in parts
    ]
    (start,) = of_kind(next_steps(view, node(status, name="b", held=held(*parts))), OrderStart)
    assert isinstance(start, OrderStart)
    assert start.sources == tuple(Source(part, SourceKind.FILE, f"/s/{part}") for part in parts)


def test_live_state_at_another_boundary_is_not_used() -> None:
    """The worker stands at 5 and the plan begins at 7, for which nobody has files."""
    after = replace(SPLIT, boundary=7)
    workers = {(2, 0): record(WorkerState.READY), (2, 1): record(WorkerState.READY, name="b")}
    steps = next_steps(view_of(job(plan=after, workers=workers)), node(STOPPED.did_prepare(G2)))
    assert steps == [GiveUp(0, G2, f"no node holds {part} at boundary 7 of j, timeline 1") for part in FRONT]


# --- Pause and end ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_writes_everything_copies_it_and_registers_it_as_durable() -> None:
    """Stop with save checkpoint: all layers and the journal are written, copied, then registered."""
    stop = replace(STOP, save=Save.CHECKPOINT)
    view = view_of(job(plan=WHOLE, stop=stop, workers=STOPPED_RECORD))
    parts = (*LAYERS, JOURNAL)
    assert next_steps(view, node(STOPPED)) == [OrderWrite(0, G1, 1, 5, parts)]
    files = held(*parts)
    registered = RegisterState("j", 1, 5, state_record(*parts))
    assert next_steps(view, node(STOPPED, held=files)) == [*map(CopyToCheckpoint, files), registered]
    assert next_steps(view, node(STOPPED, held=files, durable=set(files))) == [
        RegisterState("j", 1, 5, state_record(*parts, durable=parts))
    ]


def test_a_checkpoint_copy_that_fails_is_reported_and_retried() -> None:
    """The reason is in the record, the copy stays due, and the worker has not failed."""
    stop = replace(STOP, save=Save.CHECKPOINT)
    parts = (*LAYERS, JOURNAL)
    files = held(*parts)
    head = StateKey("j", 1, 5, "head")
    view = view_of(job(plan=WHOLE, stop=stop, workers=STOPPED_RECORD))
    steps = next_steps(view, node(STOPPED, held=files, durable=set(files) - {head}, troubles={head: "disk full"}))
    durable = tuple(part for part in parts if part != "head")
    told = replace(state_record(*parts, durable=durable), trouble="disk full")
    assert steps == [CopyToCheckpoint(head), RegisterState("j", 1, 5, told)]


def test_a_worker_at_its_last_boundary_is_registered_as_stopped() -> None:
    """The worker reaches the job's last batch without a stop order."""
    steps = next_steps(view_of(job(plan=WHOLE, workers=RUNNING_RECORD)), node(RUNNING.did_stop(Standstill(G1, 5))))
    assert steps == [RegisterWorker(G1, 0, record(WorkerState.STOPPED, boundary=5))]


def test_after_the_plan_is_over_the_worker_is_released_and_only_the_journal_kept() -> None:
    """The plan was deleted: Release is ordered once; layers are deleted, the newest journal is kept."""
    files = held("head", JOURNAL) | held(JOURNAL, boundary=3)
    steps = next_steps(view_of(job()), node(STOPPED, held=files))
    assert steps == [
        OrderRelease(0, "j"),
        DeleteState("j", 1, 3, (JOURNAL,)),
        RegisterState("j", 1, 5, state_record(JOURNAL)),
        DeleteState("j", 1, 5, ("head",)),
    ]
    releasing = STOPPED.ordered(OrderKind.RELEASE, JobGeneration("j", 0))
    assert of_kind(next_steps(view_of(job()), node(releasing)), OrderRelease) == []
    assert of_kind(next_steps(view_of(job()), node(STOPPED.released())), OrderRelease) == []


def test_a_removed_job_leaves_nothing() -> None:
    """No key of the job is left: its journal goes too."""
    assert next_steps(view_of(), node(worker(), held=held(JOURNAL))) == [DeleteState("j", 1, 5, (JOURNAL,))]


def test_a_job_starts_from_its_checkpoint() -> None:
    """Source checkpoint: files are fetched from its folder with the hashes of its record; a gap is a failure."""
    resumed = plan(1, ("a", LAYERS), source="checkpoint", boundary=5)
    files = {part: FileDigest(size_bytes=10, checksum=f"sha-{part}") for part in (*LAYERS, JOURNAL)}
    checkpoint = CheckpointRecord(timeline=1, boundary=5, url="c/j/5", files=files)
    workers = {(1, 0): record(WorkerState.READY)}
    status = worker().did_prepare(G1)
    steps = next_steps(view_of(job(plan=resumed, checkpoint=checkpoint, workers=workers)), node(status))
    assert steps == [
        FetchState(0, G1, StateKey("j", 1, 5, part), (), "c/j/5", files[part]) for part in (*LAYERS, JOURNAL)
    ]
    gap = replace(checkpoint, files={part: file for part, file in files.items() if part != "head"})
    steps = next_steps(view_of(job(plan=resumed, checkpoint=gap, workers=workers)), node(status))
    assert [step.reason for step in steps if isinstance(step, GiveUp)] == [
        "the checkpoint c/j/5 has no head at boundary 5 of j, timeline 1"
    ]


# --- Failure ----------------------------------------------------------------------------------------------------------


def test_a_dead_worker_fails_every_generation_it_served() -> None:
    """It ran generation 1 and was prepared for 2: both records say failed, with the reason; nothing else is ordered."""
    status = RUNNING.did_prepare(G2).died(Failure("killed"))
    failed = replace(record(WorkerState.FAILED, error="killed"), incarnation="", address="", pid=0)
    view = view_of(job(plan=WHOLE, next=SPLIT, workers=RUNNING_RECORD))
    view.nodes["a"] = replace(view.nodes["a"], down_devices=(0,))
    assert next_steps(view, node(status)) == [RegisterWorker(G2, 0, failed), RegisterWorker(G1, 0, failed)]


def test_a_failure_is_reported_only_once_the_state_of_the_device_is_known() -> None:
    """The next plan follows the report, and must not count on a process that still imports."""
    dead = RUNNING.died(Failure("killed"))
    replaced = dead.attached("spare", pid=8, address="a:2")
    view = view_of(job(plan=WHOLE, workers=RUNNING_RECORD))
    assert not of_kind(next_steps(view, node(dead)), RegisterWorker)
    assert of_kind(next_steps(view, node(replaced)), RegisterWorker)
    view.nodes["a"] = replace(view.nodes["a"], down_devices=(0,))
    assert of_kind(next_steps(view, node(dead)), RegisterWorker)
    assert not of_kind(next_steps(view, node(replaced)), RegisterWorker)


def test_a_respawned_worker_does_not_take_up_a_failed_generation() -> None:
    """The generation stays failed until it is over, even with a new process."""
    status = replace(worker(), failures=RUNNING.died(Failure("killed")).failures)
    view = view_of(job(plan=WHOLE, workers={(1, 0): record(WorkerState.FAILED, error="killed")}))
    assert next_steps(view, node(status)) == []
    assert not is_over(view, G1)
    assert is_over(view_of(job()), G1)


def test_the_death_of_an_idle_worker_fails_no_generation() -> None:
    assert STOPPED.released().died(Failure("killed")).failures == {}


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
