"""A whole cluster without processes: etcd, nodes and workers as plain values, time as a number, chance as a seed.

Agents follow docs/architecture.md; every node has a view of its own that lags behind etcd and gets events late, twice
or out of order. `simulated_invariants.py` looks at every transaction, `_start` and `_delete` of the agents at every
file.
"""

import pickle
import random
from dataclasses import replace
from functools import partial
from typing import Any

from headway.daemon.blobs.checkpoint_names import boundary_url, part_name, parts_url
from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.lineage import Lineage
from headway.daemon.cluster.measurements import MemoryShortage, ProgressRecord
from headway.daemon.cluster.records import (
    CheckpointRecord,
    Desired,
    DesiredRecord,
    Device,
    Failure,
    NodeRecord,
    PhaseRecord,
    SpecRecord,
)
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.commands import (
    Command,
    Decision,
    DeleteCheckpoints,
    SetAside,
    Transaction,
    WriteManifest,
    parts,
)
from headway.daemon.decide.coordinator import decide
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.plans import Plans
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec, PlacementSpec
from headway.daemon.leader.sweeps import BoundaryFolder, stale_checkpoints
from headway.stages.spec import ModelSpec, TrainSpec
from tests.rigs.simulated_etcd import Store
from tests.rigs.simulated_invariants import SimulatedInvariants
from tests.rigs.simulated_node import Node, Worker, steady_view
from tests.rigs.simulated_planning import SimulatedPlanning

KILLED = "node x: worker-0 (pid 1) ended by signal SIGKILL"


def small_spec(
    name: str,
    *,
    num_blocks: int = 3,
    batches: int = 6,
    fault: FaultSpec | None = None,
    reduction_groups: int = 1,
    **placement: Any,
) -> JobSpec:
    """A job of num_blocks + 2 layers."""
    return JobSpec(
        job=JobSection(name=name),
        model=ModelSpec(num_hidden_layers=num_blocks, hidden_size=64, intermediate_size=128),
        train=TrainSpec(batches=batches, microbatches=8, reduction_groups=reduction_groups),
        placement=PlacementSpec(**placement),
        fault=fault or FaultSpec(snapshot_every=4, checkpoint_every=12),
    )


