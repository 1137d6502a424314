"""Parts that tests of plan runner share."""

from dataclasses import replace

from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.decide.plans import PlanRequest, Purpose
from headway.daemon.plan.plan_question import ask
from tests.rigs.simulated_cluster import small_spec

GIB = 2**30


def request(num_nodes: int, *, num_blocks: int = 3, job: str = "first", tight: bool = False) -> PlanRequest:
    spec = small_spec(job, num_blocks=num_blocks)
    if tight:
        model = replace(spec.model, hidden_size=1024, intermediate_size=2752)
        spec = replace(spec, model=model, train=replace(spec.train, microbatches=512, reduction_groups=64))
    nodes = [
        NodeRecord(
            name=f"n{index}",
            incarnation=f"n{index}-1",
            address="",
            host=f"n{index}",
            site=f"site {index % 5}",
            devices=(Device(kind="cpu", speed=1.0 + index % 7, memory_bytes=16 * GIB if tight else 0),),
            memory_bytes=0,
            arithmetic_class="one",
        )
        for index in range(num_nodes)
    ]
    return PlanRequest(job=job, purpose=Purpose.BEST, question=ask(spec, nodes))
