"""What the planner would do with a job on some nodes: the dry run of `headway plan`. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from headway.daemon.client.job_report import layer_range
from headway.daemon.errors import ConfigError
from headway.daemon.jobs.job import JobSpec
from headway.daemon.planning.planner import PlanRefused, make_plan
from headway.daemon.records import Device, NodeRecord, StagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPreview:
    """A plan that nobody has made yet."""

    job: str
    stages: tuple[StagePlan, ...]
    predicted_batch_seconds: float
    tokens_per_second: float
    exact: bool
    exact_reason: str
    explanation: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The preview for people."""
        head = (
            f"{self.job}: {len(self.stages)} stages, {self.predicted_batch_seconds:.3g} s a batch predicted, "
            f"{self.tokens_per_second:,.0f} tokens/s"
        )
        stages = [
            f"  stage {index} on {stage.node}: {layer_range(stage.layers)} (depth {stage.depth})"
            for index, stage in enumerate(self.stages)
        ]
        return [head, *stages, *self.explanation]


def equal_nodes(num_nodes: int, *, memory_bytes: int = 0) -> tuple[NodeRecord, ...]:
    """So many equal CPU nodes of one site. memory_bytes: of each; 0: enough."""
    return tuple(
        NodeRecord(
            name=f"node-{index}",
            incarnation=f"preview-{index}",
            address="",
            host="",
            site="default",
            devices=(Device(kind="cpu"),),
            memory_bytes=memory_bytes,
            arithmetic_class="equal",
        )
        for index in range(1, num_nodes + 1)
    )


def preview(spec: JobSpec, nodes: Iterable[NodeRecord]) -> PlanPreview:
    """The plan of a job on nodes that it has to itself. Raises ConfigError with the planner's reason for refusing."""
    plan = make_plan(spec, nodes)
    if isinstance(plan, PlanRefused):
        raise ConfigError(plan.reason, f"job {spec.job.name}")
    return PlanPreview(
        job=spec.job.name,
        stages=plan.stages,
        predicted_batch_seconds=plan.predicted_batch_seconds,
        tokens_per_second=spec.train.tokens_per_batch / plan.predicted_batch_seconds,
        exact=plan.is_exact,
        exact_reason=plan.exact_reason,
        explanation=plan.explanation(),
    )
