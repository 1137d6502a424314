"""A node registers, keeps and deletes files, and copies them to durable storage."""

from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.agent.local_state import NodeState, generations_seen
from headway.daemon.agent.state_steps import KEPT_AFTER_RESTORE_S, is_welcome, state_steps
from headway.daemon.agent.steps import Delete, Fetch, Register, Step, Upload
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import (
    CheckpointRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    Save,
    SpecRecord,
    StateFile,
    StateRecord,
    StopRecord,
    WorkerPart,
    WorkerRecord,
    WorkerState,
    seen_key,
)
from headway.daemon.cluster.state_key import JOURNAL, StateKey, StoredFile
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec
from headway.stages.spec import ModelSpec
from tests.rigs.agent_views import node_record, told_of_state, worker

LAYERS = ("embed", "block.0", "head")
PARTS = (*LAYERS, JOURNAL)
PLAN = PlanRecord(
    generation=3,
    timeline=3,
    ancestry=((1, 20),),
    workers=(
        WorkerPart(node="a", node_incarnation="a-1", device_index=0, layers=LAYERS[:2], depth=4),
        WorkerPart(node="b", node_incarnation="b-1", device_index=0, layers=LAYERS[2:], depth=4),
    ),
)


def spec(**fault: int) -> JobSpec:
    return JobSpec(job=JobSection(name="j"), model=ModelSpec(num_hidden_layers=1), fault=FaultSpec(**fault))  # type: ignore[arg-type]


def job(state: dict[tuple[int, int], dict[str, StateRecord]], **fields: object) -> JobView:
    """A job that runs on a and b on timeline 3, which began at boundary 20 of timeline 1."""
    running = WorkerRecord(node="a", incarnation="w", address="a:1", pid=1, state=WorkerState.RUNNING)
    known: dict[str, object] = {
        "plan": PLAN,
        "phase": PhaseRecord(phase=Phase.RUNNING, generation=3),
        "workers": {(3, 0): running, (3, 1): replace(running, node="b")},
        "submission": SpecRecord(spec=spec(), uid="u"),
        "state": state,
    }
    return JobView(name="j", **(known | fields))  # type: ignore[arg-type]


def view(of: JobView | None) -> ClusterView:
    """Nodes a and b."""
    nodes = {name: node_record(name) for name in "ab"}
    return ClusterView(jobs={"j": of} if of is not None else {}, nodes=nodes)


def told(name: str, *parts: str) -> StateRecord:
    """Return the registration of node `name`."""
    files = {part: StateFile(size_bytes=10, checksum=f"sha-{part}") for part in sorted(parts)}
    return StateRecord(incarnation=f"{name}-1", generation=3, files=files)


def both(*parts: str) -> dict[str, StateRecord]:
    """Both nodes hold these."""
    return {"a": told("a", *parts), "b": told("b", *parts)}


def node(*places: tuple[int, int], parts: tuple[str, ...] = PARTS, uid: str = "u", **fields: object) -> NodeState:
    """Node a with files of these boundaries."""
    held = {
        StateKey("j", *place, part): StoredFile(
            path=Path(f"/s/{place[1]}/{part}"), size_bytes=10, checksum=f"sha-{part}", generation=3, uid=uid
        )
        for place in places
        for part in parts
    }
    known: dict[str, object] = {"workers": ()}
    return NodeState(name="a", incarnation="a-1", held=held, **(known | fields))  # type: ignore[arg-type]


def steps(of: JobView | None, state: NodeState) -> list[Step]:
    return list(state_steps(view(of), state))


def test_a_snapshot_is_registered_in_one_record() -> None:
    """All new files of boundary 40 go into a single record."""
    assert steps(job({}), node((3, 40))) == [told_of_state(3, 40, told("a", *PARTS))]
    assert steps(job({(3, 40): {"a": told("a", *PARTS)}}), node((3, 40))) == []


def test_a_lapsed_registration_is_due_again() -> None:
    """The lease lapsed and this node's record went, so it is written again; b's record is still there."""
    assert steps(job({(3, 40): {"b": told("b", *PARTS)}}), node((3, 40))) == [told_of_state(3, 40, told("a", *PARTS))]


def test_a_record_of_an_earlier_daemon_is_replaced_or_deleted() -> None:
    """Its files went with that daemon."""
    old = {(3, 40): {"a": replace(told("a", *PARTS), incarnation="a-0")}}
    assert steps(job(old), node()) == [told_of_state(3, 40, None)]
    assert steps(job(old), node((3, 40))) == [told_of_state(3, 40, told("a", *PARTS))]


