"""The assumptions behind the rows of the fault matrix."""

import pytest

from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.planner import make_plan
from tests.integration.conftest import NUM_NODES
from tests.rigs.fault_harness import faulty_job


@pytest.mark.parametrize("speed", [0.25, 1.0, 2.0, 4.0])
def test_a_faulty_job_has_a_first_a_middle_and_a_last_stage(speed: float) -> None:
    """On devices slow and fast, five of one host: three stages on three nodes. Else a row strikes nothing."""
    device = Device(kind="cpu", memory_bytes=8 << 30, speed=speed)
    nodes = [
        NodeRecord(
            name=f"node-{number}",
            incarnation=f"{number}",
            address=f"127.0.0.1:{number}",
            host="127.0.0.1",
            site="",
            devices=(device,),
            memory_bytes=16 << 30,
            arithmetic_class="same",
        )
        for number in range(1, NUM_NODES + 1)
    ]
    plan = make_plan(faulty_job("stages"), nodes)
    assert isinstance(plan, ClusterPlan)
    assert len({stage.node for stage in plan.workers}) == 3
    assert len({stage.layers for stage in plan.workers}) == 3
