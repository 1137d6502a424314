"""A whole cluster without processes: etcd, nodes and workers as plain values, time as a number, chance as a seed.

Agents follow docs/architecture.md; every node has a view of its own that lags behind etcd and gets events late, twice
or out of order. `_check` looks at every transaction, `_check_training` at every step of a worker.
"""

import random
from dataclasses import replace
from typing import Any

from headway.daemon.coordination.case import JOURNAL, devices, place
from headway.daemon.coordination.cluster_view import ClusterView, JobView
from headway.daemon.coordination.commands import Command, Transaction, WriteManifest
from headway.daemon.coordination.coordinator import decide
from headway.daemon.jobs.job import JobSection, JobSpec, PlacementSpec
from headway.daemon.records import (
    CheckpointRecord,
    Desired,
    DesiredRecord,
    Device,
    Keys,
    LeaderRecord,
    NodeRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    Save,
    SpecRecord,
    StateRecord,
    StopRecord,
    WorkerRecord,
    WorkerState,
    decode,
    encode,
)
from headway.stages.spec import ModelSpec, TrainSpec
from tests.fakes.simulated_etcd import Store
from tests.fakes.simulated_node import HeldKey, Node, Worker

MOVING_PHASES = (Phase.PREPARING, Phase.CHANGING, Phase.STOPPING)


def small_spec(name: str, *, num_blocks: int = 3, batches: int = 6, **placement: Any) -> JobSpec:
    """A job of num_blocks + 2 layers."""
    return JobSpec(
        job=JobSection(name=name),
        model=ModelSpec(num_hidden_layers=num_blocks, hidden_size=64, intermediate_size=128),
        train=TrainSpec(batches=batches, microbatches=8),
        placement=PlacementSpec(**placement),
    )


