"""An agent of one node without a cluster: etcd is a view, and the worker does nothing but run."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.daemon.agent.agent import Agent, Surroundings
from headway.daemon.base.errors import ConflictError
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import (
    Failure,
    Phase,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    StateRecord,
    WorkerPart,
)
from headway.daemon.cluster.transaction import Compare, Delete, Put
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.worker.goal import (
    Actual,
    Goal,
    Heartbeat,
    JobGeneration,
    WorkerStatus,
    WrittenFile,
    Wrote,
)
from headway.stages.spec import ModelSpec
from tests.rigs.agent_views import node_record
from tests.rigs.cluster_member import member

LAYERS = ("embed", "block.0", "head")
PARTS = (*LAYERS, "journal")
G1 = JobGeneration("j", 1)
PLAN = PlanRecord(
    generation=1,
    timeline=1,
    workers=(WorkerPart(node="a", node_incarnation="a-1", device_index=0, layers=LAYERS, depth=4),),
)


def state_key(boundary: int) -> str:
    """Return the key of node a's record of a boundary."""
    return Keys.state("j", 1, boundary, "a")


@dataclass
class EtcdOfOneView:
    """Takes every transaction, and shows it at once unless it is to be lost."""

    view: ClusterView
    revision: int = 100
    is_losing: bool = False
    leases: list[int] = field(default_factory=list)
    on_change: Callable[[Put | Delete], None] = lambda _: None
    before: Callable[[], None] = lambda: None
    """Happens when a transaction is under way."""

    async def transaction(self, conditions: Sequence[Compare], changes: Sequence[Put | Delete]) -> int:
        """All changes in one revision, if the keys are as they were when it was decided."""
        self.before()
        if changed := [one.key for one in conditions if self.view.revision_of(one.key) != one.mod_revision]:
            raise ConflictError(changed[0], "has changed")
        self.revision += 1
        for change in changes:
            self.on_change(change)
            if isinstance(change, Put):
                self.leases.append(change.lease_id)
            if not self.is_losing:
                self.show(change.key, change.value if isinstance(change, Put) else None)
        return self.revision

    def show(self, key: str, value: bytes | None) -> None:
        """Change the view as a watch would."""
        self.view.apply(key, value, mod_revision=self.revision, create_revision=self.revision)


class QuietSupervisor:
    """One worker that does nothing but run, or wait."""

    heartbeats: Mapping[int, Heartbeat] = {}

    def __init__(self, *, is_idle: bool = False) -> None:
        actual = Actual() if is_idle else Actual(job="j", prepared=1, generation=1, layers=LAYERS)
        status = WorkerStatus(device_index=0, incarnation="w", pid=1, address="a:1", actual=actual)
        self.statuses = (status,)
        self.goals: list[Goal] = []
        self.failed: list[tuple[JobGeneration, str]] = []

    def forget(self, is_over: object) -> None:
        """Its failures stay."""

    def set_goal(self, index: int, goal: Goal) -> bool:
        """It gets there in its own time."""
        self.goals.append(goal)
        self.statuses = (replace(self.statuses[index], goal=goal),)
        return True

    def fail(self, index: int, run_key: JobGeneration, reason: str, *, damaged: str = "") -> None:
        """It cannot do its part."""
        self.failed.append((run_key, reason))
        self.statuses = (self.statuses[index].failed(Failure(reason, damaged=damaged), run_key=run_key),)

    def log_path(self, *_: object) -> Path:
        """It says nothing."""
        return Path("worker.log")


@dataclass
class Scene:
    """An agent of node a in a view of its own."""

    view: ClusterView
    etcd: EtcdOfOneView
    store: StateStore
    agent: Agent
    lease_id: int = 1

    @property
    def job(self) -> JobView:
        return self.view.jobs["j"]

    async def write(self, boundary: int, *, timeline: int = 1, size_bytes: int = 5) -> str:
        """Write a worker's snapshot: files at their places, and the report."""
        folder = self.store.directory_of("j", timeline, boundary)
        files = []
        for part in PARTS:
            path = folder / f"{part}.safetensors"
            path.write_bytes(b"s" * size_bytes)
            files.append(WrittenFile(layer=part, path=str(path), size_bytes=size_bytes, checksum=f"sha-{part}"))
        wrote = Wrote(job="j", generation=1, boundary=boundary, files=tuple(files), timeline=timeline, is_snapshot=True)
        return await self.agent.worker_wrote(wrote)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the agent does."""
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)

    def registered(self, boundary: int) -> StateRecord | None:
        return self.job.state.get((1, boundary), {}).get("a")

    @asynccontextmanager
    async def at_work(self, supervisor: "QuietSupervisor | None" = None) -> AsyncIterator[None]:
        """While the agent runs."""
        working = asyncio.create_task(self.agent.run(supervisor or QuietSupervisor()))  # type: ignore[arg-type]
        try:
            yield
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working


def make_scene(tmp_path: Path, **more: Any) -> Scene:
    """more: of the agent's surroundings."""
    spec = JobSpec(job=JobSection(name="j"), model=ModelSpec(num_hidden_layers=1))
    job = JobView(
        name="j", submission=SpecRecord(spec=spec, uid="u"), plan=PLAN, phase=PhaseRecord(phase=Phase.RUNNING)
    )
    view = ClusterView(jobs={"j": job}, nodes={"a": node_record("a")})
    store = StateStore(tmp_path / "store", quota_bytes=1000)
    store.open()
    etcd = EtcdOfOneView(view)
    around = {"library": None, "client": None, "checkpoint_root": tmp_path, "reach": None} | more
    own = member(view=view, etcd=etcd, lease_id=lambda: found.lease_id)
    found: Scene = Scene(view, etcd, store, Agent(Surroundings(member=own, store=store, **around)))
    return found
