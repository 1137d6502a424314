"""What a node's steps rest on, where a scenario cannot tell it."""

from dataclasses import replace

import pytest

from headway.daemon.agent.local_state import generations_seen, is_over
from headway.daemon.agent.state_steps import KEPT_AFTER_RESTORE_S, is_welcome, state_steps
from headway.daemon.agent.steps import Delete, GiveUp
from headway.daemon.agent.steps_due import is_awaited, is_named
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import LayerTime
from headway.daemon.cluster.records import (
    Failure,
    Phase,
    PhaseRecord,
    PlanRecord,
    WorkerState,
    seen_key,
)
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.decide.boundaries import copier, restorable
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.job import DataSpec, JobSection, JobSpec, PluginsSpec
from headway.daemon.plan.copy_places import possible_holders
from headway.daemon.worker.goal import Action, Start
from headway.daemon.worker.liveness import launched_s
from headway.daemon.worker.neighbours import for_part
from headway.stages.spec import ModelSpec, TrainSpec
from tests.rigs.agent_scenarios import Scene
from tests.rigs.agent_views import G1, LAYERS, due, held, job, node, node_record, plan, record, view_of, worker
from tests.rigs.simulated_cluster import small_spec


def test_files_are_kept_until_every_worker_of_the_new_plan_runs() -> None:
    """Layers that moved off this node are needed while b is only ready."""
    after = plan(2, ("b", LAYERS), source="nodes", boundary=5)
    files = held("head", JOURNAL)
    ready = view_of(job(plan=after, workers={(2, 0): record(WorkerState.READY, name="b")}))
    assert is_awaited(ready, files)
    assert not is_named(ready, "a", "a-1")
    running = view_of(job(plan=after, workers={(2, 0): record(WorkerState.RUNNING, name="b")}))
    assert not is_awaited(running, files)


def test_a_generation_is_over_when_no_record_names_it() -> None:
    """The death of an idle worker fails none."""
    assert worker().died(Failure("killed")).failures == {}
    assert not is_over(view_of(job(plan=plan(1, ("a", LAYERS)))), G1)
    assert is_over(view_of(job()), G1)


@pytest.mark.parametrize(("by_plan", "by_job", "told"), [("attention", "auto", "attention"), ("", "block", "block")])
def test_a_worker_computes_again_what_its_plan_says(by_plan: str, by_job: str, told: str) -> None:
    """A plan's choice, or else the job's own → the worker's settings, and the names of its layers' times."""
    train = TrainSpec(recompute=by_job)  # type: ignore[arg-type]
    spec = JobSpec(job=JobSection(name="j"), model=ModelSpec(num_hidden_layers=2), train=train)
    two = plan(1, ("a", LAYERS[:2]), ("b", LAYERS[2:]))
    start = Start(plan=replace(two, workers=(two.workers[0], replace(two.workers[1], recompute=by_plan))), position=1)
    chosen = for_part(spec, start.plan, start.position)
    assert chosen == replace(spec, train=replace(spec.train, recompute=told))  # type: ignore[arg-type]
    timed = dict.fromkeys((f"block+{told}", "head"), LayerTime(forward_s=1.0, backward_s=0.0))
    assert launched_s(start, spec.train, timed, num_ahead=2) == 4.0
    assert launched_s(start, spec.train, {"block": timed["head"], "head": timed["head"]}, num_ahead=2) == 0.0


def test_copies_of_replicas_make_a_boundary_restorable_and_the_first_holder_copies_it() -> None:
    """a and b hold the front, c the back: c's stage needs a second holder. b copies the front once a is lost."""
    scene = Scene()
    for line in ("plan 1 a:e0/012 b:e0/3 c:1h", "state 1@20 a e0", "state 1@20 b e0", "state 1@20 c 1hj"):
        word, *words = line.split()
        getattr(scene, f"do_{word}")(*words)
    view = scene.view
    found = [copier(view.jobs["j"], (1, 20), part, view.nodes) for part in (*LAYERS, JOURNAL)]
    assert found == ["a", "a", "c", "c", "c"]
    assert not restorable(view.jobs["j"], view.nodes)
    scene.do_state("1@20", "b", "e01hj")
    view = scene.view
    assert restorable(view.jobs["j"], view.nodes) == ((1, 20),)
    scene.do_node("a", "gone")
    assert copier(scene.view.jobs["j"], (1, 20), "embed", scene.view.nodes) == "b"


