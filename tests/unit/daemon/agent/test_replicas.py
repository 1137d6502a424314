"""Nodes share a stage of several replicas: one opens data, dials, writes, copies, stops."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.agent.local_state import NodeState
from headway.daemon.agent.state_steps import copy_steps
from headway.daemon.agent.steps import Fetch, OpenData, ProveLink, Register, SetGoal, Step, Upload
from headway.daemon.agent.steps_due import next_steps
from headway.daemon.cluster.measurements import LayerTime
from headway.daemon.cluster.records import (
    PlanRecord,
    Save,
    SpecRecord,
    StateFile,
    StateRecord,
    StopRecord,
    WorkerPart,
    WorkerPort,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.cluster.state_key import JOURNAL, StateKey, StoredFile
from headway.daemon.decide.boundaries import copier, restorable
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import DataSpec, JobSection, JobSpec
from headway.daemon.worker.goal import Action, JobGeneration, SourceKind, Start
from headway.daemon.worker.liveness import launched_s
from headway.daemon.worker.neighbours import for_part
from headway.stages.spec import ModelSpec, TrainSpec
from tests.rigs.agent_views import due, goal_by, node_record, now, start_by, worker

FRONT, MIDDLE, BACK = ("embed", "block.0"), ("block.1",), ("head",)
LAYERS = (*FRONT, *MIDDLE, *BACK)
SPEC = JobSpec(
    job=JobSection(name="j"),
    model=ModelSpec(num_hidden_layers=2),
    data=DataSpec(sha256="sha"),
    train=TrainSpec(reduction_groups=4, microbatches=8),
)


def part(node: str, layers: tuple[str, ...], *groups: int, device: int = 0) -> WorkerPart:
    return WorkerPart(
        node=node, node_incarnation=f"{node}-1", device_index=device, layers=layers, depth=2, groups=groups
    )


def plan_of(generation: int, *workers: WorkerPart, **fields: Any) -> PlanRecord:
    known: dict[str, Any] = {"timeline": 1, "source_timeline": 1}
    return PlanRecord(generation=generation, workers=workers, **(known | fields))


TWO_ONE_TWO = plan_of(
    1, part("a", FRONT, 0, 1, 2), part("b", FRONT, 3), part("c", MIDDLE), part("d", BACK, 0, 1), part("e", BACK, 2, 3)
)
POSITIONS = dict(zip("abcde", range(5), strict=True))


def view_of(plan: PlanRecord, *, states: dict[str, WorkerState] | None = None, **fields: Any) -> ClusterView:
    """All workers of a plan, on nodes a, b, c …, have told the same state unless `states` says otherwise."""
    workers = {}
    for position, stage in enumerate(plan.workers):
        told = (states or {}).get(stage.node, WorkerState.READY)
        workers[plan.generation, position] = WorkerRecord(
            node=stage.node, incarnation=f"w-{stage.node}", address=f"{stage.node}:1", pid=7, state=told
        )
    nodes = {name: node_record(name) for name in "abcdefg"}
    job = JobView(name="j", submission=SpecRecord(spec=SPEC), plan=plan, workers=workers, **fields)
    return ClusterView(jobs={"j": job}, nodes=nodes)


def node(name: str, *held: tuple[int, str], devices: int = 1, **status: Any) -> NodeState:
    """A node with the data at hand, its files of timeline 1, and workers that have prepared generation 1."""
    known: dict[str, Any] = {"incarnation": f"w-{name}", "job": "j", "prepared": 1, **status}
    return NodeState(
        name=name,
        incarnation=f"{name}-1",
        workers=tuple(worker(device_index=index, **known) for index in range(devices)),
        held={
            StateKey("j", 1, boundary, layer): StoredFile(path=Path("/s"), size_bytes=10, checksum=f"sha-{layer}")
            for boundary, layer in held
        },
        data_paths={"sha": "/data"},
    )


def started(name: str, *held: tuple[int, str], at: int | None = None, **status: Any) -> NodeState:
    """Its worker runs generation 1, or stands at a boundary of it."""
    layers = TWO_ONE_TWO.workers[POSITIONS[name]].layers
    return node(name, *held, started=1, at=at, layers=layers, has_journal=name == "d", **status)


def of_kind(steps: list[Step], *kinds: type[Step]) -> list[Step]:
    return [step for step in steps if isinstance(step, kinds)]


def start_of(name: str, plan: PlanRecord = TWO_ONE_TWO) -> Start:
    return start_by(view_of(plan), node(name))


def record_in(steps: list[Step]) -> WorkerRecord:
    """The record of the one worker that is registered."""
    [record] = [step.record for step in steps if isinstance(step, Register)]
    assert isinstance(record, WorkerRecord)
    return record


def linked(start: Start) -> tuple[list[int], list[int], list[int]]:
    found = (start.neighbours.upstream, start.neighbours.downstream, start.neighbours.siblings)
    upstream, downstream, siblings = ([neighbour.position for neighbour in neighbours] for neighbours in found)
    return upstream, downstream, siblings


# --- Start ------------------------------------------------------------------------------------------------------------


def test_every_replica_of_the_first_stage_opens_the_data() -> None:
    """a and b both read tokens, c does not."""
    view = view_of(TWO_ONE_TWO)
    view.jobs["j"].next, view.jobs["j"].plan = TWO_ONE_TWO, None
    opened = {
        name: bool(of_kind(next_steps(view, replace(node(name, prepared=0), data_paths={})), OpenData))
        for name in "abcde"
    }
    assert opened == {"a": True, "b": True, "c": False, "d": False, "e": False}


def test_a_worker_has_links_to_siblings_and_to_workers_that_share_a_group() -> None:
    """On 2-1-2 workers, c has a link to everyone; the others to c and their sibling."""
    assert linked(start_of("a")) == ([], [2], [1])
    assert linked(start_of("b")) == ([], [2], [0])
    assert linked(start_of("c")) == ([0, 1], [3, 4], [])
    assert linked(start_of("d")) == ([2], [], [4])
    assert linked(start_of("e")) == ([2], [], [3])


def test_replicas_without_a_common_group_have_no_link() -> None:
    """a holds groups 0 and 1, b 2 and 3, c 0, d 1 to 3: no microbatch goes from b to c."""
    plan = plan_of(1, part("a", FRONT, 0, 1), part("b", FRONT, 2, 3), part("c", BACK, 0), part("d", BACK, 1, 2, 3))
    assert linked(start_of("a", plan)) == ([], [2, 3], [1])
    assert linked(start_of("b", plan)) == ([], [3], [0])
    assert linked(start_of("c", plan)) == ([0], [], [3])


@pytest.mark.parametrize(("name", "missing"), [("c", 4), ("a", 1), ("d", 4)])
def test_start_waits_until_every_neighbour_has_an_address(name: str, missing: int) -> None:
    view = view_of(TWO_ONE_TWO)
    del view.jobs["j"].workers[1, missing]
    assert Action.START not in due(view, node(name))


@pytest.mark.parametrize(("by_plan", "by_job", "told"), [("attention", "auto", "attention"), ("", "block", "block")])
def test_a_worker_computes_again_what_its_plan_says(by_plan: str, by_job: str, told: str) -> None:
    """A plan's choice, or else the job's own → the worker's settings, and the names of its layers' times."""
    spec = replace(SPEC, train=replace(SPEC.train, recompute=by_job))  # type: ignore[arg-type]
    workers = (part("a", FRONT), replace(part("b", (*MIDDLE, *BACK)), recompute=by_plan))
    start = start_of("b", plan_of(1, *workers))
    chosen = for_part(spec, start.plan, start.position)
    assert chosen == replace(spec, train=replace(spec.train, recompute=told))  # type: ignore[arg-type]
    timed = dict.fromkeys((f"block+{told}", "head"), LayerTime(forward_s=1.0, backward_s=0.0))
    assert launched_s(start, spec.train, timed, num_ahead=2) == 4.0
    assert launched_s(start, spec.train, {"block": timed["head"], "head": timed["head"]}, num_ahead=2) == 0.0


def test_only_the_lead_of_the_last_stage_has_the_journal() -> None:
    """d loads it, its sibling e does not."""
    assert [source.layer for source in start_of("d").sources] == [*BACK, JOURNAL]
    assert [source.layer for source in start_of("e").sources] == [*BACK]


def test_two_replicas_on_one_node_write_one_snapshot() -> None:
    """Node a computes both replicas of the first stage on two devices; the second would write the same files."""
    plan = plan_of(1, part("a", FRONT, 0, 1), part("a", FRONT, 2, 3, device=1), part("b", (*MIDDLE, *BACK)))
    goals = [step.goal for step in next_steps(view_of(plan), node("a", devices=2)) if isinstance(step, SetGoal)]
    assert [goal.start.takes_snapshots for goal in goals if goal.start is not None] == [True, False]


# --- Stop and save ----------------------------------------------------------------------------------------------------


def stopping(save: Save, boundary: int | None, successor: PlanRecord | None = None) -> ClusterView:
    stop = StopRecord(generation=1, save=save, boundary=boundary)
    states = dict.fromkeys("abcde", WorkerState.RUNNING)
    return view_of(TWO_ONE_TWO, states=states, stop=stop, next=successor)


def test_the_lead_of_the_first_stage_chooses_where_to_stop() -> None:
    """Only a is asked. All others, its sibling b included, get the boundary."""
    asked = [name for name in "abcde" if Action.CHOOSE_STOP in due(stopping(Save.MOVES, None), started(name))]
    assert asked == ["a"]
    view = stopping(Save.MOVES, 7)
    assert Action.STOP_AT in due(view, started("b"))
    assert goal_by(view, started("b")).stop_at == 7
    assert Action.STOP_AT not in due(view, started("a", chosen=7))


def written_by(view: ClusterView) -> dict[str, tuple[str, ...]]:
    found = {name: goal_by(view, started(name, at=7)).write for name in "abcde"}
    return {name: parts for name, parts in found.items() if parts}


def test_a_checkpoint_is_written_and_copied_by_the_leads_alone() -> None:
    """2-1-2 stops for a checkpoint: a, c and d write each part once; e's file of the head is not copied."""
    view = stopping(Save.CHECKPOINT, 7)
    assert written_by(view) == {"a": FRONT, "c": MIDDLE, "d": (*BACK, JOURNAL)}
    assert of_kind(next_steps(view, started("d", (7, "head"), (7, JOURNAL), at=7)), Upload)
    assert not of_kind(next_steps(view, started("e", (7, "head"), at=7)), Upload)


