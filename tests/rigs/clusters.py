"""Nodes and jobs for the planner's tests."""

from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.jobs.job import FaultSpec, JobSection, JobSpec, PlacementSpec
from headway.daemon.plan.planner import ClusterPlan, PlanRefused, make_plan
from headway.stages.spec import ModelSpec, TrainSpec


def node(
    name: str,
    *,
    speed: float = 1.0,
    memory_bytes: int = 0,
    host_bytes: int = 0,
    site: str = "here",
    arithmetic_class: str = "one",
    device_classes: tuple[str, ...] = (),
    num_devices: int = 1,
    is_draining: bool = False,
) -> NodeRecord:
    """A machine of CPU devices. memory_bytes: of each device; host_bytes: of the machine.

    device_classes: each device's own class, as a node of unlike cards says it.
    """
    return NodeRecord(
        name=name,
        incarnation=f"{name}-1",
        address="",
        host="",
        site=site,
        devices=tuple(
            Device(kind="cpu", index=index, speed=speed, memory_bytes=memory_bytes, arithmetic_class=name)
            for index, name in enumerate(device_classes or ("",) * num_devices)
        ),
        memory_bytes=host_bytes,
        arithmetic_class=arithmetic_class,
        is_draining=is_draining,
    )


def job(
    *, num_blocks: int = 8, placement: PlacementSpec | None = None, fault: FaultSpec | None = None, **train: object
) -> JobSpec:
    """A small decoder."""
    return JobSpec(
        job=JobSection(name="demo"),
        model=ModelSpec(num_hidden_layers=num_blocks),
        train=TrainSpec(**train),  # type: ignore[arg-type]
        placement=placement or PlacementSpec(),
        fault=fault or FaultSpec(),
    )


def planned(*args: object, **kwargs: object) -> ClusterPlan:
    """A plan that must be there."""
    plan = make_plan(*args, **kwargs)  # type: ignore[arg-type]
    assert isinstance(plan, ClusterPlan), plan
    return plan


def refused(*args: object, **kwargs: object) -> str:
    """The reason of a refusal that must be there."""
    plan = make_plan(*args, **kwargs)  # type: ignore[arg-type]
    assert isinstance(plan, PlanRefused), plan
    return plan.reason
