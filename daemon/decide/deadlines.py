"""The deadlines of a job's waits. Each follows the time that the awaited work takes. Pure.

Every deadline counts from when the leader saw the wait begin, and again from when etcd became reachable: while etcd is
unreachable, no node can report that the work is done.
"""

from dataclasses import dataclass
from typing import Final

from headway.daemon.cluster.records import Save
from headway.daemon.cluster.state_key import transfer_s
from headway.daemon.decide.boundaries import parts_of
from headway.daemon.decide.cluster_view import SETTLE_S, ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.outlook import slowest_way
from headway.daemon.jobs.job import JobSpec, preparation_s
from headway.daemon.plan.layer_costs import layer_costs

LEASE_TTL_S: Final = 5.0
"""Maximum time for which a living daemon may lack its records after an outage: by then it has registered again."""
START_DEADLINE_S: Final = 120.0
"""Time for every worker of a new plan to load its layers and run, in addition to the time of loading."""
STOP_DEADLINE_S: Final = 60.0
"""Time for every worker to reach the stop boundary and write, in addition to the time of batches and bytes."""
FOLDER_PATIENCE_S: Final = 600.0
"""Time for which a stop waits for a checkpoint folder that accepts no file, because an outage of storage is no failure
of the job.

"""
CHANGE_RETRY_S: Final = 10.0
"""Pause between a change that was given up and the next one."""
LONGEST_RETRY_S: Final = 600.0
"""Longest pause before the next attempt at a better plan, while the same nodes are there."""
STOP_BATCHES: Final = 4
"""Number of batches' time that a stop may take: the rest of one, the next, and two more for a slow machine."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The deadlines of one job at one moment."""

    job: JobView
    view: ClusterView
    spec: JobSpec

    @property
    def batch_seconds(self) -> float:
        """Return the longer of the predicted and the measured seconds of a batch."""
        predicted = self.job.plan.predicted_batch_seconds if self.job.plan is not None else 0.0
        progress = self.job.progress
        if progress is None or progress.tokens_per_second <= 0:
            return predicted
        return max(predicted, self.spec.train.tokens_per_batch / progress.tokens_per_second)

    @property
    def transfer_seconds(self) -> float:
        """Return the time to write or fetch the whole state, at a disk's minimum rate or at a line's measured rate."""
        num_bytes = sum(cost.loaded_bytes for cost in layer_costs(self.spec))
        return transfer_s(num_bytes, line_bytes_per_s=slowest_way(self.view))

    def seen(self, at: float) -> float:
        """Return when nodes were able to report on a moment: etcd may have been away."""
        return max(at, self.view.steady_since or 0.0)

    @property
    def heard(self) -> float:
        """Return when nodes have had the time to repeat what etcd lost with their leases while it was away."""
        return self.seen(0.0) + LEASE_TTL_S

    @property
    def prepare(self) -> float:
        """Return when the workers of `next` are late."""
        return self._began + preparation_s(self.spec.train)

    @property
    def start(self) -> float:
        """Return when the workers of a new plan in force are late."""
        return self._began + START_DEADLINE_S + self.transfer_seconds

    @property
    def _began(self) -> float:
        """Return from when a start's time counts: later if a node that reads data progresses, or storage
        answers again.
        """
        return self.seen(max(self.job.entered_at, self.job.read_at))

    @property
    def stop(self) -> float:
        """Return when the present step of a stop is late. Each file that a node has written or saved is progress."""
        patience_s = FOLDER_PATIENCE_S if self._waits_for_folder else 0.0
        moved_at = max(self.job.stop_changed_at, self.job.state_changed_at)
        return self.seen(moved_at) + self._stop_seconds + self.transfer_seconds + patience_s

    @property
    def _waits_for_folder(self) -> bool:
        """Return whether a stop's checkpoint has trouble with the folder, or lacks only its manifest."""
        plan, stop = self.job.plan, self.job.stop
        if plan is None or stop is None or stop.boundary is None or stop.save is not Save.CHECKPOINT:
            return False
        place = (plan.timeline, stop.boundary)
        has_trouble = any(record.trouble for record in self.job.state.get(place, {}).values())
        return has_trouble or all(
            any(file.is_durable for file in self.job.holders(*place, part).values()) for part in parts_of(self.job)
        )

    @property
    def change(self) -> float:
        """Return when the next change is allowed: some time after the last, and later if that was given up."""
        return self.job.entered_at + (CHANGE_RETRY_S if self._given_up else SETTLE_S)

    @property
    def better_plan(self) -> float:
        """Return when a change that only saves time is allowed: each one in a row that was given up doubles the pause.

        The same plan on the same nodes would often end the same way. It costs the nodes a preparation each time.
        """
        if self._given_up < 2 or self.view.unrest.last_at > self.job.entered_at:
            return self.change
        return self.job.entered_at + min(CHANGE_RETRY_S * 2.0 ** (self._given_up - 1), LONGEST_RETRY_S)

    @property
    def _given_up(self) -> int:
        """Return the number of changes in a row that were given up. Their generations are spent, but not in force."""
        plan = self.job.plan
        return 0 if plan is None else max(self.job.phase.generation - plan.generation, 0)

    @property
    def end(self) -> float:
        """Return when the last workers are late at the job's end, after the first have reached it."""
        return self.seen(self.job.workers_changed_at) + self._stop_seconds

    @property
    def _stop_seconds(self) -> float:
        return STOP_DEADLINE_S + STOP_BATCHES * self.batch_seconds