def test_the_lead_writes_what_a_worker_of_the_next_plan_lacks() -> None:
    """f joins the replicas of the first stage: a writes its layers; a and b continue with live layers."""
    successor = replace(
        plan_of(2, part("b", FRONT, 0, 1), part("f", FRONT, 2, 3), *TWO_ONE_TWO.workers[2:]), source="nodes"
    )
    assert written_by(stopping(Save.MOVES, 7, successor)) == {"a": FRONT, "d": (JOURNAL,)}


def test_nothing_is_written_for_replicas_that_change_places() -> None:
    """a and b swap roles, and the middle stays where it is: every layer is live where the next plan needs it."""
    successor = plan_of(
        2, part("b", FRONT, 0), part("a", FRONT, 1, 2, 3), part("c", MIDDLE), part("e", BACK), source="nodes"
    )
    assert written_by(stopping(Save.MOVES, 7, successor)) == {"d": (JOURNAL,)}


def test_a_replica_keeps_its_live_layers_and_fetches_only_the_journal() -> None:
    """e is alone on the last stage in plan 2: its head is live, and the journal comes from d's node."""
    after = plan_of(2, part("a", (*FRONT, *MIDDLE)), part("e", BACK), source="nodes", boundary=7)
    told = StateRecord(incarnation="d-1", generation=1, files={JOURNAL: StateFile(size_bytes=1, checksum="x")})
    view = view_of(after, state={(1, 7): {"d": told}})
    ready = now(started("e", at=7).workers[0], prepared=2)
    (fetch,) = of_kind(next_steps(view, replace(started("e"), workers=(ready,))), Fetch)
    assert isinstance(fetch, Fetch)
    assert (fetch.key.layer, fetch.holders) == (JOURNAL, ("d",))
    here = replace(started("e", (7, JOURNAL)), workers=(ready,))
    assert {source.layer: source.kind for source in start_by(view, here).sources} == {
        "head": SourceKind.LIVE,
        JOURNAL: SourceKind.FILE,
    }


