"""The invariants of the simulated cluster after every transaction of a leader."""

from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Phase, PlanRecord
from headway.daemon.decide.boundaries import parts_of
from headway.daemon.decide.commands import Transaction
from headway.daemon.decide.coordinator import decide
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.cluster_plan import devices
from headway.daemon.plan.link_choice import linked_pairs
from tests.rigs.simulated_agent import SimulatedAgents

MOVING_PHASES = (Phase.PREPARING, Phase.CHANGING, Phase.STOPPING)


class SimulatedInvariants(SimulatedAgents):
    """Checks the invariants after every transaction of a leader; the world inherits from it."""

    now: float
    leader: str
    quarantine_after: int
    num_events: int
    num_replicated: int
    """Plans that came into force with several workers of a stage."""
    generations: dict[str, int]
    """The newest generation of each job since etcd was restored."""
    witnesses: dict[str, dict[str, int]]
    """By incarnation: the generations that nodes knew when etcd was restored. Those that have gone tell nobody."""
    reached: dict[tuple[str, int], int]
    """(job, timeline): the furthest that any stage has trained on it."""
    furthest: dict[str, int]
    manifests: dict[str, bytes]

    def check_neighbours(self, written: Transaction) -> None:
        """No plan that is offered or comes into force has a link that the leader knows to be blocked."""
        known = self.nodes[self.leader].view.blocked.pairs if self.leader in self.nodes else frozenset()
        job = self.facts().jobs.get(written.job)
        for leaf in ("plan", "next"):
            plan = getattr(job, leaf, None)
            if plan is not None and Keys.of(written.job, leaf) in written.puts:
                assert linked_pairs(plan.workers, trains_tie=False).isdisjoint(known), (
                    f"neighbours of {written.job} cannot talk"
                )

    def check(self, written: Transaction, plan_before: PlanRecord | None) -> None:
        """Check every transaction of a leader against the content of etcd after it."""
        self.num_events += 1
        truth = self.facts()
        assert not truth.unreadable
        if not written.job:
            return
        taken: dict[tuple[str, int], str] = {}
        for job in truth.jobs.values():
            for device in devices(job.plan) | devices(job.next):
                assert taken.setdefault(device, job.name) == job.name, f"{device} serves {job.name} and {taken[device]}"
        job = truth.jobs[written.job]
        assert job.spec is not None
        for plan in (job.plan, job.next):
            if plan is not None:
                _check_shape(job.spec, plan)
        if Keys.of(job.name, "next") in written.puts:
            assert job.next is not None
            assert job.next.generation > self.floor(job.name), "generations rise strictly"
            self.generations[job.name] = job.next.generation
            assert job.next.furthest >= self.furthest.get(job.name, 0), "what was begun stays begun"
            self.furthest[job.name] = job.next.furthest
        if Keys.of(job.name, "plan") in written.puts:
            assert job.plan is not None
            self._check_new_plan(job, job.plan, plan_before)
            self.num_replicated += job.plan.num_stages < len(job.plan.workers)
        in_force = (Phase.RUNNING, Phase.CHANGING, Phase.STOPPING, Phase.RECOVERING)
        assert (job.phase.phase in in_force) == (job.plan is not None)
        assert (job.phase.phase is Phase.STOPPING) == (job.stop is not None)
        assert Keys.event(job.name, job.phase.num_events) not in self.store.values, "events are numbered without gaps"
        if job.phase.phase in MOVING_PHASES or (job.phase.phase is Phase.RECOVERING and job.next is not None):
            decision = decide(truth, now=self.now, quarantine_after=self.quarantine_after)
            assert decision.wake_at is not None or decision.commands, "a wait without a deadline"

    def floor(self, job: str) -> int:
        """Return the generation above which the job's next one must be."""
        known = (generations.get(job, 0) for generations in self.witnesses.values())
        return max(self.generations.get(job, 0), *known, 0)

    def _check_new_plan(self, job: JobView, plan: PlanRecord, before: PlanRecord | None) -> None:
        reached = self.reached.get((job.name, plan.timeline), 0)
        assert plan.boundary >= reached, "batches would be trained twice on one timeline"
        if plan.source == "nodes" and plan.source_timeline == plan.timeline:
            assert before is not None
            assert plan.lineage == before.lineage
            for node in self.nodes.values():
                for worker in node.workers:
                    if node.is_alive and worker.job == job.name and worker.started == before.generation:
                        assert worker.applied == plan.boundary, "a stage was not at the boundary of the new plan"
            return
        if plan.source == "checkpoint":
            assert job.checkpoint is not None
            assert (plan.source_timeline, plan.boundary) == (job.checkpoint.timeline, job.checkpoint.boundary)
            assert job.checkpoint.url in self.manifests
            for part in parts_of(job):
                assert (job.name, plan.source_timeline, plan.boundary, part) in self.checkpoint_files
        if plan.source == "initial":
            assert (job.checkpoint, plan.boundary, plan.ancestry) == (None, 0, ())
        elif plan.timeline != plan.source_timeline:
            assert plan.timeline == plan.generation
            assert plan.ancestry[-1] == (plan.source_timeline, plan.boundary)
            timelines = [timeline for timeline, _ in plan.ancestry]
            assert timelines == sorted(set(timelines))


def _check_shape(spec: JobSpec, plan: PlanRecord) -> None:
    """Every layer is in one stage, in order, and every group of a stage on one of its workers."""
    leads = [plan.workers[workers[0]] for workers in plan.replicas]
    placed = [layer for lead in leads for layer in lead.layers]
    assert placed == list(spec.layers), "every layer exactly once, in order"
    assert len(devices(plan)) == len(plan.workers)
    for workers in plan.replicas:
        held = [group for position in workers for group in plan.workers[position].groups]
        assert not held or sorted(held) == list(range(spec.train.reduction_groups)), "every group exactly once"
        assert plan.is_lead(workers[0])