def test_the_third_restorable_boundary_is_unregistered_and_then_deleted() -> None:
    """80, 60 and 40 are restorable: the files of 40 go once the view shows that it is unregistered."""
    three = {(3, boundary): both(*PARTS) for boundary in (40, 60, 80)}
    mine = node((3, 40), (3, 60), (3, 80))
    assert steps(job(three), mine) == [told_of_state(3, 40, None)]
    after = three | {(3, 40): {"b": told("b", *PARTS)}}
    assert steps(job(after), mine) == [Delete("j", 3, 40, tuple(sorted(PARTS)))]


def test_a_boundary_counts_only_when_it_is_registered() -> None:
    """80 is held but not registered, so 40 is still the second newest restorable boundary."""
    two = {(3, boundary): both(*PARTS) for boundary in (40, 60)}
    mine = node((3, 40), (3, 60), (3, 80))
    assert steps(job(two), mine) == [told_of_state(3, 80, told("a", *PARTS))]


def test_boundaries_off_the_timeline_are_deleted() -> None:
    """The job left timeline 1 at 20: its boundary 20 stays, and 40 is unregistered and deleted."""
    state = {(1, 20): both(*PARTS), (1, 40): both(*PARTS)}
    mine = node((1, 20), (1, 40))
    assert steps(job(state), mine) == [told_of_state(1, 40, None)]
    assert steps(job({(1, 20): both(*PARTS)}), mine) == [Delete("j", 1, 40, tuple(sorted(PARTS)))]
    assert not is_welcome(job({}), 1, 40)
    assert is_welcome(job({}), 1, 20)
    assert is_welcome(job({}), 3, 40)


def test_a_boundary_that_a_plan_loads_stays_until_its_workers_run() -> None:
    """`next` goes back to 40 although 60 and 80 are restorable."""
    three = {(3, boundary): both(*PARTS) for boundary in (40, 60, 80)}
    back = replace(PLAN, generation=4, source="nodes", source_timeline=3, boundary=40)
    assert steps(job(three, next=back), node((3, 40), (3, 60), (3, 80))) == []


def test_a_dropped_file_leaves_the_record() -> None:
    """The damaged head is dropped: the record is written without it, or deleted when nothing is left."""
    state = {(3, 40): {"a": told("a", *PARTS)}}
    rest = tuple(part for part in PARTS if part != "head")
    assert steps(job(state), node((3, 40), parts=rest)) == [told_of_state(3, 40, told("a", *rest))]
    assert steps(job(state), node()) == [told_of_state(3, 40, None)]


def test_files_of_an_earlier_submission_are_deleted() -> None:
    """They belong to another job of the same name."""
    assert steps(job({}), node((3, 40), uid="old")) == [Delete("j", 3, 40, tuple(sorted(PARTS)))]


def test_a_failed_job_keeps_its_past_and_a_cancelled_one_its_journal() -> None:
    """FAILED with a lineage: everything stays. CANCELLED: only the newest journal does."""
    state = {(3, 40): {"a": told("a", *PARTS)}}
    failed = PhaseRecord(phase=Phase.FAILED, lineage=PLAN.lineage)
    assert steps(job(state, plan=None, phase=failed), node((3, 40))) == []
    cancelled = job(state, plan=None, phase=PhaseRecord(phase=Phase.CANCELLED))
    assert steps(cancelled, node((3, 40))) == [told_of_state(3, 40, told("a", JOURNAL), has_plan=False)]
    after = replace(cancelled, state={(3, 40): {"a": told("a", JOURNAL)}})
    assert steps(after, node((3, 40))) == [Delete("j", 3, 40, tuple(sorted(LAYERS)))]


def test_a_parents_boundary_is_loaded_and_never_registered() -> None:
    """The job began with another job's checkpoint, whose timeline has the same number."""
    parent = CheckpointRecord(timeline=3, boundary=100, url="c", origin_job="parent")
    begun, loading = worker(prepared=3, started=3), worker(prepared=3)
    of = job({}, plan=replace(PLAN, source="checkpoint", source_timeline=3, boundary=100), checkpoint=parent)
    assert steps(of, node((3, 100), workers=(loading,))) == []
    assert steps(of, node((3, 100), workers=(begun,))) == [Delete("j", 3, 100, tuple(sorted(PARTS)))]


def test_a_removed_job_leaves_nothing() -> None:
    """No key of it is left: its files go."""
    assert steps(None, node((3, 40))) == [Delete("j", 3, 40, tuple(sorted(PARTS)))]


def test_nothing_is_deleted_while_etcd_is_older_than_this_node() -> None:
    """etcd comes back from a backup before generation 7: files stay until the coordinator has caught up."""
    assert steps(job({}), node((1, 40), in_force={seen_key("j", "u"): 7})) == []