# --- Copies -----------------------------------------------------------------------------------------------------------


def told(name: str, *parts: str) -> StateRecord:
    files = {part: StateFile(size_bytes=10, checksum=f"sha-{part}") for part in parts}
    return StateRecord(incarnation=f"{name}-1", generation=1, files=files)


def snapshot(**others: StateRecord) -> ClusterView:
    """Boundary 20, as the workers wrote it."""
    own = {
        "a": told("a", *FRONT), "b": told("b", *FRONT), "c": told("c", *MIDDLE), "d": told("d", *BACK, JOURNAL),
        "e": told("e", *BACK),
    }  # fmt: skip
    return view_of(TWO_ONE_TWO, state={(1, 20): own | others})


def fetched_by(name: str, view: ClusterView, *held: tuple[int, str], missed: tuple[int, ...] = ()) -> list[str]:
    state = replace(started(name, *held), missed={JobGeneration("j", TWO_ONE_TWO.generation): missed})
    return [step.key.layer for step in copy_steps(view, state) if isinstance(step, Fetch)]


def test_siblings_are_each_others_copies_and_fetch_the_journal_alone() -> None:
    """With two copies, replicated stages need no more copies of layers; only the journal and the middle are copied."""
    view = snapshot()
    fetched = {name: fetched_by(name, view, *((20, layer) for layer in TWO_ONE_TWO.workers[POSITIONS[name]].layers))
               for name in "abcde"}  # fmt: skip
    assert fetched == {"a": [], "b": [], "c": [], "d": [], "e": [JOURNAL]}
    spare = [step for name in "fg" for step in copy_steps(view, node(name))]
    assert [step.key.layer for step in spare if isinstance(step, Fetch)] == ["block.1"]
    assert not restorable(view.jobs["j"], view.nodes)
    safe = snapshot(e=told("e", *BACK, JOURNAL), f=told("f", *MIDDLE))
    assert restorable(safe.jobs["j"], safe.nodes) == ((1, 20),)


