"""Describes a worker that a plan has lost, and which node or job the loss counts against. Pure."""

from dataclasses import dataclass

from headway.daemon.costs.paths import BlockedWays, pair_of
from headway.daemon.records.cluster_records import NodeFailureRecord
from headway.daemon.records.records import PlanRecord, WorkerPart, WorkerRecord
from headway.daemon.situation.failure_budget import Death, was_killed


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    """A worker that a plan has lost: it failed or did not answer in time, or its node is gone."""

    position: int
    """Position among the plan's workers."""
    plan: PlanRecord
    worker: WorkerRecord | None = None
    """The worker's record, if it failed."""
    is_late: bool = False
    storage_trouble: str = ""
    """Reason why its node cannot read the data or checkpoint, if the worker is late for that. It counts against no
    node.
    """
    is_refused: bool = False
    """True if its node does not believe the job's record, so it waits for nothing else. It counts against no node."""

    @property
    def stage(self) -> WorkerPart:
        """Return the worker's stage and device."""
        return self.plan.workers[self.position]

    @property
    def is_death(self) -> bool:
        """Return whether the worker, or the process that ended it, is to blame: not its node's end, not a
        neighbour's.
        """
        worker = self.worker
        if self.is_nobodys:
            return False
        return self.is_late or (worker is not None and (bool(worker.fault) or worker.is_hopeless or was_killed(worker)))

    @property
    def is_held_against_node(self) -> bool:
        """Return whether the loss counts against the node: the node was lost, or its worker died or did not answer."""
        return (self.worker is None and not self.is_late) or self.is_death

    @property
    def is_jobs_error(self) -> bool:
        """Return whether the worker reported an error of its own, which may be the job's."""
        return self.worker is not None and (bool(self.worker.fault) or self.worker.is_hopeless)

    @property
    def was_moved(self) -> bool:
        """Return whether its daemon ended it because the machine's address has changed."""
        return self.worker is not None and self.worker.was_moved

    @property
    def is_nobodys(self) -> bool:
        """Return whether it counts against no node and no job: the machine moved, storage is away, memory ran out, or
        the node refuses the job.
        """
        return self.was_moved or bool(self.storage_trouble) or self.is_out_of_memory or self.is_refused

    @property
    def is_out_of_memory(self) -> bool:
        """Return whether its device had no memory left, and the next plan will ask less of that device."""
        shortage = self.worker.shortage if self.worker is not None else None
        return shortage is not None and bool(self.stage.device_bytes or shortage.needed_bytes)

    @property
    def explains_others(self) -> bool:
        """Return whether this loss explains the neighbours' lost links."""
        return self.is_held_against_node or self.is_nobodys

    def charge(self, job: str, *, at: float) -> NodeFailureRecord:
        """Return the charge against its node. at: seconds since the epoch."""
        if self.worker is None and not self.is_late:
            incarnation = self.stage.node_incarnation
            return NodeFailureRecord(at=at, text=f"it was lost in job {job}", job=job, incarnation=incarnation)
        how = "did not answer" if self.is_late else "failed"
        why = f": {self.worker.fault}" if self.worker is not None and self.worker.fault else ""
        text = f"its worker {how} in job {job}{why}"
        return NodeFailureRecord(at=at, text=text, job=job, is_jobs_error=self.is_jobs_error)

    def is_between(self, blocked: BlockedWays) -> bool:
        """Return whether a pair of nodes is to blame: the link never opened, or one node does not reach the
        other now.
        """
        worker = self.worker
        if worker is None or not 0 <= worker.lost_peer < len(self.plan.workers):
            return False
        pair = pair_of(self.stage.node, self.plan.workers[worker.lost_peer].node)
        return worker.was_unreached or pair in blocked.pairs

    @property
    def death(self) -> Death:
        """Return the loss as a death for the failure budget."""
        worker = self.worker
        if worker is None:
            return Death(node=self.stage.node)
        return Death(
            node=worker.node,
            batch=worker.batch,
            fault=worker.fault,
            error=worker.error,
            is_hopeless=worker.is_hopeless,
        )