def test_generations_of_an_earlier_job_of_the_same_name_do_not_count() -> None:
    """Generation 7 belonged to a removed submission: its files go, and etcd does not count as older."""
    mine = node((1, 40), uid="old", in_force={seen_key("j", "old"): 7})
    assert steps(job({}), mine) == [Delete("j", 1, 40, tuple(sorted(PARTS)))]


def test_generations_are_remembered_by_name_and_by_submission() -> None:
    """The phase and both plans count; a job whose spec is not known yet has only its name."""
    of = job({}, next=replace(PLAN, generation=5))
    assert generations_seen(view(of)) == {"j": 5, seen_key("j", "u"): 5}
    assert generations_seen(view(replace(of, submission=None))) == {"j": 5}
    assert generations_seen(view(job({}, plan=None))) == {"j": 3, seen_key("j", "u"): 3}


def test_each_computing_node_copies_its_own_layers_to_durable_storage() -> None:
    """At the due boundary 40, a copies its own layers, not the head that it keeps for b."""
    due = job({(3, 40): both(*PARTS)}, submission=SpecRecord(spec=spec(checkpoint_every=40), uid="u"))
    keys = {part: StateKey("j", 3, 40, part) for part in PARTS}
    expected: list[Step] = [Upload(keys["embed"]), Upload(keys["block.0"])]
    assert steps(due, node((3, 40))) == expected
    done = steps(due, node((3, 40), durable={keys["embed"], keys["block.0"]}))
    assert [type(step) for step in done] == [Register]


def test_an_incomplete_boundary_is_not_copied_to_durable_storage() -> None:
    """b has written nothing yet."""
    due = job({(3, 40): {"a": told("a", *LAYERS[:2])}}, submission=SpecRecord(spec=spec(checkpoint_every=40), uid="u"))
    assert steps(due, node((3, 40), parts=LAYERS[:2])) == []


@pytest.mark.parametrize("is_known", [False, True])
def test_files_of_a_job_whose_spec_is_garbage_stay(is_known: bool) -> None:
    """No file is deleted or registered until the spec can be read, whether or not this node read an earlier one."""
    cluster = view(job({}) if is_known else None)
    assert list(state_steps(cluster, node((3, 40))))
    cluster.apply(Keys.of("j", "spec"), b"\xff", mod_revision=10**6, create_revision=1)
    assert list(state_steps(cluster, node((3, 40)))) == []


def test_files_of_a_job_that_a_restored_etcd_does_not_know_stay_for_an_hour() -> None:
    """etcd went back to before the submission."""
    cluster = view(None)
    assert [type(step) for step in state_steps(cluster, node((3, 40), now=10.0))] == [Delete]
    cluster.start_anew(now=100.0)
    assert list(state_steps(cluster, node((3, 40), now=100.0 + KEPT_AFTER_RESTORE_S - 1))) == []
    assert [type(step) for step in state_steps(cluster, node((3, 40), now=101.0 + KEPT_AFTER_RESTORE_S))] == [Delete]


def without_access(*parts: str) -> StateRecord:
    """Return the registration of node b, which has no credentials for the checkpoint folder."""
    return replace(told("b", *parts), lacks_access=True, trouble="no credentials")


def test_a_node_without_access_leaves_its_copies_to_another_holder() -> None:
    """b holds the head and cannot write to the folder: a copies it, and the boundary stays due."""
    state = {(3, 100): {"a": told("a", *PARTS), "b": without_access(*PARTS)}, (3, 200): both()}
    of = job(state)
    mine = [step.key.layer for step in steps(of, node((3, 100))) if isinstance(step, Upload)]
    assert mine == list(PARTS)
    poor = replace(node((3, 100)), name="b", incarnation="b-1", no_access=frozenset({"j"}))
    assert not [step for step in steps(of, poor) if isinstance(step, Upload)]
    [record] = [step.record for step in steps(job({}), poor) if isinstance(step, Register)]
    assert isinstance(record, StateRecord)
    assert record.lacks_access


def test_at_a_stop_others_copy_the_files_of_a_node_without_access() -> None:
    """Only b holds head and journal: a fetches both and copies them while b waits."""
    stop = StopRecord(generation=3, save=Save.CHECKPOINT, boundary=100)
    of = job({(3, 100): {"a": told("a", *LAYERS[:2]), "b": without_access("head", JOURNAL)}}, stop=stop)
    fetches = [step for step in steps(of, node((3, 100), parts=LAYERS[:2])) if isinstance(step, Fetch)]
    assert [(step.key.layer, step.holders) for step in fetches] == [("head", ("b",)), (JOURNAL, ("b",))]
    both_hold = job({(3, 100): {"a": told("a", *PARTS), "b": without_access("head", JOURNAL)}}, stop=stop)
    copies = [step.key.layer for step in steps(both_hold, node((3, 100))) if isinstance(step, Upload)]
    assert set(copies) >= {"head", JOURNAL}