def test_a_sibling_whose_own_snapshot_is_still_being_written_fetches_no_layer() -> None:
    """e is still writing boundary 20: it fetches the journal only."""
    view = snapshot()
    del view.jobs["j"].state[1, 20]["e"]
    assert fetched_by("e", view) == [JOURNAL]


def test_a_replica_that_missed_its_snapshot_fetches_it_from_its_sibling() -> None:
    """e and a could not write boundary 20. Each fetches its layers, e the journal too, and nobody else fetches more."""
    view = snapshot()
    for name in "ae":
        del view.jobs["j"].state[1, 20][name]
    assert fetched_by("e", view, missed=(20,)) == ["head", JOURNAL]
    assert fetched_by("a", view, missed=(20,)) == [*FRONT]
    assert fetched_by("e", view, missed=(40,)) == [JOURNAL]
    assert fetched_by("c", view, missed=(20,)) == []


def test_a_replica_fetches_files_written_before_its_plan() -> None:
    """Only d held the head at boundary 20. e, which holds it from 40 on, fetches a copy."""
    view = snapshot()
    job = view.jobs["j"]
    job.plan = replace(TWO_ONE_TWO, boundary=40)
    del job.state[1, 20]["e"]
    assert fetched_by("e", view) == ["head", JOURNAL]


def test_the_lead_of_a_stage_copies_its_files_to_the_checkpoint() -> None:
    """Both d and e hold the head: d copies it, or e once d is lost."""
    view = snapshot()
    job = view.jobs["j"]
    assert [copier(job, (1, 20), layer, view.nodes) for layer in (*LAYERS, JOURNAL)] == ["a", "a", "c", "d", "d"]
    del view.nodes["d"]
    assert copier(job, (1, 20), "head", view.nodes) == "e"


def test_before_a_plan_comes_into_force_every_neighbour_is_dialled_from_both_ends() -> None:
    """The middle of 2-1-2 dials all four; a replica of the first stage dials its sibling and the middle."""
    view = view_of(TWO_ONE_TWO)
    job = view.jobs["j"]
    job.plan, job.next = None, job.plan

    def dialled(name: str, *proven: int) -> list[tuple[int, str]]:
        g1, mine = JobGeneration("j", 1), POSITIONS.get(name, -1)
        state = replace(node(name), proven={(g1, mine, other, f"w-{'abcde'[other]}") for other in proven})
        return [(step.other, step.target.address) for step in next_steps(view, state) if isinstance(step, ProveLink)]

    assert dialled("c") == [(0, "a:1"), (1, "b:1"), (3, "d:1"), (4, "e:1")]
    assert dialled("a") == [(1, "b:1"), (2, "c:1")]
    assert dialled("c", 0, 3) == [(1, "b:1"), (4, "e:1")]
    assert dialled("f") == []


