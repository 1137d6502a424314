"""The place in a plan that a worker of this node fills. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from headway.daemon.agent.copy_steps import parts_of_worker
from headway.daemon.agent.local_state import NodeState
from headway.daemon.records.records import PlanRecord, StagePlan
from headway.daemon.view.job_view import JobView
from headway.daemon.workers.status import JobGeneration, Standstill, WorkerStatus


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker of this node, and its part of a plan."""

    job: JobView
    plan: PlanRecord
    position: int
    worker: WorkerStatus

    @property
    def stage(self) -> StagePlan:
        return self.plan.stages[self.position]

    @property
    def run_key(self) -> JobGeneration:
        return JobGeneration(self.job.name, self.plan.generation)

    @property
    def data_names(self) -> tuple[str, ...]:
        """Return the SHA-256 of each data source."""
        assert self.job.spec is not None, "only jobs with a spec have posts"
        return tuple(part.sha256 for part in self.job.spec.data.parts)

    @property
    def parts(self) -> tuple[str, ...]:
        """Return its layers and, for the lead of the last stage, the journal."""
        return parts_of_worker(self.plan, self.position)

    @property
    def standstill(self) -> Standstill | None:
        """Return where the worker stands in this generation, once it has stopped."""
        stopped = self.worker.stopped
        return stopped if stopped is not None and stopped.run_key == self.run_key else None


def assignments_of(job: JobView, plan: PlanRecord, node: NodeState) -> Iterator[Assignment]:
    """Yield all places of a plan on this node."""
    for position, stage in enumerate(plan.stages):
        worker = node.worker_of(stage)
        if worker is not None:
            yield Assignment(job, plan, position, worker)
