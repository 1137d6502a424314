"""A job with a past: plans that followed each other, failures, and the rows of its history."""

import math
from dataclasses import replace

from headway.daemon.cluster.lineage import PlanOutline, StageOutline
from headway.daemon.cluster.records import EventRecord, Phase, PhaseRecord, SpecRecord
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.reports.metrics_file import HistoryRow
from headway.stages.spec import ModelSpec

BEGAN_S = 1_800_000_000.0


def outline(boundary: int, nodes: tuple[str, ...], num_layers: int, *, timeline: int, furthest: int = 0) -> PlanOutline:
    """Equal slices of the layers on these nodes; nodes beyond the number of layers are replicas of the last stage."""
    num_stages = min(len(nodes), num_layers)
    cuts = [num_layers * index // num_stages for index in range(num_stages + 1)]
    stages = [
        StageOutline(
            first=cuts[index],
            last=cuts[index + 1] - 1,
            holders=tuple(
                (node, 0) for node in (nodes[index:] if index == num_stages - 1 else nodes[index : index + 1])
            ),
        )
        for index in range(num_stages)
    ]
    return PlanOutline(
        timeline=timeline, boundary=boundary, furthest=furthest, predicted_batch_seconds=0.25, stages=tuple(stages)
    )


def rows(num: int, *, num_generations: int = 1) -> list[HistoryRow]:
    """A falling loss with all its digits, evaluated every 20 batches."""
    return [
        HistoryRow(
            batch=batch,
            loss=1.1 + 4.4 * math.exp(-batch / (num / 5)) + 0.05 * math.sin(batch * 1.7),
            learning_rate=1e-2 * min(1.0, (batch + 1) / 20),
            tokens=4096,
            seconds=0.3 + 0.05 * math.cos(batch),
            generation=1 + batch * num_generations // num,
            eval_loss=1.3 + 4.4 * math.exp(-batch / (num / 5)) if batch % 20 == 0 else None,
            final_eval_loss=1.3123 if batch == num - 1 else None,
        )
        for batch in range(num)
    ]


def job_view(
    num_batches: int, *, name: str = "demo", events: tuple[EventRecord, ...] | None = None, num_layers: int = 8
) -> JobView:
    """Finished: three nodes, a worker killed, a machine killed, a fourth node that joined."""
    spec = JobSpec(job=JobSection(name=name), model=ModelSpec(num_hidden_layers=num_layers - 2))
    spec = replace(spec, train=replace(spec.train, batches=num_batches))
    if events is None:
        events = story(num_batches, num_layers)
    return JobView(
        name=name,
        submission=SpecRecord(spec=spec, submitted_at=BEGAN_S, submitted_by="me@here"),
        phase=PhaseRecord(phase=Phase.FINISHED, generation=4),
        events=dict(enumerate(events)),
    )


def story(num_batches: int, num_layers: int) -> tuple[EventRecord, ...]:
    """What the coordinator says in such a run."""
    a, b, c = (num_batches * share // 10 for share in (3, 5, 8))
    three, two, four = ("node-1", "node-2", "node-3"), ("node-1", "node-3"), ("node-1", "node-3", "node-4")

    def began(at: float, text: str, generation: int, plan: PlanOutline) -> EventRecord:
        return EventRecord(at=BEGAN_S + at, text=text, generation=generation, plan=plan)

    return (
        began(5, "Training starts at batch 0: 3 stages", 1, outline(0, three, num_layers, timeline=1)),
        EventRecord(
            at=BEGAN_S + 30,
            text="The worker of stage 1 on node node-2 died (killed by SIGKILL); goes back to a boundary",
            generation=2,
            is_failure=True,
        ),
        began(33, "Training resumes", 2, outline(a - 5, three, num_layers, timeline=2, furthest=a)),
        EventRecord(at=BEGAN_S + 60, text="Node node-2 was lost (its lease expired)", generation=3, is_failure=True),
        began(66, "Training resumes", 3, outline(b - 8, two, num_layers, timeline=3, furthest=b)),
        began(90, "Node node-4 joined: 3 stages instead of 2", 4, outline(c, four, num_layers, timeline=3, furthest=c)),
    )