class SimulatedCluster:
    """The world. `random_step` lets something happen; `calm` lets everything happen that is due."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.store = Store()
        self.nodes: dict[str, Node] = {}
        self.checkpoint_files: dict[str, set[HeldKey]] = {}
        self.manifests: dict[str, bytes] = {}
        self.num_incarnations = 0
        self.num_events = 0
        self.generations: dict[str, int] = {}
        self.reached: dict[tuple[str, int], int] = {}
        """(job, timeline): the furthest that any stage has trained on it."""
        self.leader = ""

    # --- What people and machines do ----------------------------------------------------------------------------------

    def add_node(self, name: str, *, num_devices: int = 1, speed: float = 1.0) -> Node:
        self.num_incarnations += 1
        incarnation = f"{name}-{self.num_incarnations}"
        record = NodeRecord(
            name=name,
            incarnation=incarnation,
            address=f"{name}:1",
            host=name,
            site="here",
            devices=tuple(Device(kind="cpu", index=index, speed=speed) for index in range(num_devices)),
            memory_bytes=0,
            arithmetic_class="one",
        )
        node = Node(record, [Worker(f"{incarnation}/{index}") for index in range(num_devices)])
        self.nodes[name] = node
        self.store.transact({}, {Keys.node(name): encode(record)}, lease=node.lease)
        return node

    def submit(self, spec: JobSpec) -> None:
        name = spec.job.name
        assert self.store.transact(
            {Keys.of(name, "spec"): 0},
            {
                Keys.of(name, "spec"): encode(SpecRecord(spec=spec)),
                Keys.of(name, "desired"): encode(DesiredRecord()),
                Keys.of(name, "phase"): encode(PhaseRecord(reason="submitted")),
            },
        )

    def want(self, job: str, state: Desired) -> None:
        key = Keys.of(job, "desired")
        before = decode(self.store.values[key], DesiredRecord)
        self.store.transact({}, {key: encode(DesiredRecord(state=state, request=before.request + 1))})

    def drain(self, name: str) -> None:
        node = self.nodes[name]
        node.record = replace(node.record, is_draining=True)
        self.store.transact({}, {Keys.node(name): encode(node.record)}, lease=node.lease)

    def leave_if_unnamed(self, node: Node) -> None:
        """A draining daemon goes when no plan names it and nobody needs its files to start."""
        if not node.record.is_draining or not node.is_alive:
            return
        truth = self.truth()
        named = {
            stage.node for job in truth.jobs.values() for plan in (job.plan, job.next) if plan for stage in plan.stages
        }
        if node.name not in named and not any(self._is_needed(truth.jobs.get(key[0]), key) for key in node.held):
            self.kill(node.name)
            self.expire(node.name)

    def kill(self, name: str) -> None:
        self.nodes[name].is_alive = False

    def expire(self, name: str) -> None:
        """The lease of a dead node ends."""
        node = self.nodes.pop(name)
        assert not node.is_alive
        self.store.revoke(node.lease)
        if self.leader == name:
            self.leader = ""

    def fail_worker(self, name: str, error: str = "Traceback: boom") -> None:
        """Its process dies and is replaced; its generations are told to have failed."""
        node = self.nodes[name]
        worker = node.workers[0]
        generation = max(worker.prepared, worker.started)
        self.num_incarnations += 1
        node.workers[0] = Worker(f"{node.lease}/{self.num_incarnations}")
        if generation:
            node.workers[0].failure = (generation, error)

    # --- Time and delivery --------------------------------------------------------------------------------------------

    def deliver(self, node: Node, *, count: int | None = None, disorderly: bool = False) -> None:
        """Feed a node's view: in order; or, disorderly, some of it shuffled, and some of it again."""
        end = len(self.store.history) if count is None else min(node.seen + count, len(self.store.history))
        batch = self.store.history[node.seen : end]
        if disorderly:
            batch = batch + self.random.sample(self.store.history[:end], min(2, end))
            self.random.shuffle(batch)
        for change in batch:
            node.view.apply(
                change.key,
                change.value,
                mod_revision=change.revision,
                create_revision=change.create_revision,
                now=self.now,
            )
        node.seen = end

    def truth(self) -> ClusterView:
        """A view of what is in etcd now, by a fresh reader."""
        view = ClusterView()
        for key, value in self.store.values.items():
            created, modified = self.store.revisions[key]
            view.apply(key, value, mod_revision=modified, create_revision=created, now=self.now)
        return view

    def phase(self, job: str) -> PhaseRecord:
        return decode(self.store.values[Keys.of(job, "phase")], PhaseRecord)

    # --- The leader ---------------------------------------------------------------------------------------------------

    def elect(self) -> None:
        """Some living node leads; it has read everything up to its election."""
        candidates = sorted(name for name, node in self.nodes.items() if node.is_alive and not node.is_frozen)
        if not candidates:
            self.leader = ""
            return
        self.leader = self.random.choice(candidates)
        node = self.nodes[self.leader]
        record = LeaderRecord(node=self.leader, incarnation=node.lease)
        self.store.transact({}, {Keys.LEADER: encode(record)}, lease=f"leader {node.lease}")
        self.deliver(node)

    def lead(self, *, loses_office: bool = False) -> float | None:
        """The leader decides once and writes it down, or loses office before it can. Returns its next deadline."""
        if self.leader not in self.nodes or not self.nodes[self.leader].is_alive:
            self.elect()
        if not self.leader:
            return None
        view = self.nodes[self.leader].view
        office = view.revision_of(Keys.LEADER)
        decision = decide(view, now=self.now, written_at=self.now)
        for command in decision.commands:
            if loses_office:
                self.elect()
            self._execute(command, office)
        return decision.wake_at

    def _execute(self, command: Command, office: int) -> bool:
        if isinstance(command, WriteManifest):
            self.manifests[command.url] = command.manifest
            manifest = decode(command.manifest, CheckpointRecord)
            held = self.checkpoint_files.get(command.job, set())
            for layer in manifest.files:
                assert (command.job, manifest.timeline, manifest.boundary, layer) in held, "a manifest of missing files"
            command = command.then
        before = self.truth().jobs[command.job] if command.job else None
        done = self.store.transact(command.compare | {Keys.LEADER: office}, command.puts, command.deletes)
        if done:
            self._check(command, before)
        return done

    # --- Agents -------------------------------------------------------------------------------------------------------

    def act(self, node: Node) -> None:
        """Everything that is due on a node, as its own view has it."""
        if not node.is_alive or node.is_frozen:
            return
        self._register_again(node)
        for job in list(node.view.jobs.values()):
            for plan in (job.plan, job.next):
                for stage_index, stage in enumerate(plan.stages if plan is not None else ()):
                    if plan is not None and (stage.node, stage.node_incarnation) == (node.name, node.lease):
                        self._serve(node, job, plan, stage_index)
        for worker in node.workers:
            job_view = node.view.jobs.get(worker.job)
            plans = [plan for plan in (job_view.plan, job_view.next) if plan] if job_view else []
            mine = (node.name, node.lease, node.workers.index(worker))
            if worker.job and not any(place(stage) == mine for plan in plans for stage in plan.stages):
                worker.job, worker.prepared, worker.started, worker.layers = "", 0, 0, ()
                worker.applied = worker.last = 0
        node.held = {key for key in node.held if self._is_needed(node.view.jobs.get(key[0]), key)}

    def _register_again(self, node: Node) -> None:
        if Keys.node(node.name) not in self.store.values:
            self.store.transact({}, {Keys.node(node.name): encode(node.record)}, lease=node.lease)

    def _is_needed(self, job: JobView | None, key: HeldKey) -> bool:
        if job is None or job.plan is None or key[2] < job.plan.boundary:
            return False
        workers = job.workers_of(job.plan)
        starting = len(workers) < len(job.plan.stages) or any(w.state is WorkerState.READY for w in workers.values())
        return job.stop is not None or key[2] > job.plan.boundary or starting

    def _serve(self, node: Node, job: JobView, plan: PlanRecord, stage_index: int) -> None:
        """One stage of one plan: prepare, start, stop, save, and tell."""
        stage = plan.stages[stage_index]
        worker = node.workers[stage.device_index]
        generation = plan.generation
        has_failed = worker.failure is not None and worker.failure[0] >= generation
        if worker.hangs:
            return
        if not has_failed and worker.job in ("", job.name) and max(worker.prepared, worker.started) < generation:
            worker.job, worker.prepared = job.name, generation
            node.record = replace(node.record, generations=node.record.generations | {job.name: generation})
        is_in_force = job.plan is plan
        if is_in_force and not has_failed and worker.prepared == generation and worker.started < generation:
            self._start(job, plan, stage_index, worker)
        if is_in_force and not has_failed and worker.started == generation:
            self._stop(job, plan, stage_index, worker)
            self._save(node, job, plan, stage_index, worker)
        self._tell(node, job, plan, stage_index, worker)

    def _start(self, job: JobView, plan: PlanRecord, stage_index: int, worker: Worker) -> None:
        stage = plan.stages[stage_index]
        is_last = stage_index == len(plan.stages) - 1
        if len(job.workers_of(plan)) < len(plan.stages):
            return
        was_here = worker.started > 0 and worker.is_stopped and worker.applied == plan.boundary
        for layer in (*stage.layers, *((JOURNAL,) if is_last else ())):
            is_live = (
                plan.source == "nodes"
                and was_here
                and (worker.is_last if layer == JOURNAL else layer in worker.layers)
                and worker.timeline == plan.timeline
            )
            if plan.source == "initial" or is_live:
                continue
            if plan.source == "checkpoint":
                checkpoint = job.checkpoint
                if checkpoint is None or checkpoint.boundary != plan.boundary:
                    return  # the view is behind
                assert (job.name, checkpoint.timeline, plan.boundary, layer) in self.checkpoint_files[job.name]
                continue
            key = (job.name, plan.timeline, plan.boundary, layer)
            if not any(key in other.held for other in self.nodes.values() if other.is_alive):
                return
        worker.started, worker.layers, worker.is_last = plan.generation, stage.layers, is_last
        worker.applied, worker.timeline, worker.chosen = plan.boundary, plan.timeline, None
        assert job.spec is not None
        worker.last = job.spec.train.batches

    def _stop(self, job: JobView, plan: PlanRecord, stage_index: int, worker: Worker) -> None:
        stop = job.stop
        if stop is None or stop.generation != plan.generation:
            return
        if stop.boundary is not None:
            assert worker.applied <= stop.boundary, "a stage ran past the stop boundary"
            worker.last = stop.boundary
        elif stage_index == 0:
            if worker.chosen is None:
                # What is begun is admitted: nobody may be further than the first stage admits.
                worker.chosen = worker.last = min(worker.applied + 1, worker.last)
            answer = StopRecord(generation=stop.generation, save=stop.save, boundary=worker.chosen)
            revision = self._revision_seen(job, "stop", stop)
            self.store.transact({Keys.of(job.name, "stop"): revision}, {Keys.of(job.name, "stop"): encode(answer)})

    def _revision_seen(self, job: JobView, leaf: str, record: object) -> int:
        """The revision of what this view shows; if etcd has moved on, one that nothing matches."""
        key = Keys.of(job.name, leaf)
        if self.store.values.get(key) != encode(record):
            return -1
        return self.store.revisions[key][1]

    def _save(self, node: Node, job: JobView, plan: PlanRecord, stage_index: int, worker: Worker) -> None:
        stop = job.stop
        if (
            stop is None
            or stop.generation != plan.generation
            or not worker.is_stopped
            or stop.boundary != worker.applied
        ):
            return
        stage = plan.stages[stage_index]
        layers = [*stage.layers]
        if stop.save is Save.MOVES:
            if job.next is None:
                return
            layers = [layer for layer in layers if place(job.next.holder(layer)) != place(stage)]
        if stage_index == len(plan.stages) - 1:
            layers.append(JOURNAL)
        for layer in layers:
            held = (job.name, plan.timeline, worker.applied, layer)
            node.held.add(held)
            is_durable = stop.save is Save.CHECKPOINT
            if is_durable:
                self.checkpoint_files.setdefault(job.name, set()).add(held)
                node.durable.add(held)
            key = Keys.state(*held[:3], layer, node.name)
            record = StateRecord(size_bytes=1, sha256="0", generation=plan.generation, is_durable=held in node.durable)
            if self.store.values.get(key) != encode(record):
                self.store.transact({}, {key: encode(record)}, lease=node.lease)

    def _tell(self, node: Node, job: JobView, plan: PlanRecord, stage_index: int, worker: Worker) -> None:
        boundary, error = None, ""
        if worker.failure is not None and worker.failure[0] >= plan.generation:
            state, error = WorkerState.FAILED, worker.failure[1]
        elif worker.started == plan.generation:
            state = WorkerState.STOPPED if worker.is_stopped else WorkerState.RUNNING
            boundary = worker.applied if worker.is_stopped else None
        elif worker.prepared == plan.generation:
            state = WorkerState.READY
        else:
            return
        record = WorkerRecord(
            node=node.name,
            incarnation=worker.incarnation,
            address=f"{node.name}:2",
            pid=1,
            state=state,
            boundary=boundary,
            error=error,
        )
        key = Keys.worker(job.name, plan.generation, stage_index)
        if self.store.values.get(key) != encode(record):
            self.store.transact({}, {key: encode(record)}, lease=node.lease)

    # --- Training -----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Most workers that can, apply one more update: never further ahead than its pipeline lets it."""
        for job in self.truth().jobs.values():
            members: dict[int, list[tuple[int, Worker]]] = {}
            for node in self.nodes.values():
                for worker in node.workers:
                    if node.is_alive and worker.job == job.name and worker.started:
                        members.setdefault(worker.started, []).append((worker.applied, worker))
            plan = job.plan
            if plan is None or len(members.get(plan.generation, ())) < len(plan.stages):
                continue
            workers = [worker for _, worker in members[plan.generation]]
            first = next(worker for worker in workers if "embed" in worker.layers)
            for worker in workers:
                limit = min(other.applied for other in workers) + 1
                # The first stage admits: a batch that it has not begun does not exist further down.
                admitted = first.last if first.chosen is not None else first.applied + 1
                may_advance = worker.applied < min(worker.last, limit, admitted) and not worker.hangs
                if may_advance and self.random.random() < 0.8:
                    worker.applied += 1
                    key = (job.name, worker.timeline)
                    self.reached[key] = max(self.reached.get(key, 0), worker.applied)

    # --- The invariants -----------------------------------------------------------------------------------------------

    def _check(self, written: Transaction, before: JobView | None) -> None:
        """Of every transaction of a leader, on what is then in etcd."""
        self.num_events += 1
        truth = self.truth()
        assert not truth.ignored
        taken: dict[tuple[str, int], str] = {}
        for job in truth.jobs.values():
            for device in devices(job.plan) | devices(job.next):
                assert taken.setdefault(device, job.name) == job.name, f"{device} serves {job.name} and {taken[device]}"
        job = truth.jobs[written.job]
        assert job.spec is not None
        for plan in (job.plan, job.next):
            if plan is not None:
                placed = [layer for stage in plan.stages for layer in stage.layers]
                assert placed == list(job.spec.layers), "every layer exactly once, in order"
                assert len(devices(plan)) == len(plan.stages)
        if Keys.of(job.name, "next") in written.puts:
            assert job.next is not None
            assert job.next.generation > self.generations.get(job.name, 0), "generations rise strictly"
            self.generations[job.name] = job.next.generation
        if Keys.of(job.name, "plan") in written.puts:
            assert job.plan is not None
            self._check_new_plan(job, job.plan, before)
        assert (job.phase.phase in (Phase.RUNNING, Phase.CHANGING, Phase.STOPPING)) == (job.plan is not None)
        assert (job.phase.phase is Phase.STOPPING) == (job.stop is not None)
        assert Keys.event(job.name, job.phase.num_events) not in self.store.values, "events are numbered without gaps"
        if job.phase.phase in MOVING_PHASES:
            wake_at = decide(truth, now=self.now).wake_at
            assert wake_at is not None or decide(truth, now=self.now).commands, "a wait without a deadline"

    def _check_new_plan(self, job: JobView, plan: PlanRecord, before: JobView | None) -> None:
        assert before is not None
        if before.plan is not None:
            assert (plan.source, plan.timeline) == ("nodes", before.plan.timeline)
            for node in self.nodes.values():
                for worker in node.workers:
                    if node.is_alive and worker.job == job.name and worker.started == before.plan.generation:
                        assert worker.applied == plan.boundary, "a stage was not at the boundary of the new plan"
        elif job.checkpoint is not None:
            assert (plan.source, plan.boundary) == ("checkpoint", job.checkpoint.boundary)
        else:
            assert (plan.source, plan.boundary) == ("initial", 0)
        reached = self.reached.get((job.name, plan.timeline), 0)
        assert plan.boundary >= reached, "batches would be trained twice on one timeline"

    # --- Runs ---------------------------------------------------------------------------------------------------------

    def calm(self, *, until: Any = None, max_rounds: int = 400, step_s: float = 0.5) -> None:
        """Everything that is due happens, in good order, until `until()` or nothing is to be waited for."""
        for _ in range(max_rounds):
            if until is not None and until():
                return
            for name in sorted(self.nodes):
                node = self.nodes[name]
                if node.is_alive and not node.is_frozen:
                    self.deliver(node)
                    self.act(node)
                    self.leave_if_unnamed(node)
            if self.leader in self.nodes:
                self.deliver(self.nodes[self.leader])
            self.lead()
            self.train()
            self.now += step_s
        if until is not None:
            phases = {name: job.phase for name, job in self.truth().jobs.items()}
            raise AssertionError(f"no end after {max_rounds} rounds: {phases}")

    def random_step(self) -> None:
        """One thing happens, anywhere."""
        choice = self.random.random()
        living = sorted(name for name, node in self.nodes.items() if node.is_alive)
        if choice < 0.32 and living:
            node = self.nodes[self.random.choice(living)]
            self.deliver(node, count=self.random.randint(1, 30), disorderly=self.random.random() < 0.3)
        elif choice < 0.70 and living:
            node = self.nodes[self.random.choice(living)]
            self.act(node)
            self.leave_if_unnamed(node)
        elif choice < 0.84:
            self.lead(loses_office=self.random.random() < 0.1)
        elif choice < 0.91:
            self.train()
        else:
            self.now += self.random.choice((0.1, 1.0, 2.5))