def test_a_file_is_welcome_on_the_jobs_own_past() -> None:
    """The job left timeline 1 at 20."""
    of = job(plan=PlanRecord(generation=3, timeline=3, ancestry=((1, 20),)))
    assert [is_welcome(of, *place) for place in ((1, 20), (1, 40), (3, 40))] == [True, False, True]


def test_generations_are_remembered_by_name_and_by_submission() -> None:
    """The phase and both plans count; a job whose spec is not known yet has only its name."""
    of = job(plan=plan(3, ("a", LAYERS)), next=plan(5, ("a", LAYERS)))
    assert generations_seen(view_of(of)) == {"j": 5, seen_key("j", ""): 5}
    assert generations_seen(view_of(replace(of, submission=None))) == {"j": 5}


@pytest.mark.parametrize("is_known", [False, True])
def test_files_of_a_job_whose_spec_is_garbage_stay(is_known: bool) -> None:
    """No file is deleted or registered until the spec can be read, whether or not this node read an earlier one."""
    cluster, mine = view_of(job() if is_known else None), node(worker(), held=held(*LAYERS, JOURNAL))
    assert list(state_steps(cluster, mine))
    cluster.apply(Keys.of("j", "spec"), b"\xff", mod_revision=10**6, create_revision=1)
    assert list(state_steps(cluster, mine)) == []


def test_files_of_a_job_that_a_restored_etcd_does_not_know_stay_for_an_hour() -> None:
    """etcd went back to before the submission."""
    cluster, files = view_of(), held(*LAYERS)
    assert [type(step) for step in state_steps(cluster, node(worker(), held=files, now=10.0))] == [Delete]
    cluster.start_anew(now=100.0)
    for at, found in ((99.0, []), (101.0, [Delete])):
        steps = state_steps(cluster, node(worker(), held=files, now=at + KEPT_AFTER_RESTORE_S))
        assert [type(step) for step in steps] == found


def test_sites_are_told_apart_whatever_is_in_their_names() -> None:
    """One site is named as two others with a comma between them."""
    found = ClusterView()
    for number, site in enumerate(("a", "b", "a, b")):
        registered = replace(node_record(f"n{number}"), site=site)
        key = Keys.node(registered.name)
        found.apply(key, encode(registered), mod_revision=number + 1, create_revision=number + 1)

    def holders(*sites: str) -> list[str]:
        spec = small_spec("j")
        spec = replace(spec, placement=replace(spec.placement, sites=sites))
        return [each.name for each in possible_holders(spec, found.nodes)]

    assert (holders("a", "b"), holders("a, b")) == (["n0", "n1"], ["n2"])


@pytest.mark.parametrize(("allowed", "expected"), [((), GiveUp), (("any",), Action), (("1" * 64,), Action)])
def test_a_node_imports_no_code_that_its_own_settings_do_not_allow(
    allowed: tuple[str, ...], expected: type[object]
) -> None:
    """Whatever a leader has planned, and although the wheel lies there as the data of another job."""
    view = job(next=plan(1, ("a", LAYERS)), phase=PhaseRecord(phase=Phase.PREPARING))
    assert view.submission is not None
    wheel = PluginsSpec(wheel="w.py", sha256="1" * 64, data=DataSpec(source="/w", sha256="sha-wheel"))
    submission = replace(view.submission, spec=replace(view.submission.spec, plugins=wheel))
    paths = {"sha-data": "/data", "sha-wheel": "/w"}
    mine = node(worker(), data_paths=paths, allow_plugins=allowed)
    (step,) = due(view_of(replace(view, submission=submission)), mine)
    assert isinstance(step, expected), step
