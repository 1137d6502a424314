"""A history by hand, in which everything is in order: three plans, one of them after a rollback, of a job of 2bw."""

from collections.abc import Callable
from dataclasses import replace

from headway.daemon.jobs.job import JobSection, JobSpec
from headway.stages.spec import TrainSpec
from tests.chaos.checker import FaultSeen, History, Load, Operation, PlanSeen, Sample

LOWER, UPPER = ("embed", "block.0"), ("block.1", "head")
JOB = JobSpec(
    job=JobSection(name="job"), train=TrainSpec(batches=6, microbatches=2, reduction_groups=2, schedule="2bw")
)
PLANS = (
    # Began at 0, got through batch 3, and died.
    PlanSeen(generation=1, timeline=1, boundary=0, stages=(LOWER, UPPER)),
    # Went back to boundary 2.
    PlanSeen(
        generation=3,
        timeline=3,
        boundary=2,
        ancestry=((1, 2),),
        source="nodes",
        source_timeline=1,
        stages=(("embed",), ("block.0",), UPPER),
    ),
    # A planned change at boundary 4, on the same timeline: two replicas of the upper stage, a microbatch each.
    PlanSeen(
        generation=4,
        timeline=3,
        boundary=4,
        ancestry=((1, 2),),
        source="nodes",
        source_timeline=3,
        stages=(LOWER, UPPER, UPPER),
        groups=((), (0,), (1,)),
    ),
)
ENDS = {1: 4, 3: 4, 4: 6}
"""The batch before which each generation's work ended."""

Change = Callable[[Operation], Operation | list[Operation]]


def sound_history() -> History:
    """Batch b is computed from b to b+1 seconds of its plan's time; plan k begins at 10 k seconds."""
    operations = [operation for plan in PLANS for operation in _work(plan)]
    fault = FaultSeen(text="kill node-2", at=13.95, until=13.95)
    samples = [
        Sample(at=float(at), subject="daemon node-1", amounts={"fds": 40 + at % 3, "threads": 9, "files": 12})
        for at in range(10, 50)
    ]
    loads = [
        Load(
            generation=plan.generation,
            layer=layer,
            boundary=plan.boundary,
            source="live" if plan.timeline == plan.source_timeline else "path" if plan.boundary else "initial",
            source_timeline=plan.source_timeline,
        )
        for plan in PLANS
        for layers in plan.stages
        for layer in layers
    ]
    return History(
        plans=PLANS,
        operations=operations,
        loads=loads,
        faults=[fault],
        samples=samples,
        is_finished=True,
        ended_at=46.0,
    )


def changed(history: History, wanted: tuple[int, int, str, int, int | None], change: Change) -> History:
    """The history with one operation, named by (generation, worker, op, batch, microbatch), replaced."""
    operations: list[Operation] = []
    num_changed = 0
    for operation in history.operations:
        key = (operation.generation, operation.worker, operation.op, operation.batch, operation.microbatch)
        if key != wanted:
            operations.append(operation)
            continue
        num_changed += 1
        result = change(operation)
        operations += result if isinstance(result, list) else [result]
    assert num_changed == 1, f"{wanted} occurs {num_changed} times"
    return replace(history, operations=operations)


def _work(plan: PlanSeen) -> list[Operation]:
    share = plan.shares(JOB.train)
    num_stages = len(share.replicas)
    operations = []
    for batch in range(plan.boundary, ENDS[plan.generation]):
        for worker, stage in enumerate(share.stage_of):
            for i in share.microbatches[worker]:
                begin = 10.0 * plan.generation + batch + 0.2 * i
                for op, offset in (("forward", stage), ("backward", 2 * num_stages - stage)):
                    operations.append(_operation(plan, worker, op, batch, i, begin + 0.01 * offset))
            end = 10.0 * plan.generation + batch + 0.9
            operations.append(_operation(plan, worker, "update", batch, None, end))
    return operations


def _operation(plan: PlanSeen, worker: int, op: str, batch: int, microbatch: int | None, started: float) -> Operation:
    return Operation(
        generation=plan.generation,
        worker=worker,
        op=op,
        batch=batch,
        microbatch=microbatch,
        version=batch if op == "update" else JOB.train.weight_version(batch),
        versions_live=1 if batch == 0 else 2,
        started=started,
        process=f"worker node-{worker + 1}",
    )
