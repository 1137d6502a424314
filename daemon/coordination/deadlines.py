"""When what a job waits for is late: each wait has as long as the work that is waited for takes. Pure.

Every deadline counts from when the leader saw the wait begin, and again from when etcd is back in sight: meanwhile no
node could say that the work is done.
"""

from dataclasses import dataclass
from typing import Final

from headway.daemon.coordination.boundaries import parts_of
from headway.daemon.coordination.cluster_view import ClusterView, JobView
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.preparation import preparation_s
from headway.daemon.planning.layer_costs import layer_costs
from headway.daemon.records import Save
from headway.daemon.storage.pace import LEAST_BYTES_PER_S, transfer_s

LEASE_TTL_S: Final = 5.0
"""How long a daemon that lives may be gone from etcd after an outage of it: then it has registered again."""
START_DEADLINE_S: Final = 120.0
"""For every worker of a plan that came into force to load its layers and run, beside the time that loading takes."""
STOP_DEADLINE_S: Final = 60.0
"""For every worker to reach the stop boundary and write, beside the batches and the bytes that this takes."""
FOLDER_PATIENCE_S: Final = 600.0
"""For a checkpoint folder that takes nothing, at a stop: an outage of storage is no failure of the job."""
STOP_BATCHES: Final = 4
"""Batches' worth of time that a stop may take: the rest of one, the next, and as much again for a slow machine."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Those of one job at one moment."""

    job: JobView
    view: ClusterView
    spec: JobSpec

    @property
    def batch_seconds(self) -> float:
        """The longer of what was predicted and what is measured."""
        predicted = self.job.plan.predicted_batch_seconds if self.job.plan is not None else 0.0
        progress = self.job.progress
        if progress is None or progress.tokens_per_second <= 0:
            return predicted
        return max(predicted, self.spec.train.tokens_per_batch / progress.tokens_per_second)

    @property
    def transfer_seconds(self) -> float:
        """To write or fetch the whole state, at the least that is expected of disks, or as a line was measured."""
        num_bytes = sum(cost.state_bytes for cost in layer_costs(self.spec))
        return transfer_s(num_bytes, line_bytes_per_s=self._slowest_line)

    @property
    def _slowest_line(self) -> float:
        """Bytes a second between two nodes that are there, as far as it was measured."""
        nodes = self.view.nodes
        lines = [
            probe.bytes_per_s
            for name, record in self.view.probes.items()
            for peer, probe in record.peers.items()
            if name in nodes and peer in nodes and probe.bytes_per_s > 0
        ]
        return min(lines, default=LEAST_BYTES_PER_S)

    def seen(self, at: float) -> float:
        """From when nodes were able to say something about what happened at a moment: etcd may have been away."""
        return max(at, self.view.steady_since or 0.0)

    @property
    def heard(self) -> float:
        """When nodes have had the time to say again what etcd lost with their leases while it was away."""
        return self.seen(0.0) + LEASE_TTL_S

    @property
    def prepare(self) -> float:
        """When the workers of `next` are late."""
        return self._began + preparation_s(self.spec.train)

    @property
    def start(self) -> float:
        """When the workers of a new plan in force are late."""
        return self._began + START_DEADLINE_S + self.transfer_seconds

    @property
    def _began(self) -> float:
        """From when a start has its time: a node that reads data gets on, or storage that was away answers again."""
        return self.seen(max(self.job.entered_at, self.job.read_at))

    @property
    def stop(self) -> float:
        """When the present step of a stop is late. Each file that a node has written or saved is progress."""
        patience_s = FOLDER_PATIENCE_S if self._waits_for_folder else 0.0
        moved_at = max(self.job.stop_changed_at, self.job.state_changed_at)
        return self.seen(moved_at) + self._stop_seconds + self.transfer_seconds + patience_s

    @property
    def _waits_for_folder(self) -> bool:
        """Whether a stop's checkpoint meets trouble at the folder, or lacks nothing but its manifest."""
        plan, stop = self.job.plan, self.job.stop
        if plan is None or stop is None or stop.boundary is None or stop.save is not Save.CHECKPOINT:
            return False
        place = (plan.timeline, stop.boundary)
        has_trouble = any(record.trouble for record in self.job.state.get(place, {}).values())
        return has_trouble or all(
            any(file.is_durable for file in self.job.holders(*place, part).values()) for part in parts_of(self.job)
        )

    @property
    def end(self) -> float:
        """When the last workers are late at the end of the job, after the first have reached it."""
        return self.seen(self.job.workers_changed_at) + self._stop_seconds

    @property
    def _stop_seconds(self) -> float:
        return STOP_DEADLINE_S + STOP_BATCHES * self.batch_seconds
