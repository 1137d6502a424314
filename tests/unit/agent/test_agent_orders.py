"""What a node does next, scenario by scenario: a worker's life is walked through against the protocol's records."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.coordination.cluster_view import ClusterView, JobView
from headway.daemon.jobs.job import DataSpec, JobSection, JobSpec
from headway.daemon.node.agent_orders import is_awaited, is_named, is_over, next_steps
from headway.daemon.node.agent_steps import (
    AnswerStop,
    CopyToCheckpoint,
    DeleteState,
    FetchState,
    GiveUp,
    Neighbour,
    Neighbours,
    OpenData,
    OrderChooseStop,
    OrderPrepare,
    OrderRelease,
    OrderStart,
    OrderStopAt,
    OrderWrite,
    RegisterState,
    RegisterWorker,
    Source,
    SourceKind,
    Step,
)
from headway.daemon.node.layer_sources import HEARD_AFTER_S
from headway.daemon.node.node_state import NodeState
from headway.daemon.records import (
    CheckpointFile,
    CheckpointRecord,
    NodeRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    Save,
    SpecRecord,
    StagePlan,
    StateFile,
    StateRecord,
    StopRecord,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.storage.state_key import JOURNAL, StateKey, StoredFile
from headway.daemon.supervision.worker_status import Failure, JobGeneration, OrderKind, Standstill, WorkerStatus
from headway.stages.spec import ModelSpec

LAYERS = ("embed", "block.0", "block.1", "head")
G1, G2 = JobGeneration("j", 1), JobGeneration("j", 2)


def plan(
    generation: int, *stages: tuple[str, tuple[str, ...]], source: str = "initial", boundary: int = 0
) -> PlanRecord:
    """A plan whose stages are (node, layers)."""
    return PlanRecord(
        generation=generation,
        timeline=1,
        boundary=boundary,
        source=source,
        source_timeline=1,
        stages=tuple(
            StagePlan(node=node, node_incarnation=f"{node}-1", device_index=0, layers=layers, depth=4)
            for node, layers in stages
        ),
    )


def view_of(job: JobView | None = None) -> ClusterView:
    """A cluster with one job, or none."""
    nodes = {name: node_record(name) for name in "abc"}
    return ClusterView(jobs={job.name: job} if job is not None else {}, nodes=nodes, steady_since=-1000.0)


def node_record(name: str, incarnation: str = "") -> NodeRecord:
    """What node `name` says of itself."""
    return NodeRecord(
        name=name, incarnation=incarnation or f"{name}-1", address=f"{name}:1", host=name, site="", devices=(),
        memory_bytes=0, arithmetic_class="",
    )  # fmt: skip


def job(*, data_sha256: str = "sha-data", **fields: object) -> JobView:
    """A submitted job with these records."""
    spec = JobSpec(job=JobSection(name="j"), model=ModelSpec(num_hidden_layers=2), data=DataSpec(sha256=data_sha256))
    return JobView(name="j", submission=SpecRecord(spec=spec), **fields)  # type: ignore[arg-type]


def worker(**fields: object) -> WorkerStatus:
    """The worker of device 0, attached."""
    known: dict[str, object] = {"device_index": 0, "incarnation": "w", "pid": 7, "address": "a:1"}
    return WorkerStatus(**(known | fields))  # type: ignore[arg-type]


def node(status: WorkerStatus, *, name: str = "a", **fields: object) -> NodeState:
    """Node `a` with one worker and its data at hand."""
    known: dict[str, object] = {"data_paths": {"sha-data": "/data"}}
    return NodeState(name=name, incarnation=f"{name}-1", workers=(status,), **(known | fields))  # type: ignore[arg-type]


def record(state: WorkerState, *, name: str = "a", boundary: int | None = None, error: str = "") -> WorkerRecord:
    """What node `name` says of its worker."""
    return WorkerRecord(
        node=name, incarnation="w", address="a:1", pid=7, state=state, boundary=boundary, error=error, proven=()
    )


def held(*layers: str, boundary: int = 5) -> dict[StateKey, StoredFile]:
    """Files of these layers in the store."""
    return {StateKey("j", 1, boundary, layer): StoredFile(Path(f"/s/{layer}"), 10, f"sha-{layer}") for layer in layers}


def state_record(*layers: str, name: str = "a", durable: tuple[str, ...] = (), generation: int = 0) -> StateRecord:
    """What etcd says of such files on node `name`."""
    files = {
        layer: StateFile(size_bytes=10, checksum=f"sha-{layer}", is_durable=layer in durable)
        for layer in sorted(layers)
    }
    return StateRecord(incarnation=f"{name}-1", generation=generation, files=files)


def of_kind(steps: list[Step], kind: type[Step]) -> list[Step]:
    return [step for step in steps if isinstance(step, kind)]


WHOLE = plan(1, ("a", LAYERS))
FRONT, BACK = LAYERS[:2], LAYERS[2:]
SPLIT = plan(2, ("a", FRONT), ("b", BACK), source="nodes")


# --- First start ------------------------------------------------------------------------------------------------------


def test_the_first_stage_opens_its_data_before_it_prepares() -> None:
    """`next` names us as first stage and the data is not open: it is opened; then the worker is prepared with it."""
    view = view_of(job(next=WHOLE))
    assert next_steps(view, node(worker(), data_paths={})) == [OpenData(0, G1)]
    assert next_steps(view, node(worker())) == [OrderPrepare(0, G1, 0, WHOLE, "/data")]


def test_a_new_job_under_an_old_name_opens_its_own_data() -> None:
    """Data that was opened for a job that is gone is not another job's, though that has its name."""
    view = view_of(job(next=WHOLE, data_sha256="sha-other"))
    assert next_steps(view, node(worker())) == [OpenData(0, G1)]