def test_a_neighbour_that_is_not_ready_yet_or_has_failed_is_not_dialled() -> None:
    view = view_of(TWO_ONE_TWO, states={"a": WorkerState.FAILED})
    job = view.jobs["j"]
    job.plan, job.next = None, job.plan
    del job.workers[1, POSITIONS["d"]]
    steps = next_steps(view, node("c"))
    assert [step.other for step in steps if isinstance(step, ProveLink)] == [POSITIONS["b"], POSITIONS["e"]]


def test_a_worker_says_that_it_reaches_its_neighbours_once_it_reaches_all() -> None:
    view = view_of(TWO_ONE_TWO)
    job = view.jobs["j"]
    job.plan, job.next = None, job.plan

    def told(*proven: int) -> tuple[int, ...] | None:
        proofs = {(JobGeneration("j", 1), 0, other, f"w-{'abcde'[other]}") for other in proven}
        state = replace(node("a"), proven=proofs)
        record = record_in(next_steps(view, state))
        assert len(record.proven or ()) == len(record.proven_workers)
        return record.proven

    assert told() == told(1) == ()
    assert told(1, 2) == (1, 2)


def test_neighbours_are_dialled_while_all_workers_still_get_ready() -> None:
    """No worker has a record in this plan yet: they are dialled at their node's address, and the worker's first record
    has the result.
    """
    view = view_of(TWO_ONE_TWO)
    job = view.jobs["j"]
    job.plan, job.next = None, job.plan
    job.workers.clear()
    for name in "bcde":
        view.nodes[name] = replace(
            view.nodes[name], workers=(WorkerPort(device_index=0, address=f"{name}:7", incarnation=f"w-{name}"),)
        )
    steps = next_steps(view, node("a", prepared=None))
    dialled = [(step.other, step.target.address, step.target.worker) for step in steps if isinstance(step, ProveLink)]
    assert dialled == [(1, "b:7", "w-b"), (2, "c:7", "w-c")]
    proofs = {(JobGeneration("j", 1), 0, other, worker) for other, _, worker in dialled}
    record = record_in(next_steps(view, replace(node("a"), proven=proofs)))
    assert (record.state, record.proven) == (WorkerState.READY, (1, 2))
    assert record.proven_workers == ("w-b", "w-c")


@pytest.mark.parametrize(("lost_peer", "is_dialled"), [(-1, False), (0, True)])
def test_a_process_that_has_died_is_not_dialled_and_one_that_lost_a_neighbour_is(
    lost_peer: int, is_dialled: bool
) -> None:
    """c failed in plan 1 and its node's record still names that process, which a spare may soon replace."""
    view = view_of(TWO_ONE_TWO)
    job = view.jobs["j"]
    failed = replace(job.workers[1, 2], state=WorkerState.FAILED, lost_peer=lost_peer)
    job.next, job.workers = replace(TWO_ONE_TWO, generation=2), {(1, 2): failed}
    view.nodes["c"] = replace(view.nodes["c"], workers=(WorkerPort(device_index=0, address="c:7", incarnation="w-c"),))
    steps = next_steps(view, node("a"))
    assert [step.other for step in steps if isinstance(step, ProveLink)] == ([2] if is_dialled else [])


def test_an_answer_of_a_replaced_process_does_not_count() -> None:
    """b's first process answered. The process that replaced it is dialled as well."""
    view = view_of(TWO_ONE_TWO)
    job = view.jobs["j"]
    job.plan, job.next = None, job.plan
    g1 = JobGeneration("j", 1)
    state = replace(node("a"), proven={(g1, 0, 1, "w-b before"), (g1, 0, 2, "w-c")})
    steps = next_steps(view, state)
    assert [(step.other, step.target.worker) for step in steps if isinstance(step, ProveLink)] == [(1, "w-b")]
    record = record_in(steps)
    assert (record.proven, record.proven_workers) == ((), ())
