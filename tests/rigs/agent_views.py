"""A node and a cluster as an agent sees them: one job of four layers, one worker of node a."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from headway.daemon.agent.local_state import NodeState
from headway.daemon.agent.steps import SetGoal, Step
from headway.daemon.agent.steps_due import next_steps
from headway.daemon.cluster.records import (
    Failure,
    NodeRecord,
    PlanRecord,
    SpecRecord,
    WorkerPart,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.cluster.state_key import StateKey, StoredFile
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import DataSpec, JobSection, JobSpec
from headway.daemon.worker.goal import Action, Actual, Goal, JobGeneration, WorkerStatus, next_action
from headway.stages.spec import ModelSpec

LAYERS = ("embed", "block.0", "block.1", "head")
G1 = JobGeneration("j", 1)


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
        workers=tuple(
            WorkerPart(node=node, node_incarnation=f"{node}-1", device_index=0, layers=layers, depth=4)
            for node, layers in stages
        ),
    )


def view_of(job: JobView | None = None) -> ClusterView:
    """A cluster with one job, or none."""
    nodes = {name: node_record(name) for name in "abc"}
    return ClusterView(jobs={job.name: job} if job is not None else {}, nodes=nodes, steady_since=-1000.0)


def node_record(name: str, incarnation: str = "", **fields: object) -> NodeRecord:
    """Return the record of node `name`, with no device unless told."""
    known: dict[str, Any] = {"address": f"{name}:1", "host": name, "site": "", "devices": ()}
    known |= {"incarnation": incarnation or f"{name}-1", "memory_bytes": 0, "arithmetic_class": ""}
    return NodeRecord(name=name, **known | fields)


def job(*, data_sha256: str = "sha-data", **fields: object) -> JobView:
    """A submitted job with these records."""
    spec = JobSpec(job=JobSection(name="j"), model=ModelSpec(num_hidden_layers=2), data=DataSpec(sha256=data_sha256))
    return JobView(name="j", submission=SpecRecord(spec=spec), **fields)  # type: ignore[arg-type]


def worker(
    *,
    job: str = "",
    prepared: int = 0,
    started: int = 0,
    at: int | None = None,
    chosen: int | None = None,
    layers: tuple[str, ...] = (),
    has_journal: bool = False,
    **fields: object,
) -> WorkerStatus:
    """The worker of device 0, attached. prepared, started: generations. at: the boundary at which it stands."""
    actual = Actual(
        job=job or ("j" if prepared or started else ""),
        prepared=prepared,
        generation=started,
        boundary=at,
        chosen=chosen,
        stop_at=chosen,
        layers=layers,
        has_journal=has_journal,
    )
    known: dict[str, object] = {"device_index": 0, "incarnation": "w", "pid": 7, "address": "a:1", "actual": actual}
    return WorkerStatus(**(known | fields))  # type: ignore[arg-type]


def now(status: WorkerStatus, **changes: object) -> WorkerStatus:
    """The same worker, which says something else of itself."""
    return replace(status, actual=msgspec.structs.replace(status.actual, **changes))


def node(status: WorkerStatus, *, name: str = "a", **fields: object) -> NodeState:
    """Node `a` with one worker and its data at hand."""
    known: dict[str, object] = {"data_paths": {"sha-data": "/data"}}
    return NodeState(name=name, incarnation=f"{name}-1", workers=(status,), **(known | fields))  # type: ignore[arg-type]


def record(state: WorkerState, *, name: str = "a", boundary: int | None = None, error: str = "") -> WorkerRecord:
    """Return the record of node `name`'s worker."""
    return WorkerRecord(
        node=name, incarnation="w", address="a:1", pid=7, state=state, boundary=boundary, failure=Failure(error)
    )


def held(*layers: str, boundary: int = 5) -> dict[StateKey, StoredFile]:
    """Files of these layers in the store."""
    return {
        StateKey("j", 1, boundary, layer): StoredFile(path=Path(f"/s/{layer}"), size_bytes=10, checksum=f"sha-{layer}")
        for layer in layers
    }


def due(view: ClusterView, node: NodeState) -> list[Step | Action]:
    """The steps that are due. Of a new goal, what the worker does next by it, if anything."""
    found: list[Step | Action] = []
    for step in next_steps(view, node):
        if not isinstance(step, SetGoal):
            found.append(step)
        elif action := next_action(step.goal, node.workers[step.device_index].actual):
            found.append(action)
    return found


def goal_by(view: ClusterView, node: NodeState) -> Goal:
    """The goal of the node's first worker, when its daemon has taken all steps."""
    goals = [step.goal for step in next_steps(view, node) if isinstance(step, SetGoal) and not step.device_index]
    return goals[0] if goals else node.workers[0].goal


WHOLE = plan(1, ("a", LAYERS))
SPLIT = plan(2, ("a", LAYERS[:2]), ("b", LAYERS[2:]), source="nodes")
RUNNING = worker(job="j", prepared=1, started=1, layers=LAYERS, has_journal=True)
