"""Compares plans by devices: which devices a plan uses, and what moves between two plans. Pure."""

from headway.daemon.planning.cluster_plan import ClusterPlan
from headway.daemon.records.records import DeviceKey, PlanRecord, WorkerPart


def devices(plan: PlanRecord | ClusterPlan | None) -> frozenset[DeviceKey]:
    """Return the devices that the plan uses."""
    return frozenset((stage.node, stage.device_index) for stage in plan.workers) if plan is not None else frozenset()


def place(stage: WorkerPart) -> tuple[str, str, int]:
    """Return the worker's place: (node, incarnation, device)."""
    return stage.node, stage.node_incarnation, stage.device_index


def is_moving(plan: PlanRecord, successor: PlanRecord, layer: str) -> bool:
    """Return whether a worker of the next plan needs a layer that it does not compute in the present one."""
    return not {place(stage) for stage in successor.holders(layer)} <= {place(stage) for stage in plan.holders(layer)}