class SimulatedCluster(SimulatedInvariants):
    """The world. `random_step` lets something happen; `calm` lets everything happen that is due."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.store = Store()
        self.nodes: dict[str, Node] = {}
        self.blocked = set()
        self.checkpoint_files = {}
        self.manifests: dict[str, bytes] = {}
        self.damaged = set()
        self.copied_parts: list[str] = []
        """Journal parts in durable storage, in order of their copies."""
        self.num_incarnations = 0
        self.num_events = 0
        self.num_replicated = 0
        """Plans that came into force with several workers of a stage."""
        self.num_decisions = 0
        self.generations: dict[str, int] = {}
        self.witnesses: dict[str, dict[str, int]] = {}
        self.reached: dict[tuple[str, int], int] = {}
        """(job, timeline): the furthest that any stage has trained on it."""
        self.furthest: dict[str, int] = {}
        self.leader = ""
        self.quarantine_after = 0
        self.planning = SimulatedPlanning(seed)
        self._facts = steady_view()
        self._facts_seen = 0

    # --- What people and machines do ----------------------------------------------------------------------------------

    def add_node(
        self, name: str, *, num_devices: int = 1, speed: float = 1.0, site: str = "here", memory_bytes: int = 0
    ) -> Node:
        """memory_bytes: of each device; 0: not limited."""
        self.num_incarnations += 1
        incarnation = f"{name}-{self.num_incarnations}"
        record = NodeRecord(
            name=name,
            incarnation=incarnation,
            address=f"{name}:1",
            host=name,
            site=site,
            devices=tuple(
                Device(kind="cpu", index=index, speed=speed, memory_bytes=memory_bytes) for index in range(num_devices)
            ),
            memory_bytes=0,
            arithmetic_class="one",
        )
        node = Node(record, [Worker(f"{incarnation}/{index}") for index in range(num_devices)])
        self.nodes[name] = node
        self.store.transact({}, {Keys.node(name): encode(record)}, lease=node.lease)
        return node

    def submit(self, spec: JobSpec, *, user: str = "") -> None:
        name = spec.job.name
        assert self.store.transact(
            {Keys.of(name, "spec"): 0},
            {
                Keys.of(name, "spec"): encode(SpecRecord(spec=spec, uid=f"uid of {name}", submitted_by=user)),
                Keys.of(name, "desired"): encode(DesiredRecord()),
                Keys.of(name, "phase"): encode(PhaseRecord(reason="submitted")),
            },
        )

    def want(self, job: str, state: Desired) -> None:
        key = Keys.of(job, "desired")
        before = decode(self.store.values[key], DesiredRecord)
        self.store.transact({}, {key: encode(DesiredRecord(state=state, request=before.request + 1))})

    def drain(self, name: str) -> None:
        self.say(name, is_draining=True)

    def say(self, name: str, **fields: Any) -> None:
        """A node has other fields in its record."""
        node = self.nodes[name]
        node.record = replace(node.record, **fields)
        self.store.transact({}, {Keys.node(name): encode(node.record)}, lease=node.lease)

    def leave_if_unnamed(self, node: Node) -> None:
        """A draining daemon goes when no plan names it and nobody needs its files to start."""
        if not node.record.is_draining or not node.is_alive:
            return
        truth = self.facts()
        named = {
            stage.node for job in truth.jobs.values() for plan in (job.plan, job.next) if plan for stage in plan.workers
        }
        if node.name not in named:
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
        if self.witnesses.pop(node.lease, None) is not None:
            self._forget_what_nobody_knows()

    def lapse(self, name: str) -> None:
        """Its lease ends though it lives: it registers again, as the same incarnation, with the same files."""
        self.store.revoke(self.nodes[name].lease)

    def fail_worker(self, name: str, error: str = KILLED, *, fault: str = "", has_spare: bool = True) -> None:
        """Its process dies and is replaced, or not; its generations are told to have failed."""
        node = self.nodes[name]
        worker = node.workers[0]
        generation = max(worker.prepared, worker.started)
        self.num_incarnations += 1
        node.workers[0] = Worker(f"{node.lease}/{self.num_incarnations}", is_down=not has_spare)
        if not has_spare:
            node.record = replace(node.record, down_devices=(0,))
            self._register_again(node)
        if generation:
            node.workers[0].failure = generation, Failure(error, fault=fault)
            node.workers[0].failed_job = worker.job

    def run_out_of_memory(self, name: str, shortage: MemoryShortage) -> None:
        """Its worker reports it and lives on, without its layers."""
        worker = self.nodes[name].workers[0]
        worker.failure = worker.started, Failure("CUDA out of memory", shortage=shortage)
        worker.failed_job = worker.job

    def replace_worker(self, name: str) -> None:
        """The process for a device that was without one is up."""
        node = self.nodes[name]
        node.workers[0].is_down = False
        node.record = replace(node.record, down_devices=())
        self._register_again(node)

    def restore(self, backup: Store) -> None:
        """etcd is what it was at an earlier time; everybody lists again."""
        self.store.restore(backup)
        living = {node.lease for node in self.nodes.values() if node.is_alive}
        for lease in sorted(set(self.store.owners.values()) - living):
            self.store.revoke(lease)
        living_nodes = [node for node in self.nodes.values() if node.is_alive]
        for node in self.nodes.values():
            node.seen = 0
            node.view.start_anew(now=self.now)
        for node in living_nodes:
            self._register_again(node)
        self.generations.clear()
        self.witnesses = {node.lease: node.record.generations for node in living_nodes}
        self._forget_what_nobody_knows()
        self._facts, self._facts_seen = steady_view(), 0
        self.leader = ""
        self.furthest.clear()

    def _forget_what_nobody_knows(self) -> None:
        """Drop timelines that neither etcd nor a node can name any more. A later plan may have their numbers."""
        self.reached = {
            (job, timeline): batch for (job, timeline), batch in self.reached.items() if timeline <= self.floor(job)
        }

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
        view = steady_view()
        for key, value in self.store.values.items():
            created, modified = self.store.revisions[key]
            view.apply(key, value, mod_revision=modified, create_revision=created, now=self.now)
        return view

    def facts(self) -> ClusterView:
        """Return the content of etcd now; read only."""
        for change in self.store.history[self._facts_seen :]:
            self._facts.apply(
                change.key,
                change.value,
                mod_revision=change.revision,
                create_revision=change.create_revision,
                now=self.now,
            )
        self._facts_seen = len(self.store.history)
        return self._facts

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
        self.planning.begin_anew()
        node = self.nodes[self.leader]
        record = LeaderRecord(node=self.leader, incarnation=node.lease)
        self.store.transact({}, {Keys.LEADER: encode(record)}, lease=f"leader {node.lease}")
        self.deliver(node)

    def sweep(self, view: ClusterView) -> None:
        """Delete what a view, old as it may be, says is left in durable storage."""
        for job in list(view.jobs.values()):
            whole = {(file.timeline, file.boundary) for file in self._manifests_of(job.name)}
            places = {key[1:3] for key in self.checkpoint_files if key[0] == job.name} | whole
            found = [BoundaryFolder(*place, place in whole) for place in sorted(places)]
            for folder in stale_checkpoints(view, job, found):
                self._drop_folder(job, folder.place)

    def _manifests_of(self, job: str) -> list[CheckpointRecord]:
        return [decode(raw, CheckpointRecord) for url, raw in self.manifests.items() if f"/{job}/" in url]

    def _drop_folder(self, job: JobView, place: tuple[int, int]) -> None:
        assert job.submission is not None
        folder = boundary_url(
            job.submission.spec.fault.checkpoint_dir,
            job.name,
            timeline=place[0],
            boundary=place[1],
            uid=job.submission.uid,
        )
        self.manifests.pop(folder, None)
        for key in [key for key in self.checkpoint_files if key[:3] == (job.name, *place)]:
            del self.checkpoint_files[key]

    def lead(self, *, loses_office: bool = False, crashes: str = "") -> float | None:
        """The leader decides once and writes it down, or loses office before it can. Returns its next deadline.

        crashes: `before` or `after` it writes, or `between` a file and its transaction.
        """
        if self.leader not in self.nodes or not self.nodes[self.leader].is_alive:
            self.elect()
        if not self.leader:
            return None
        view = self.nodes[self.leader].view
        self.num_decisions += 1
        if self.num_decisions % 16 == 0:
            for node in self.nodes.values():
                self.sweep(node.view)
        office = view.revision_of(Keys.LEADER)
        decision = self.planning.decided(
            lambda plans: self._decide_twice(view, plans),
            jobs=view.jobs,
            now=self.now,
            num_decisions=self.num_decisions,
        )
        for command in decision.commands:
            if loses_office:
                self.elect()
            if crashes != "before":
                self._execute(command, office, is_interrupted=crashes == "between")
            if crashes:
                self.kill(self.leader)
                break
        return decision.wake_at

    def compare_decisions(self) -> None:
        """Let the leader decide, and carry nothing out: the next decision rests on what it remembers of this one."""
        if self.leader in self.nodes:
            view = self.nodes[self.leader].view
            self.planning.looked(lambda plans: self._decide_twice(view, plans), jobs=view.jobs, now=self.now)

    def _decide_twice(self, view: ClusterView, plans: Plans) -> Decision:
        """Decide; now and then also about a view whose objects nobody has seen: the two must be equal."""
        decide_now = partial(
            decide, now=self.now, written_at=self.now, quarantine_after=self.quarantine_after, plans=plans
        )
        found = decide_now(view)
        if self.num_decisions % 8 == 0:
            assert found == decide_now(pickle.loads(pickle.dumps(view))), "a decision rests on what is no longer true"
        return found

    def _execute(self, command: Command, office: int, *, is_interrupted: bool = False) -> bool:
        if isinstance(command, WriteManifest):
            manifest = decode(command.manifest, CheckpointRecord)
            self.manifests[command.url] = command.manifest
            self.copied_parts += [part.target for part in command.parts]
            for old in manifest.journal_parts:
                name = f"{parts_url(command.url)}/{part_name(*old.place)}"
                assert name in self.copied_parts, "a manifest of a missing journal part"
            for part in manifest.files:
                file = (command.job, manifest.timeline, manifest.boundary, part)
                assert file in self.checkpoint_files, "a manifest of missing files"
                expected = Lineage(timeline=manifest.timeline, ancestry=manifest.ancestry)
                assert self.checkpoint_files[file] == expected, "a checkpoint of two pasts"
        if isinstance(command, DeleteCheckpoints):
            job = self.facts().jobs[command.job]
            assert job.checkpoint is None or job.checkpoint.url not in command.urls
            for url in command.urls:
                self.manifests.pop(url, None)
        if is_interrupted and not isinstance(command, Transaction):
            return False
        if isinstance(command, SetAside):
            command = command.then(self._older(command))
        elif not isinstance(command, Transaction):
            command = command.then
        before = self.facts().jobs.get(command.job) if command.job else None
        had = (before.plan, before.phase) if before is not None else (None, None)
        done = False
        for number, written in enumerate(parts(command)):
            puts = written.puts | {key: value for key, (value, _) in written.leased.items()}
            is_written = self.store.transact(written.compare | {Keys.LEADER: office}, puts, written.deletes)
            done = done or is_written
            for key in written.leased if is_written else ():
                self.store.owners[key] = f"passing {command.job} {command.reason} {number}"
            if not is_written:
                break
        if done:
            self.check_neighbours(command)
            self.check(command, had[0])
        return done

    def _older(self, command: SetAside) -> CheckpointRecord | None:
        """Set a damaged checkpoint aside; the newest older one that has a manifest."""
        self.manifests.pop(command.url, None)
        found = next((url for url in command.older if url in self.manifests), None)
        return replace(decode(self.manifests[found], CheckpointRecord), url=found) if found is not None else None

    # --- Training -----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Most workers that can, apply one more update: never further ahead than its pipeline lets it."""
        for job in list(self.facts().jobs.values()):
            plan, spec = job.plan, job.spec
            workers = [
                worker
                for node in self.nodes.values()
                for worker in node.workers
                if plan is not None and node.is_alive and worker.job == job.name and worker.started == plan.generation
            ]
            if plan is None or spec is None or len(workers) < len(plan.workers) or not self.can_run(plan):
                continue
            first = next(worker for worker in workers if worker.position == 0)
            every = spec.fault.snapshot_every
            for worker in workers:
                limit = min(other.applied for other in workers) + 1
                # The lead of the first stage admits: a batch that it has not begun does not exist further down.
                admitted = first.last if first.chosen is not None else first.applied + 1
                may_advance = worker.applied < min(worker.last, limit, admitted) and not worker.hangs
                if may_advance and self.random.random() < 0.8:
                    worker.applied += 1
                    if every and worker.applied % every == 0 and worker.applied < worker.last:
                        worker.written.append(worker.applied)
                    key = (job.name, plan.timeline)
                    self.reached[key] = max(self.reached.get(key, 0), worker.applied)
            done = min(worker.applied for worker in workers)
            known = job.progress.batch if job.progress is not None else -1
            if done - 1 > known and self.random.random() < 0.3:
                progress = ProgressRecord(generation=plan.generation, batch=done - 1, loss=1.0, tokens_per_second=0.0)
                self.store.transact({}, {Keys.of(job.name, "progress"): encode(progress)})

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
            phases = {name: job.phase for name, job in self.facts().jobs.items()}
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