def test_a_later_stage_needs_no_data() -> None:
    """Node b is the second stage: it prepares without data."""
    steps = next_steps(view_of(job(next=SPLIT)), node(worker(), name="b", data_paths={}))
    assert steps == [OrderPrepare(0, G2, 1, SPLIT, "")]


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
    """Nothing is ordered while the order is under way, the worker is not up, or it still serves another job."""
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


def test_a_plan_of_an_earlier_incarnation_is_not_ours() -> None:
    """The plan names our name but another incarnation: nothing is done about it."""
    view = view_of(job(next=replace(WHOLE, stages=(replace(WHOLE.stages[0], node_incarnation="a-0"),))))
    assert next_steps(view, node(worker())) == []
    assert not is_named(view, "a", "a-1")


# --- A change ---------------------------------------------------------------------------------------------------------

RUNNING = worker(job="j", prepared=G1, started=G1, layers=LAYERS, has_journal=True)
RUNNING_RECORD = {(1, 0): record(WorkerState.RUNNING)}


def test_a_running_worker_prepares_the_next_plan_meanwhile() -> None:
    """`next` names the running worker too: it is prepared, and its running record stays."""
    steps = next_steps(view_of(job(plan=WHOLE, next=SPLIT, workers=RUNNING_RECORD)), node(RUNNING))
    assert steps == [OrderPrepare(0, G2, 0, SPLIT, "/data")]


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


STOPPED = RUNNING.did_choose(Standstill(G1, 5)).did_stop(Standstill(G1, 5))
STOPPED_RECORD = {(1, 0): record(WorkerState.STOPPED, boundary=5)}
STOP = StopRecord(generation=1, save=Save.MOVES, boundary=5)


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


def test_layers_that_came_are_fetched_from_their_holders_first() -> None:
    """Node b got the back half: it fetches each file from a, and starts from the files when they are there."""
    after = replace(SPLIT, boundary=5)
    parts = (*BACK, JOURNAL)
    state = {(1, 5): {"a": state_record(*parts)}}
    workers = {(2, 0): record(WorkerState.READY), (2, 1): record(WorkerState.READY, name="b")}
    view = view_of(job(plan=after, workers=workers, state=state))
    status = worker().did_prepare(G2)
    assert of_kind(next_steps(view, node(status, name="b")), FetchState) == [
        FetchState(0, G2, StateKey("j", 1, 5, part), ("a",), "", CheckpointFile(size_bytes=10, checksum=f"sha-{part}"))
        for part in parts
    ]
    (start,) = of_kind(next_steps(view, node(status, name="b", held=held(*parts))), OrderStart)
    assert isinstance(start, OrderStart)
    assert start.sources == tuple(Source(part, SourceKind.FILE, f"/s/{part}") for part in parts)


