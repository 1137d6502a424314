"""Names the workers that are late in the present phase of a job. deadlines.py has the times. Pure."""

from typing import TYPE_CHECKING

from headway.daemon.records.records import Phase, PlanRecord, Save, WorkerState
from headway.daemon.situation.boundaries import lead_of

if TYPE_CHECKING:
    from headway.daemon.situation.situation import JobSituation

STARTED = (WorkerState.RUNNING, WorkerState.STOPPED, WorkerState.FAILED)


def late_workers(situation: "JobSituation") -> tuple[int, ...]:
    """Return the positions of late workers in the plan of the phase."""
    job, now, deadlines = situation.job, situation.now, situation.deadlines
    plan, stop = job.plan, job.stop
    match job.phase.phase:
        case Phase.PREPARING | Phase.RECOVERING if job.next is not None and now >= deadlines.prepare:
            return situation.next.unready_workers(WorkerState.READY)
        case Phase.RUNNING if plan is not None:
            late = situation.current.unready_workers(*STARTED) if now >= deadlines.start else ()
            return late or (_late_at_the_end(situation, plan) if now >= deadlines.end else ())
        case Phase.STOPPING if plan is not None and stop is not None and now >= deadlines.stop:
            if stop.boundary is None:
                return (0,)
            if late := situation.current.unready_workers(WorkerState.STOPPED):
                return late
            return _late_to_write(situation, plan, stop.boundary) if stop.save is Save.MOVES else ()
    return ()


def _late_at_the_end(situation: "JobSituation", plan: PlanRecord) -> tuple[int, ...]:
    """Return workers that still train although others have reached the end."""
    running = situation.current.unready_workers(WorkerState.STOPPED)
    return running if len(running) < len(plan.workers) else ()


def _late_to_write(situation: "JobSituation", plan: PlanRecord, boundary: int) -> tuple[int, ...]:
    """Return the leads of stages whose layers move and are not yet held by any node."""
    missing = [layer for layer in situation.moving if not situation.job.holders(plan.timeline, boundary, layer)]
    return tuple(sorted({plan.workers.index(lead_of(plan, layer)) for layer in missing}))
