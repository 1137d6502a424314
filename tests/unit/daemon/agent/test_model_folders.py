"""A node's steps for a job that starts from a model's folder."""

from dataclasses import replace

from headway.daemon.agent.steps import Delete, Fetch
from headway.daemon.agent.steps_due import next_steps
from headway.daemon.cluster.records import WorkerState
from headway.daemon.cluster.state_key import CARRIED_PART, ORIGIN_PLACE, StateKey, StoredFile
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import OriginPart, OriginSpec
from headway.daemon.worker.goal import Action, Failure, JobGeneration, SourceKind
from headway.stages.spec import AdapterSpec
from tests.rigs.agent_views import (
    LAYERS,
    due,
    held,
    job,
    node,
    of_kind,
    of_state,
    plan,
    record,
    start_by,
    view_of,
    worker,
)

PREPARED = worker(prepared=1)
PARTS = (*LAYERS, CARRIED_PART)
FOLDER = OriginSpec(
    url="/models/m",
    job="j",
    parts=tuple(OriginPart(name=name, size_bytes=10, checksum=f"sha-{name}") for name in PARTS),
)


def from_folder(**fields: object) -> JobView:
    """The job on node a, before its first batch."""
    known: dict[str, object] = {"plan": plan(1, ("a", LAYERS)), "workers": {(1, 0): record(WorkerState.READY)}}
    found = job(**(known | fields))  # type: ignore[arg-type]
    assert found.submission is not None
    assert found.spec is not None
    spec = replace(found.spec, origin=FOLDER)
    return replace(found, submission=replace(found.submission, spec=spec))


def of_folder(*parts: str) -> dict[StateKey, StoredFile]:
    """Parts in the store."""
    return {
        replace(key, timeline=ORIGIN_PLACE[0], boundary=ORIGIN_PLACE[1]): file for key, file in held(*parts).items()
    }


def test_each_layer_is_fetched_with_its_digest() -> None:
    """No layer begins with random weights; the first node also fetches what an export carries over."""
    steps = next_steps(view_of(from_folder()), node(PREPARED))
    fetched = [step for step in of_kind(steps, Fetch) if isinstance(step, Fetch)]
    assert [step.key.layer for step in fetched] == list(PARTS)
    assert all(step.key.is_of_origin and step.checkpoint_url == "/models/m" for step in fetched)
    assert fetched[0].expected == FOLDER.digest_of("embed")
    assert Action.START not in due(view_of(from_folder()), node(PREPARED))


def test_a_worker_starts_from_the_parts() -> None:
    """With all parts in the store, every layer comes from its file; the carried part is no layer's source."""
    start = start_by(view_of(from_folder()), node(PREPARED, held=of_folder(*PARTS)))
    kinds = {source.layer: source.kind for source in start.sources}
    assert {layer: kinds[layer] for layer in LAYERS} == dict.fromkeys(LAYERS, SourceKind.FILE)
    assert CARRIED_PART not in kinds


def test_parts_stay_until_they_are_loaded() -> None:
    """After the start the layers' parts go; the carried files stay for exports. None is registered."""
    waiting = next_steps(view_of(from_folder()), node(PREPARED, held=of_folder(*PARTS)))
    assert not of_kind(waiting, Delete)
    started = worker(prepared=1, started=1)
    steps = next_steps(view_of(from_folder()), node(started, held=of_folder(*PARTS)))
    assert of_kind(steps, Delete) == [Delete("j", *ORIGIN_PLACE, tuple(sorted(LAYERS)))]
    assert not of_state(waiting + steps)


def with_adapter(job: JobView) -> JobView:
    assert job.submission is not None
    assert job.spec is not None
    spec = replace(job.spec, model=replace(job.spec.model, adapter=AdapterSpec(rank=2)))
    return replace(job, submission=replace(job.submission, spec=spec))


def test_frozen_layers_come_before_a_worker_is_prepared_for_a_change() -> None:
    """A node is to take over a layer of a job that trains: it is prepared once the frozen weights are there."""
    change = with_adapter(from_folder(plan=plan(1, ("b", LAYERS)), next=plan(2, ("b", LAYERS[:1]), ("a", LAYERS[1:]))))
    steps = due(view_of(change), node(worker()))
    fetched = [step for step in steps if isinstance(step, Fetch)]
    assert [step.key.layer for step in fetched] == list(LAYERS[1:])
    assert Action.PREPARE not in steps
    assert Action.PREPARE in due(view_of(change), node(worker(), held=of_folder(*LAYERS[1:])))


def test_a_worker_fetches_no_frozen_layer_that_it_has() -> None:
    """It keeps one layer and takes another from its neighbour: it fetches that one alone."""
    stages = plan(1, ("a", LAYERS[:1]), ("b", LAYERS[1:]))
    change = with_adapter(from_folder(plan=stages, next=plan(2, ("a", LAYERS[:2]), ("b", LAYERS[2:]))))
    running = worker(prepared=1, started=1, layers=LAYERS[:1])
    steps = next_steps(view_of(change), node(running))
    assert [step.key.layer for step in of_kind(steps, Fetch) if isinstance(step, Fetch)] == [LAYERS[1]]


def test_frozen_layers_of_a_job_that_does_not_train_come_beside_the_preparation() -> None:
    """The first plan of a job: a worker imports its model while the layers are read. One that gave up fetches none."""
    first = with_adapter(from_folder(plan=None, next=plan(1, ("a", LAYERS))))
    steps = due(view_of(first), node(worker()))
    assert len([step for step in steps if isinstance(step, Fetch)]) == len(LAYERS)
    assert Action.PREPARE in steps
    failed = replace(worker(), failures={JobGeneration("j", 1): Failure("it broke")})
    assert not of_kind(next_steps(view_of(first), node(failed)), Fetch)
