"""The control plane as a cluster grows: one decision of the leader, and what an event costs each daemon.

decision_N_ms: the leader's decision about 20 running and 5 queued jobs on N nodes, after the event that comes most
often: a worker's record of how its seconds were spent. decision_EVENT_N_ms: after other events: a batch of a job
(progress), a measured way (probe), a generation that a node has seen (seen), a device's speed (speed), the first node
that comes while no job waits for a plan (newcomer). From then on all running jobs lack a plan: another node comes
(join), an idle one drains (drain) or goes (leave), a node of a plan is lost, which one job answers (lost), GROUP nodes
come or go at once (joins, leaves). decision_waiting_N_ms: after a report of seconds meanwhile.
agent_N_ms, agent_EVENT_N_ms: the work of a node's agent for
such an event; the newest boundary of every job lacks copies. listing_N_mb: what a daemon reads when it lists
everything. Plans are computed by other processes, and are not part of this: after the first measured way they are all
stale. Medians of several, in milliseconds of this thread's own work. growth_decision: the time at the largest size
over that at 100 nodes, divided by the ratio of the sizes; 1 is linear. --plot draws the growth.
"""

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from rigs.measure import machine, progress

from headway.daemon.agent.local_state import NodeState
from headway.daemon.agent.steps_due import next_steps
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import GoodputRecord, LinkProbe, ProbeRecord, ProgressRecord
from headway.daemon.cluster.records import (
    Device,
    NodeRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    StateFile,
    StateRecord,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.decide.cluster_view import SETTLE_S, ClusterView
from headway.daemon.decide.commands import Command, Transaction
from headway.daemon.decide.coordinator import decide
from headway.daemon.decide.plans import PlanCache
from headway.daemon.jobs.job import JobSection, JobSpec, PlacementSpec
from headway.daemon.plan.planner import answer
from headway.daemon.worker.goal import WorkerStatus
from headway.stages.spec import ModelSpec, TrainSpec

SIZES = (10, 100, 300, 1000)
NUM_RUNNING, NUM_QUEUED = 20, 5
MOST_STAGES = 16
NUM_WANTED = 8
"""Nodes that each queued job waits for, on a site with half as many."""
BOUNDARIES = (80, 90, 100)
"""Boundaries of each job that nodes hold. The newest has no copies yet, as for some seconds after each snapshot."""
NUM_PEERS = 12
"""Peers to which each node has measured its way."""
GROUP = 100
"""Nodes that come or go at once."""

SETTLED_AT = 10_000.0
"""The moment from which decisions are measured: what waited is over."""
MOST_ROUNDS = 100


class Event(Protocol):
    """Writes one record; numbers rise."""

    __name__: str

    def __call__(self, number: int, /, *, now: float) -> None: ...


class Records:
    """A cluster's records, and a view that has seen them all."""

    def __init__(self, num_nodes: int) -> None:
        self.view = ClusterView()
        self.view.set_in_sight(True, now=-1000.0)
        self.num_bytes = 0
        self._revision = 0
        self._coming: list[tuple[str, bytes | None]] | None = None
        """What etcd has written and the view has not seen yet; None: the view sees everything at once."""
        self._nodes = [f"node-{number:04d}" for number in range(num_nodes)]
        self._joined: list[str] = []
        self._lost: NodeRecord | None = None
        for number in range(num_nodes):
            self._add_node(number)
        per_job = max(1, min(MOST_STAGES, num_nodes // NUM_RUNNING))
        for number in range(min(NUM_RUNNING, num_nodes)):
            self._submit(number, max_nodes=per_job)
        for number in range(NUM_RUNNING, NUM_RUNNING + NUM_QUEUED):
            self._submit(number, min_nodes=NUM_WANTED, sites=("full",))

    def put(self, key: str, record: object | None, *, now: float = 0.0) -> None:
        """Write a record, which the view sees at once. None: delete it."""
        value = encode(record) if record is not None else None
        self.num_bytes += len(key) + len(value or b"")
        if self._coming is not None:
            self._coming.append((key, value))
        else:
            self._apply(key, value, now=now)

    def happens(self, event: Event, number: int, *, now: float) -> None:
        """Let something happen that the view does not see yet."""
        self._coming = []
        event(number, now=now)

    def see(self, *, now: float) -> None:
        """Let the view see what has happened."""
        coming, self._coming = self._coming or [], None
        for key, value in coming:
            self._apply(key, value, now=now)

    def _apply(self, key: str, value: bytes | None, *, now: float) -> None:
        self._revision += 1
        self.view.apply(key, value, mod_revision=self._revision, create_revision=self._revision, now=now)

    def carry_out(self, command: Command, *, now: float) -> None:
        """Write a decision, as the leader does."""
        assert isinstance(command, Transaction)
        values = command.puts | {key: value for key, (value, _) in command.leased.items()}
        for key, value in (values | dict.fromkeys(command.deletes)).items():
            self._apply(key, value, now=now)

    def goodput(self, number: int, *, now: float) -> None:
        """Let a worker of the first job tell how its seconds were spent."""
        plan = self.view.jobs["job-00"].plan
        assert plan is not None
        position = number % len(plan.workers)
        stage = plan.workers[position]
        seconds = {"computing": float(number), "waiting": 1.0, "idle": 0.5}
        record = GoodputRecord(node=stage.node, incarnation=f"{stage.node}/0", seconds=seconds, recent=seconds)
        self.put(Keys.goodput("job-00", plan.generation, position), record, now=now)

    def progress(self, number: int, *, now: float) -> None:
        """Let a job finish a batch."""
        before = self.view.jobs["job-01"].progress
        assert before is not None
        self.put(Keys.of("job-01", "progress"), replace(before, batch=before.batch + number), now=now)

    def probe(self, number: int, *, now: float) -> None:
        """Let a node measure its ways again."""
        name = self._nodes[number % len(self._nodes)]
        before = self.view.probes[name]
        ways = {peer: LinkProbe(round_trip_s=0.01, bytes_per_s=1e8 + number) for peer in before.peers}
        self.put(Keys.probes(name), ProbeRecord(incarnation=before.incarnation, peers=ways), now=now)

    def seen(self, number: int, *, now: float) -> None:
        """Let a node say that it has seen a plan, as others have."""
        node = self.view.nodes[self._nodes[number % len(self._nodes)]]
        self.put(Keys.node(node.name), replace(node, generations={"job-02/u2": 1}), now=now)

    def speed(self, number: int, *, now: float) -> None:
        """Let a node find another speed of its device, less than that of others of its model."""
        node = self.view.nodes[self._nodes[number % len(self._nodes)]]
        devices = (replace(node.devices[0], speed=0.9 - 0.001 * number),)
        self.put(Keys.node(node.name), replace(node, devices=devices), now=now)

    def join(self, number: int, *, now: float) -> None:
        """Let another node come."""
        self._add_node(10_000 + number, now=now)
        self._joined.append(f"node-{10_000 + number:04d}")

    def joins(self, number: int, *, now: float) -> None:
        """Let many nodes come at once."""
        for each in range(GROUP):
            self.join(GROUP * number + each, now=now)

    def drain(self, number: int, *, now: float) -> None:
        """Let a node drain that came, and is in no plan."""
        node = self.view.nodes[self._joined[number % len(self._joined)]]
        self.put(Keys.node(node.name), replace(node, is_draining=not node.is_draining), now=now)

    def leave(self, _number: int, *, now: float) -> None:
        """Let a node go that came, and is in no plan."""
        self._lose(self._joined.pop(0), now=now)

    def leaves(self, number: int, *, now: float) -> None:
        """Let many nodes go at once."""
        for _ in range(GROUP):
            self.leave(number, now=now)

    def lost(self, _number: int, *, now: float) -> None:
        """Let a node of a job's plan be lost."""
        plan = self.view.jobs["job-03"].plan
        assert plan is not None
        self._lost = self.view.nodes[plan.workers[-1].node]
        self.put(Keys.node(self._lost.name), None, now=now)

    def find(self, _number: int, *, now: float) -> None:
        """Let the lost node be back."""
        if self._lost is not None:
            self.put(Keys.node(self._lost.name), self._lost, now=now)
        self._lost = None

    def node_state(self, *, now: float) -> NodeState:
        """Return the state of the first node, whose worker runs the first stage of the first job."""
        name = self._nodes[0]
        worker = WorkerStatus(device_index=0, incarnation=f"{name}/0", address=f"{name}:1", pid=1)
        return NodeState(name=name, incarnation=f"{name}-1", workers=(worker,), now=now)

    def _spec(self, number: int, **placement: Any) -> JobSpec:
        return JobSpec(
            job=JobSection(name=f"job-{number:02d}"),
            model=ModelSpec(num_hidden_layers=32, hidden_size=64, intermediate_size=128),
            train=TrainSpec(batches=100_000, microbatches=32),
            placement=PlacementSpec(**placement),
        )

    def _add_node(self, number: int, *, now: float = 0.0) -> None:
        name = f"node-{number:04d}"
        record = NodeRecord(
            name=name,
            incarnation=f"{name}-1",
            address=f"10.0.{number // 250}.{number % 250}:7070",
            host=f"10.0.{number // 250}.{number % 250}",
            site="full" if 0 < len(self._nodes) - number <= NUM_WANTED // 2 else f"site-{number % 5}",
            devices=(Device(kind="cpu", model="fake", index=0, speed=1.0, arithmetic_class="one"),),
            memory_bytes=0,
            arithmetic_class="one",
            generations={},
        )
        self.put(Keys.node(name), record, now=now)
        peers = [self._nodes[(number + step) % len(self._nodes)] for step in range(1, NUM_PEERS)]
        ways = {peer: LinkProbe(round_trip_s=0.01, bytes_per_s=1e8) for peer in peers if peer != name}
        self.put(Keys.probes(name), ProbeRecord(incarnation=f"{name}-1", peers=ways), now=now)

    def _lose(self, name: str, *, now: float) -> None:
        self.put(Keys.node(name), None, now=now)
        self.put(Keys.probes(name), None, now=now)

    def _submit(self, number: int, **placement: Any) -> None:
        spec = self._spec(number, **placement)
        self.put(Keys.of(spec.job.name, "spec"), SpecRecord(spec=spec, uid=f"u{number}", submitted_at=1.0))
        self.put(Keys.of(spec.job.name, "phase"), PhaseRecord())

    def start_prepared(self, *, now: float) -> None:
        """Let the workers of every first plan be ready and train, as the plan predicts."""
        for name, job in self.view.jobs.items():
            if job.phase.phase is not Phase.PREPARING or job.next is None or job.spec is None:
                continue
            plan, spec = job.next, job.spec
            self.put(Keys.of(name, "plan"), plan, now=now)
            self.put(Keys.of(name, "next"), None, now=now)
            running = PhaseRecord(phase=Phase.RUNNING, generation=plan.generation, since=now)
            self.put(Keys.of(name, "phase"), running, now=now)
            pace = spec.train.tokens_per_batch / plan.predicted_batch_seconds
            told = ProgressRecord(generation=plan.generation, batch=100, loss=3.0, tokens_per_second=pace)
            self.put(Keys.of(name, "progress"), told, now=now)
            for position, stage in enumerate(plan.workers):
                worker = WorkerRecord(
                    node=stage.node,
                    incarnation=f"{stage.node}/0",
                    address=f"{stage.node}:1",
                    pid=1,
                    state=WorkerState.RUNNING,
                )
                self.put(Keys.worker(name, plan.generation, position), worker, now=now)
            for boundary in BOUNDARIES:
                self._add_state(spec, plan, boundary)

    def _add_state(self, spec: JobSpec, plan: PlanRecord, boundary: int) -> None:
        """Let each stage's node hold a boundary, and the next stage's node a copy unless the boundary is the newest."""
        files: dict[str, dict[str, StateFile]] = {}
        for position, stage in enumerate(plan.workers):
            parts = (*stage.layers, JOURNAL) if plan.has_journal(position) else stage.layers
            written = {part: StateFile(size_bytes=1 << 20, checksum=f"{position:016x}") for part in parts}
            copier = plan.workers[(position + 1) % len(plan.workers)].node
            for node in (stage.node, copier) if boundary != BOUNDARIES[-1] else (stage.node,):
                files.setdefault(node, {}).update(written)
        for node, held in files.items():
            record = StateRecord(incarnation=f"{node}-1", generation=plan.generation, files=held)
            self.put(Keys.state(spec.job.name, plan.timeline, boundary, node), record)


def settle(records: Records, plans: PlanCache, *, now: float) -> None:
    """Compute plans and carry out decisions until nothing is left to do, as it is at most moments of a cluster."""
    for _ in range(MOST_ROUNDS):
        decision = decide(records.view, now=now, plans=plans)
        for request in decision.missing:
            plans.answered(request, answer(request.question))
        plans.decided((), jobs=records.view.jobs, now=now)
        for command in decision.commands if not decision.missing else ():
            records.carry_out(command, now=now)
        records.start_prepared(now=now)
        if not decision.missing and not any(command.job for command in decision.commands):
            return
    raise RuntimeError("the cluster does not come to rest")


def timed(work: Callable[[], object], *, repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Return the median of the milliseconds of a piece of work. The first time is not among them.

    before: what happens before each time.
    """
    before()
    work()
    found = []
    for _ in range(repeats):
        before()
        began = time.thread_time()
        work()
        found.append(1e3 * (time.thread_time() - began))
    return median(found)


def measure(size: int, *, repeats: int) -> dict[str, float]:
    """Return the figures of a cluster of one size."""
    records, plans = Records(size), PlanCache()
    for now in (SETTLED_AT - 3600.0, SETTLED_AT):
        settle(records, plans, now=now)
    phases = Counter(job.phase.phase for job in records.view.jobs.values())
    running = min(NUM_RUNNING, size)
    if phases != {Phase.RUNNING: running, Phase.QUEUED: NUM_QUEUED}:
        raise RuntimeError(f"the jobs are not as they should be measured: {phases}")
    found = {f"listing_{size}_mb": records.num_bytes / 1e6}
    now, numbers = SETTLED_AT, itertools.count(1)

    def happens(event: Event, *, after_s: float = 1.0) -> None:
        nonlocal now
        now += after_s
        records.happens(event, next(numbers), now=now)

    def decision(*, does_nothing: bool = True) -> None:
        records.see(now=now)
        decided = decide(records.view, now=now, plans=plans)
        plans.decided(decided.missing, jobs=records.view.jobs, now=now)
        # The record of use, of no job, is not carried out, so it is due each time.
        if does_nothing and any(command.job for command in decided.commands):
            raise RuntimeError(f"a decision that is measured does something: {decided.commands}")

    def work_of_an_agent() -> None:
        records.see(now=now)
        next_steps(records.view, records.node_state(now=now))

    def rest_and_join() -> None:
        nonlocal now
        now += SETTLE_S
        settle(records, plans, now=now)
        happens(records.join)

    def find_and_lose() -> None:
        happens(records.find)
        decision()
        happens(records.lost)

    news: tuple[Event, ...] = (
        *(records.goodput, records.progress, records.probe),
        *(records.seen, records.speed, records.join),
    )
    for event in news:
        kind = f"{event.__name__}_" if event != records.goodput else ""
        before = partial(happens, event)
        found[f"decision_{kind}{size}_ms"] = timed(decision, repeats=repeats, before=before)
        found[f"agent_{kind}{size}_ms"] = timed(work_of_an_agent, repeats=repeats, before=before)
    before = partial(happens, records.goodput)
    found[f"decision_waiting_{size}_ms"] = timed(decision, repeats=repeats, before=before)
    changes: tuple[Event, ...] = (records.drain, records.leave, records.joins, records.leaves)
    for event in changes:
        before = partial(happens, event)
        found[f"decision_{event.__name__}_{size}_ms"] = timed(decision, repeats=repeats, before=before)
        found[f"agent_{event.__name__}_{size}_ms"] = timed(work_of_an_agent, repeats=repeats, before=before)
    answers = partial(decision, does_nothing=False)
    found[f"decision_lost_{size}_ms"] = timed(answers, repeats=repeats, before=find_and_lose)
    find_and_lose()
    found[f"decision_newcomer_{size}_ms"] = timed(decision, repeats=repeats, before=rest_and_join)
    return found


def plot(found: dict[str, float], sizes: list[int], file: Path) -> None:
    """Draw how decisions and agents grow with the cluster."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, sides = pyplot.subplots(1, 2, figsize=(10, 4), sharex=True, sharey=True)
    for axis, what in zip(sides, ("decision", "agent"), strict=True):
        for kind in ("", "progress_", "probe_", "seen_", "speed_", "join_", "leave_"):
            axis.plot(
                sizes, [found[f"{what}_{kind}{size}_ms"] for size in sizes], "o-", label=kind.strip("_") or "goodput"
            )
        axis.set(xscale="log", yscale="log", xlabel="nodes", title=f"{what} after one event, ms")
        axis.grid(visible=True, alpha=0.3)
    sides[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> int:
    """Print the table, or one line of JSON alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of nodes")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plot", type=Path, help="file for the plot of the growth")
    options = parser.parse_args()
    found: dict[str, float] = {}
    for size in options.sizes:
        progress(f"{size} nodes")
        found |= measure(size, repeats=options.repeats)
    if 100 in options.sizes and options.sizes[-1] > 100:
        growth = found[f"decision_{options.sizes[-1]}_ms"] / found["decision_100_ms"]
        found["growth_decision"] = growth / (options.sizes[-1] / 100)
    if options.plot is not None:
        plot(found, options.sizes, options.plot)
    if options.json:
        print(json.dumps({key: round(value, 4) for key, value in found.items()}))
    else:
        print(machine())
        for key, value in found.items():
            print(f"{key:28s} {value:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