def test_a_worker_at_another_boundary_is_not_live() -> None:
    """The worker stands at 5 and the plan begins at 7: nothing is taken from its buffers, and nobody has files."""
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


def test_a_checkpoint_that_cannot_be_written_is_told_and_tried_again() -> None:
    """One copy failed: its reason is in the record, the copy stays due, and the worker has not failed."""
    stop = replace(STOP, save=Save.CHECKPOINT)
    parts = (*LAYERS, JOURNAL)
    files = held(*parts)
    head = StateKey("j", 1, 5, "head")
    view = view_of(job(plan=WHOLE, stop=stop, workers=STOPPED_RECORD))
    steps = next_steps(view, node(STOPPED, held=files, durable=set(files) - {head}, troubles={head: "disk full"}))
    durable = tuple(part for part in parts if part != "head")
    told = replace(state_record(*parts, durable=durable), trouble="disk full")
    assert steps == [CopyToCheckpoint(head), RegisterState("j", 1, 5, told)]


def test_a_worker_that_came_to_the_end_by_itself_is_registered_as_stopped() -> None:
    """No stop was asked for and the worker stands at B: `stopped` at B is registered."""
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
    files = {part: CheckpointFile(size_bytes=10, checksum=f"sha-{part}") for part in (*LAYERS, JOURNAL)}
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


def test_a_failure_is_told_only_when_it_is_known_whether_the_device_has_a_worker() -> None:
    """The next plan is made as soon as the failure is told, and must not count on a process that still imports."""
    dead = RUNNING.died(Failure("killed"))
    replaced = dead.attached("spare", pid=8, address="a:2")
    view = view_of(job(plan=WHOLE, workers=RUNNING_RECORD))
    assert not of_kind(next_steps(view, node(dead)), RegisterWorker)
    assert of_kind(next_steps(view, node(replaced)), RegisterWorker)
    view.nodes["a"] = replace(view.nodes["a"], down_devices=(0,))
    assert of_kind(next_steps(view, node(dead)), RegisterWorker)
    assert not of_kind(next_steps(view, node(replaced)), RegisterWorker)


def test_a_respawned_worker_does_not_take_up_a_failed_generation() -> None:
    """The process is back; the generation stays failed, whatever the plan says, until it is over."""
    status = replace(worker(), failures=RUNNING.died(Failure("killed")).failures)
    view = view_of(job(plan=WHOLE, workers={(1, 0): record(WorkerState.FAILED, error="killed")}))
    assert next_steps(view, node(status)) == []
    assert not is_over(view, G1)
    assert is_over(view_of(job()), G1)


def test_an_idle_workers_death_fails_nothing() -> None:
    """It served no job when it died: there is no failure to tell."""
    assert STOPPED.released().died(Failure("killed")).failures == {}


# --- Leaving ----------------------------------------------------------------------------------------------------------


def test_files_are_awaited_until_every_worker_of_the_new_plan_runs() -> None:
    """The layers that moved off this node are needed while b only is ready, and not when it runs."""
    after = plan(2, ("b", LAYERS), source="nodes", boundary=5)
    files = held("head", JOURNAL)
    ready = view_of(job(plan=after, workers={(2, 0): record(WorkerState.READY, name="b")}))
    assert is_awaited(ready, files)
    assert not is_named(ready, "a", "a-1")
    running = view_of(job(plan=after, workers={(2, 0): record(WorkerState.RUNNING, name="b")}))
    assert not is_awaited(running, files)


# --- Recovery ---------------------------------------------------------------------------------------------------------

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
