"""A node and a cluster as an agent's orders see them: one job of four layers, one worker of node a."""

from pathlib import Path

from headway.daemon.agent.local_state import NodeState
from headway.daemon.agent.steps import Step
from headway.daemon.jobs.job import DataSpec, JobSection, JobSpec
from headway.daemon.records.records import (
    NodeRecord,
    PlanRecord,
    Save,
    SpecRecord,
    StateFile,
    StateRecord,
    StopRecord,
    WorkerPart,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.storage.state_key import StateKey, StoredFile
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView
from headway.daemon.workers.status import JobGeneration, Standstill, WorkerStatus
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
        workers=tuple(
            WorkerPart(node=node, node_incarnation=f"{node}-1", device_index=0, layers=layers, depth=4)
            for node, layers in stages
        ),
    )


def view_of(job: JobView | None = None) -> ClusterView:
    """A cluster with one job, or none."""
    nodes = {name: node_record(name) for name in "abc"}
    return ClusterView(jobs={job.name: job} if job is not None else {}, nodes=nodes, steady_since=-1000.0)


def node_record(name: str, incarnation: str = "") -> NodeRecord:
    """Return the record of node `name`."""
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
    """Return the record of node `name`'s worker."""
    return WorkerRecord(
        node=name, incarnation="w", address="a:1", pid=7, state=state, boundary=boundary, error=error, proven=()
    )


def held(*layers: str, boundary: int = 5) -> dict[StateKey, StoredFile]:
    """Files of these layers in the store."""
    return {
        StateKey("j", 1, boundary, layer): StoredFile(path=Path(f"/s/{layer}"), size_bytes=10, checksum=f"sha-{layer}")
        for layer in layers
    }


def state_record(*layers: str, name: str = "a", durable: tuple[str, ...] = (), generation: int = 0) -> StateRecord:
    """Return etcd's record of such files on node `name`."""
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
RUNNING = worker(job="j", prepared=G1, started=G1, layers=LAYERS, has_journal=True)
RUNNING_RECORD = {(1, 0): record(WorkerState.RUNNING)}
STOPPED = RUNNING.did_choose(Standstill(G1, 5)).did_stop(Standstill(G1, 5))
STOPPED_RECORD = {(1, 0): record(WorkerState.STOPPED, boundary=5)}
STOP = StopRecord(generation=1, save=Save.MOVES, boundary=5)
