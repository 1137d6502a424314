"""Finds when the worker that has the journal may drop old rows: the checkpoint's journal parts have them. Pure."""

from collections.abc import Iterator

from headway.daemon.agent.assignment import Assignment
from headway.daemon.agent.local_state import NodeState
from headway.daemon.records.journal_part import end_of, own_parts
from headway.daemon.workers.orders import OrderTrimJournal


def trim_steps(assignment: Assignment, node: NodeState) -> Iterator[OrderTrimJournal]:
    """Yield the order to drop rows, once for each part that the job's record names.

    The parts of a job from whose checkpoint this one started are not this job's own before its first checkpoint.
    """
    worker, checkpoint, run_key = assignment.worker, assignment.job.checkpoint, assignment.run_key
    if checkpoint is None or checkpoint.origin_job:
        return
    is_running = worker.is_up and worker.started == run_key and run_key not in worker.failures
    end = end_of(own_parts(checkpoint.journal_parts, assignment.plan.lineage))
    if is_running and worker.has_journal and end > node.trimmed.get(run_key, 0):
        yield OrderTrimJournal(worker.device_index, run_key, end)
