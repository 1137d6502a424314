"""The work of a node's daemon on plans in its own view, on simulated files and workers."""

import random
from abc import ABC, abstractmethod
from dataclasses import replace

from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.lineage import Lineage
from headway.daemon.cluster.measurements import Port, ReachFact, ReachRecord
from headway.daemon.cluster.records import (
    Failure,
    PlanRecord,
    Save,
    StateFile,
    StateRecord,
    StopRecord,
    WorkerPart,
    WorkerRecord,
    WorkerState,
    checkpoint_ailment,
    data_ailment,
    seen_key,
)
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.decide.boundaries import kept, lineage_of, newest_complete
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.plan.cluster_plan import is_moving, place
from headway.daemon.plan.copy_places import copy_places
from headway.daemon.plan.link_choice import neighbours
from tests.rigs.simulated_etcd import Store
from tests.rigs.simulated_node import HeldKey, Node, Worker

FileKey = tuple[str, int, int, str]


class SimulatedAgents(ABC):
    """The agents of all nodes; the world is its heir."""

    random: random.Random
    store: Store
    nodes: dict[str, Node]
    checkpoint_files: dict[FileKey, Lineage]
    damaged: set[str]
    """Checkpoints of which a reader finds a file damaged."""
    """(job, timeline, boundary, part): what was trained into a file in durable storage."""

    blocked: set[tuple[str, str]]
    """(node, other): no connection from the one to the other opens."""

    @abstractmethod
    def facts(self) -> ClusterView:
        """Return the content of etcd now; read only."""

    def act(self, node: Node) -> None:
        """Everything that is due on a node, as its own view has it."""
        if not node.is_alive or node.is_frozen:
            return
        self._register_again(node)
        self._dial_again(node)
        for job in list(node.view.jobs.values()):
            for plan in (job.plan, job.next):
                for position, stage in enumerate(plan.workers if plan is not None else ()):
                    if plan is not None and (stage.node, stage.node_incarnation) == (node.name, node.lease):
                        self._serve(node, job, plan, position)
        for worker in node.workers:
            job_view = node.view.jobs.get(worker.job)
            plans = [plan for plan in (job_view.plan, job_view.next) if plan] if job_view else []
            mine = (node.name, node.lease, node.workers.index(worker))
            if worker.job and not any(place(stage) == mine for plan in plans for stage in plan.workers):
                worker.job, worker.prepared, worker.started, worker.layers = "", 0, 0, ()
                worker.applied = worker.last = 0
                worker.written.clear()
        for job in list(node.view.jobs.values()):
            if job.spec is not None:
                self._copy(node, job)
                self._register_state(node, job)
                self._take_back(node, job)
        self._delete(node)

    def _register_again(self, node: Node) -> None:
        key = Keys.node(node.name)
        if self.store.values.get(key) != encode(node.record):
            self.store.transact({}, {key: encode(node.record)}, lease=node.lease)

    # --- Who reaches whom ---------------------------------------------------------------------------------------------

    def _dial_again(self, node: Node) -> None:
        """Dial again: healed ways are found, and now and then a new blocked one."""
        if not self.blocked and not node.out_of_reach:
            return
        others = sorted(name for name in node.view.nodes if (node.name, name) in self.blocked)
        node.out_of_reach &= set(others)
        node.out_of_reach |= {name for name in others if self.random.random() < 0.02}
        self._tell_reach(node)

    def _tell_reach(self, node: Node) -> None:
        facts = tuple(
            ReachFact(
                to=name,
                to_incarnation=node.view.nodes[name].incarnation,
                port=Port.WORKER,
                address=f"{name}:2",
                device_index=0,
                reason="the connection was refused",
            )
            for name in sorted(node.out_of_reach)
            if name in node.view.nodes
        )
        record, key = encode(ReachRecord(incarnation=node.lease, facts=facts)), Keys.reach(node.name)
        if self.store.values.get(key) != record and Keys.node(node.name) in self.store.values:
            self.store.transact({}, {key: record}, lease=node.lease)

    def _prove(self, node: Node, job: JobView, plan: PlanRecord, position: int) -> tuple[int, ...]:
        """The worker's neighbours, once all of them are dialled; whoever is out of reach becomes a fact."""
        around = neighbours(plan.workers, position, trains_tie=False)
        records = job.workers_of(plan)
        for other in around:
            record, name = records.get(other), plan.workers[other].node
            if record is None or record.state is not WorkerState.READY:
                continue
            if (node.name, name) in self.blocked:
                node.out_of_reach.add(name)
                self._tell_reach(node)
            else:
                node.proven.add((job.name, plan.generation, position, other, record.incarnation))
        mine = {link[3:] for link in node.proven if link[:3] == (job.name, plan.generation, position)}
        present = {(other, record.incarnation) for other, record in records.items()}
        return around if {other for other, _ in mine & present} == set(around) else ()

    def can_run(self, plan: PlanRecord) -> bool:
        """Return whether every link of a plan is open in the direction in which it is dialled."""
        return all(
            (plan.workers[position].node, plan.workers[other].node) not in self.blocked
            for position in range(len(plan.workers))
            for other in neighbours(plan.workers, position, trains_tie=False)
            if other > position
        )

    # --- Files --------------------------------------------------------------------------------------------------------

    def _copy(self, node: Node, job: JobView) -> None:
        """Buddies fetch what the owners registered; due files go to durable storage."""
        plan, spec, view = job.plan, job.spec, node.view
        if plan is None or spec is None:
            return
        wanted = kept(job, view.nodes)
        for names, workers in zip(copy_places(spec, plan, view.nodes), plan.replicas, strict=True):
            if node.name not in names:
                continue
            for where in wanted:
                for part in _parts(plan, workers[0]):
                    self._fetch(node, job, (job.name, *where, part), plan.workers[workers[0]])
        every = spec.fault.checkpoint_every
        for key in list(node.held):
            if key[0] == job.name and every and key[2] % every == 0 and key[2] > 0 and plan.lineage.has(key[1], key[2]):
                self._make_durable(node, key)

    def _make_durable(self, node: Node, key: HeldKey) -> None:
        if key in node.durable:
            return
        before = self.checkpoint_files.setdefault(key, node.held[key])
        assert before == node.held[key], f"two contents of {key}"
        node.durable.add(key)

    def _fetch(self, node: Node, job: JobView, key: HeldKey, stage: WorkerPart) -> bool:
        """Fetch from the owner or any other holder in the view, if it lives and has the file."""
        if key in node.held:
            return True
        for name in sorted(job.holders(*key[1:]), key=lambda name: name != stage.node):
            other = self.nodes.get(name)
            record = job.state[key[1], key[2]][name]
            if other is not None and other.is_alive and other.lease == record.incarnation and key in other.held:
                node.held[key] = other.held[key]
                return True
        return False

    def _take_back(self, node: Node, job: JobView) -> None:
        """Forget records that etcd, restored from a backup, has of this node's deleted files."""
        plans = [plan.generation for plan in (job.plan, job.next) if plan is not None]
        if max(job.phase.generation, *plans, 0) < node.record.generation_seen(job.name, job.uid):
            return
        held = {key[1:3] for key in node.held if key[0] == job.name}
        for where, records in job.state.items():
            key = Keys.state(job.name, *where, node.name)
            if node.name in records and where not in held and key in self.store.values:
                self.store.transact({key: node.view.revision_of(key)}, {}, (key,))

    def _register_state(self, node: Node, job: JobView) -> None:
        plan = job.plan
        lineage = lineage_of(job)
        if lineage is None:
            return
        files: dict[tuple[int, int], dict[str, StateFile]] = {}
        for name, timeline, boundary, part in node.held:
            if name == job.name and lineage.has(timeline, boundary):
                is_durable = (name, timeline, boundary, part) in node.durable
                found = files.setdefault((timeline, boundary), {})
                found[part] = StateFile(size_bytes=1, checksum="0", is_durable=is_durable)
        generation = plan.generation if plan is not None else job.phase.generation
        for where, parts in files.items():
            key = Keys.state(job.name, *where, node.name)
            mine = job.state.get(where, {}).get(node.name)
            if mine is None or (mine.files, mine.incarnation) != (parts, node.lease) or key not in self.store.values:
                record = StateRecord(incarnation=node.lease, generation=generation, files=dict(sorted(parts.items())))
                compare = {Keys.of(job.name, "plan"): node.view.revision_of(Keys.of(job.name, "plan"))}
                if self.store.values.get(key) != encode(record):
                    self.store.transact(compare, {key: encode(record)}, lease=node.lease)

    def _delete(self, node: Node) -> None:
        """Delete files that nobody needs: first they are unregistered, then they are gone."""
        wanted = {name: kept(job, node.view.nodes) for name, job in node.view.jobs.items()}
        gone: dict[tuple[str, int, int], list[HeldKey]] = {}
        for key in node.held:
            job = node.view.jobs.get(key[0])
            where = (key[1], key[2])
            if job is not None and where in wanted[key[0]]:
                continue
            lineage = lineage_of(job) if job is not None else None
            is_known = job is not None and node.name in job.state.get(where, {})
            if lineage is None or not lineage.has(*where) or is_known:
                gone.setdefault(key[:3], []).append(key)
        for (name, timeline, boundary), keys in gone.items():
            is_current = node.seen == len(self.store.history)
            before = self._newest(name) if is_current else None
            record = Keys.state(name, timeline, boundary, node.name)
            if record in self.store.values:
                self.store.transact({}, {}, (record,))
            for held in keys:
                del node.held[held]
                node.durable.discard(held)
            assert not is_current or self._newest(name) == before, f"{node.name} deleted what {name} would go back to"

    def _newest(self, name: str) -> tuple[int, int] | None:
        facts = self.facts()
        job = facts.jobs.get(name)
        return newest_complete(job, facts.nodes) if job is not None and job.spec is not None else None

    # --- Workers ------------------------------------------------------------------------------------------------------

    def _serve(self, node: Node, job: JobView, plan: PlanRecord, position: int) -> None:
        """One worker's part of one plan: prepare, start, stop, save, and tell."""
        stage = plan.workers[position]
        worker = node.workers[stage.device_index]
        generation = plan.generation
        has_failed = worker.has_failed(job.name, generation)
        if worker.hangs:
            return
        is_old = generation < node.record.generation_seen(job.name, job.uid)
        may_obey = not is_old and not node.record.stays_out
        can_prepare = not has_failed and not worker.is_down and may_obey and worker.job in ("", job.name)
        is_prepared = max(worker.prepared, worker.started) >= generation
        if position in plan.replicas[0] and not is_prepared:
            can_prepare &= self._reads(node, "data", data_ailment(job.name))
        if can_prepare and not is_prepared:
            worker.job, worker.prepared = job.name, generation
            seen = {job.name: generation, seen_key(job.name, job.uid): generation}
            node.record = replace(node.record, generations=node.record.generations | seen)
            self._register_again(node)
        is_in_force = job.plan is plan
        if is_in_force and not has_failed and worker.prepared == generation and worker.started < generation:
            self._start(node, job, plan, position, worker)
        if is_in_force and not has_failed and worker.started == generation and not worker.is_stopped:
            self._lose_link(plan, position, worker)
        if is_in_force and not has_failed and worker.started == generation:
            self._adopt(node, job, plan, position, worker)
            self._stop(node, job, plan, position, worker)
            self._save(node, job, plan, position, worker)
        self._tell(node, job, plan, position, worker)

    def _reads(self, node: Node, storage: str, ailment: str) -> bool:
        """Return whether a file system answers a node, which says so in its record while it does not."""
        is_there = storage not in node.lacks
        others = {name: text for name, text in node.record.ailments.items() if name != ailment}
        told = others if is_there else others | {ailment: f"/mnt/{storage}: its file system has not answered for 60 s"}
        node.record = replace(node.record, ailments=told)
        self._register_again(node)
        return is_there

    def _lose_link(self, plan: PlanRecord, position: int, worker: Worker) -> None:
        """A link that does not open, or not again, is told by the worker that dials it."""
        if not self.blocked or self.random.random() > 0.3:
            return
        for other in neighbours(plan.workers, position, trains_tie=False):
            ends = plan.workers[position].node, plan.workers[other].node
            if other > position and ends in self.blocked:
                worker.failure = plan.generation, Failure(f"the link to {ends[1]} is lost", lost_peer=other)
                worker.failed_job = worker.job

    def _start(self, node: Node, job: JobView, plan: PlanRecord, position: int, worker: Worker) -> None:
        stage = plan.workers[position]
        if len(job.workers_of(plan)) < len(plan.workers):
            return
        if plan.source == "checkpoint" and not self._reads(node, "checkpoint", checkpoint_ailment(job.name)):
            return
        if plan.source == "checkpoint" and job.checkpoint is not None and job.checkpoint.url in self.damaged:
            why = f"node {node.name}: a file has another checksum"
            worker.failure = plan.generation, Failure(why, damaged=job.checkpoint.url)
            worker.failed_job = worker.job
            return
        is_change = plan.source == "nodes" and plan.source_timeline == plan.timeline
        was_here = worker.started > 0 and worker.is_stopped and worker.applied == plan.boundary
        origin = plan.lineage if is_change else Lineage(timeline=plan.source_timeline, ancestry=plan.ancestry[:-1])
        for part in _parts(plan, position):
            is_mine = worker.has_journal if part == JOURNAL else part in worker.layers
            if plan.source == "initial" or (is_change and was_here and is_mine and worker.lineage == plan.lineage):
                continue
            key = (job.name, plan.source_timeline, plan.boundary, part)
            if plan.source == "checkpoint":
                expected = plan.lineage if plan.timeline == plan.source_timeline else origin
                assert self.checkpoint_files[key] == expected, f"the checkpoint's {key} is of another past"
                continue
            if not self._fetch(node, job, key, stage):
                return
            assert node.held[key] == origin, f"{key} has {node.held[key]} in it, the plan wants {origin}"
        worker.started, worker.layers, worker.has_journal = (
            plan.generation,
            stage.layers,
            plan.has_journal(position),
        )
        worker.position = position
        worker.applied, worker.lineage, worker.chosen = plan.boundary, plan.lineage, None
        worker.written.clear()
        assert job.spec is not None
        worker.last = job.spec.train.batches

    def _adopt(self, node: Node, job: JobView, plan: PlanRecord, position: int, worker: Worker) -> None:
        """Take over what the worker wrote while it trained."""
        for boundary in worker.written:
            for part in _parts(plan, position):
                self._hold(node, (job.name, plan.timeline, boundary, part), worker.lineage)
        worker.written.clear()

    def _hold(self, node: Node, key: HeldKey, content: Lineage) -> None:
        assert node.held.setdefault(key, content) == content, f"two contents of {key}"

    def _stop(self, node: Node, job: JobView, plan: PlanRecord, position: int, worker: Worker) -> None:
        stop = job.stop
        if stop is None or stop.generation != plan.generation:
            return
        if stop.boundary is not None:
            assert worker.applied <= stop.boundary, "a stage ran past the stop boundary"
            worker.last = stop.boundary
        elif position == 0:
            if worker.chosen is None:
                # What is begun is admitted: nobody may be further than the first stage admits.
                worker.chosen = worker.last = min(worker.applied + 1, worker.last)
            answer = StopRecord(generation=stop.generation, save=stop.save, boundary=worker.chosen)
            key = Keys.of(job.name, "stop")
            self.store.transact({key: node.view.revision_of(key)}, {key: encode(answer)})

    def _save(self, node: Node, job: JobView, plan: PlanRecord, position: int, worker: Worker) -> None:
        stop = job.stop
        if stop is None or stop.generation != plan.generation or not worker.is_stopped:
            return
        if stop.boundary != worker.applied:
            return
        if not plan.is_lead(position):
            return
        parts = list(_parts(plan, position))
        if stop.save is Save.MOVES:
            if job.next is None:
                return
            successor = job.next
            parts = [part for part in parts if part == JOURNAL or is_moving(plan, successor, part)]
        for part in parts:
            key = (job.name, plan.timeline, worker.applied, part)
            self._hold(node, key, worker.lineage)
            if stop.save is Save.CHECKPOINT:
                self._make_durable(node, key)

    def _tell(self, node: Node, job: JobView, plan: PlanRecord, position: int, worker: Worker) -> None:
        boundary, failure = None, Failure()
        if worker.failure is not None and worker.has_failed(job.name, plan.generation):
            state, failure = WorkerState.FAILED, worker.failure[1]
        elif worker.started == plan.generation:
            state = WorkerState.STOPPED if worker.is_stopped else WorkerState.RUNNING
            boundary = worker.applied if worker.is_stopped else None
        elif worker.prepared == plan.generation:
            state = WorkerState.READY
        else:
            return
        proven, told = self._prove(node, job, plan, position), job.workers_of(plan)
        record = WorkerRecord(
            node=node.name,
            incarnation=worker.incarnation,
            address=f"{node.name}:2",
            pid=1,
            state=state,
            boundary=boundary,
            failure=failure,
            proven={other: told[other].incarnation for other in proven or ()},
        )
        key = Keys.worker(job.name, plan.generation, position)
        if self.store.values.get(key) != encode(record):
            self.store.transact({}, {key: encode(record)}, lease=node.lease)


def _parts(plan: PlanRecord, position: int) -> tuple[str, ...]:
    """The files of one worker."""
    return (*plan.workers[position].layers, *((JOURNAL,) if plan.has_journal(position) else ()))
