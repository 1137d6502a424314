"""A cluster that is only a view: one job under way on two nodes, one that failed."""

from dataclasses import replace
from types import TracebackType
from typing import Self

from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import ProgressRecord
from headway.daemon.cluster.records import (
    DesiredRecord,
    Device,
    EventRecord,
    NodeRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    WorkerPart,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.job import JobSection, JobSpec

SPEC = JobSpec(job=JobSection(name="demo"))
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nRuntimeError: it broke\n'


def node(name: str) -> NodeRecord:
    """A CPU node."""
    return NodeRecord(
        name=name,
        incarnation=f"{name}-1",
        address=f"{name}:4711",
        host=name,
        site="home",
        devices=(Device(kind="cpu"),),
        memory_bytes=1 << 30,
        arithmetic_class="one",
    )


def records() -> dict[str, object]:
    """The records by key."""
    half = len(SPEC.layers) // 2
    stages = tuple(
        WorkerPart(node=name, node_incarnation=f"{name}-1", device_index=0, layers=layers, depth=2 - index)
        for index, (name, layers) in enumerate((("a", SPEC.layers[:half]), ("b", SPEC.layers[half:])))
    )
    plan = PlanRecord(generation=3, timeline=1, workers=stages, reason="node b joined", exact_reason="one class")
    worker = WorkerRecord(node="a", incarnation="w", address="a:1", pid=1, state=WorkerState.RUNNING)
    progress = ProgressRecord(generation=3, batch=49, loss=2.5, tokens_per_second=4096.0, recent=((48, 2.6), (49, 2.5)))
    broken = replace(SPEC, job=JobSection(name="broken"))
    return {
        Keys.node("a"): node("a"),
        Keys.node("b"): node("b"),
        Keys.LEADER: LeaderRecord(node="b", incarnation="b-1"),
        Keys.of("demo", "spec"): SpecRecord(spec=SPEC, submitted_at=1.0),
        Keys.of("demo", "desired"): DesiredRecord(),
        Keys.of("demo", "phase"): PhaseRecord(phase=Phase.RUNNING, generation=3),
        Keys.of("demo", "plan"): plan,
        Keys.worker("demo", 3, 0): worker,
        Keys.of("demo", "progress"): progress,
        Keys.event("demo", 1): EventRecord(at=1.0, text="Node b joined.", generation=3),
        Keys.of("broken", "spec"): SpecRecord(spec=broken, submitted_at=2.0),
        Keys.of("broken", "phase"): PhaseRecord(phase=Phase.FAILED, reason="a worker failed", error=TRACEBACK),
    }


def cluster_view() -> ClusterView:
    """The view, folded from records."""
    view = ClusterView()
    for revision, (key, record) in enumerate(records().items(), start=1):
        view.apply(key, encode(record), mod_revision=revision, create_revision=revision)
    return view


class FakeSession:
    """Stands in for ClusterSession, whatever address it is given."""

    full = ""

    def __init__(self, address: object) -> None:
        self.address = address
        self.identity = None
        self.client = self

    async def has_users(self) -> bool:
        """It has none of its own."""
        return False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    async def view(self) -> ClusterView:
        """The one view."""
        return cluster_view()

    async def why_full(self) -> str:
        """What a test says of etcd."""
        return self.full
