"""Joins what a job has learned of its memory: measured peaks, and where memory ran out before or now. Pure."""

from collections.abc import Iterable

from headway.daemon.costs.devices import MemoryLessons, Model, after_shortage, still_of_use
from headway.daemon.records.records import Device, WorkerPart
from headway.daemon.records.shortages import DeviceShortage
from headway.daemon.situation.lost_worker import LostWorker
from headway.daemon.situation.plan_health import PlanHealth
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView


def lessons(job: JobView, shortages: Iterable[DeviceShortage]) -> MemoryLessons:
    """Return what plans of the job respect. shortages: earlier and present ones."""
    return MemoryLessons.of(shortages, _measured(job))


def shortages_now(job: JobView, view: ClusterView, plans: Iterable[PlanHealth]) -> tuple[DeviceShortage, ...]:
    """Return the job's shortages with those that workers of these plans report."""
    found = job.phase.shortages
    for health in plans:
        for position, worker in sorted(health.workers.items()):
            if health.plan is None or position >= len(health.stages) or worker.shortage is None:
                continue
            if not LostWorker(position=position, plan=health.plan, worker=worker).is_out_of_memory:
                continue
            stage = health.stages[position]
            device = _device(view, stage)
            if device is None:
                continue
            found = after_shortage(
                found,
                worker.shortage,
                place=(stage.node, stage.node_incarnation, stage.device_index),
                device=device,
                predicted_bytes=stage.device_bytes,
                demand=MemoryLessons.of(found, _measured(job)).demand(device),
            )
    return still_of_use(found, ((name, node.incarnation) for name, node in view.nodes.items()))


def _measured(job: JobView) -> dict[Model, float]:
    """Return the largest measured factor of each model of device."""
    demands: dict[Model, float] = {}
    for profile in job.profiles.values():
        model = profile.device_kind, profile.device_model
        demands[model] = max(profile.demand, demands.get(model, 1.0))
    return demands


def _device(view: ClusterView, stage: WorkerPart) -> Device | None:
    """Return a stage's device. None if its daemon is gone: no plan uses it, and its model is not known."""
    record = view.nodes.get(stage.node)
    if record is None or record.incarnation != stage.node_incarnation or stage.device_index >= len(record.devices):
        return None
    return record.devices[stage.device_index]
