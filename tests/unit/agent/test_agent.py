"""What a node's agent writes into etcd and its store, with an etcd that is a view."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.daemon.coordination.cluster_view import ClusterView, JobView
from headway.daemon.etcd.transaction import Compare, Delete, Put
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.node.agent import Agent, Surroundings
from headway.daemon.records import Keys, PlanRecord, Save, SpecRecord, StagePlan, StopRecord, WorkerRecord, WorkerState
from headway.daemon.storage.state_key import StateKey
from headway.daemon.storage.state_store import StateStore
from headway.daemon.supervision.worker_status import JobGeneration, OrderKind, Standstill, WorkerStatus
from headway.stages.spec import ModelSpec

LAYERS = ("embed", "block.0", "head")
HEAD = StateKey("j", 1, 5, "head")
HEAD_IN_ETCD = Keys.state("j", 1, 5, "head", "a")


class EtcdOfOneView:
    """Takes every transaction, and shows it at once."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._revision = 0

    async def transaction(self, conditions: Sequence[Compare], changes: Sequence[Put | Delete]) -> int:  # noqa: ARG002
        """All changes in one revision."""
        self._revision += 1
        for change in changes:
            value = change.value if isinstance(change, Put) else None
            self._view.apply(
                change.key,
                value,
                mod_revision=self._revision,
                create_revision=self._revision,
                now=float(self._revision),
            )
        return self._revision


class QuietSupervisor:
    """One worker that does nothing but stand where the test says."""

    def __init__(self, status: WorkerStatus) -> None:
        self.statuses = (status,)

    def forget(self, is_over: object) -> None:
        """It has no failures."""


def plan(generation: int, *stages: tuple[str, tuple[str, ...]], boundary: int = 0) -> PlanRecord:
    """A plan whose stages are (node, layers)."""
    return PlanRecord(
        generation=generation,
        timeline=1,
        boundary=boundary,
        source="nodes",
        stages=tuple(
            StagePlan(node=node, node_incarnation=f"{node}-1", device_index=0, layers=layers, depth=4)
            for node, layers in stages
        ),
    )


async def test_a_boundary_that_is_written_again_is_registered_again(tmp_path: Path) -> None:
    """Its first files were deleted when the next plan ran; that plan is stopped where it began."""
    one, two = plan(1, ("a", LAYERS)), plan(2, ("a", LAYERS[:2]), ("b", LAYERS[2:]), boundary=5)
    stop = StopRecord(generation=1, save=Save.MOVES, boundary=5)
    spec = JobSpec(job=JobSection(name="j"), model=ModelSpec(num_hidden_layers=1))
    job = JobView(name="j", submission=SpecRecord(spec=spec), plan=one, next=two, stop=stop)
    view = ClusterView(jobs={"j": job})
    store = StateStore(tmp_path / "store")
    store.open()
    of = JobGeneration("j", 1)
    status = WorkerStatus(
        device_index=0, incarnation="w", pid=1, address="a:1", job="j", prepared=of, started=of, layers=LAYERS,
        is_last=True, stopped=Standstill(of, 5),
        pending=frozenset((OrderKind.PREPARE, JobGeneration("j", later)) for later in (2, 3)),
    )  # fmt: skip
    around: dict[str, Any] = {"etcd": EtcdOfOneView(view), "library": None, "client": None, "checkpoint_root": tmp_path}
    agent = Agent(Surroundings(node="a", incarnation="a-1", lease_id=lambda: 1, view=view, store=store, **around))

    def write() -> None:
        for layer in ("head", "journal"):
            key = replace(HEAD, layer=layer)
            store.path_of(key).write_bytes(b"state")
            store.adopt(key, store.path_of(key), size_bytes=5, sha256=layer)
        agent.cluster_changed()

    async def until(is_registered: bool) -> None:
        async with asyncio.timeout(5):
            while (HEAD_IN_ETCD in view.revisions) is not is_registered:
                await asyncio.sleep(0.01)

    write()
    working = asyncio.create_task(agent.run(QuietSupervisor(status)))  # type: ignore[arg-type]
    try:
        await until(True)
        running = WorkerRecord(node="a", incarnation="w", address="a:1", pid=1, state=WorkerState.RUNNING)
        job.workers |= {(3, 0): running}
        job.plan, job.next, job.stop = plan(3, ("a", LAYERS), boundary=5), None, None
        agent.cluster_changed()
        await until(False)
        job.plan, job.next, job.stop = one, two, stop
        write()
        await until(True)
    finally:
        working.cancel()
        await asyncio.wait([working])
