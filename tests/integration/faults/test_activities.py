"""Activities of daemons raise what nobody expects, while a job trains: no daemon ends, and the bits are right."""

import asyncio
from pathlib import Path

import pytest

from headway.daemon.cluster.records import NodeRecord
from tests.integration.exactness.training import Oracle
from tests.rigs.fault_harness import TIMEOUT_S, Fault, FaultHarness, fault_harness, faulty_job

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(500)]

NUM_NODES = 3
LEASE_TTL_S = 30
"""No lease ends because the machine is busy: what is lost then is another test's."""
JOB_S = 240.0
EVERYWHERE = ("cluster watch", "registration", "cluster", "generations", "agent", "leadership", "peer liveness")
"""Without one of these a daemon is deaf or dumb: they are struck on every node."""
SOMEWHERE = (
    "workers",
    "watch over workers",
    "sightings",
    "state folder lock",
    "progress reports",
    "worker reports",
    "state sweep",
    "access to checkpoint folders",
    "data ahead",
    "probing",
    "reaching",
    "address",
    "checkpoint sweep",
    "layer store",
    "vanished jobs",
    "job retirement",
    "sweeps",
)
"""All others, but for `device speeds`, which ends as soon as they are known."""


@pytest.mark.slow
async def test_each_activity_raises_and_no_daemon_ends(tmp_path: Path, oracle: Oracle) -> None:
    """The daemons and workers stay, the job ends with the reference's bits, and nodes say what ailed them."""
    async with fault_harness(tmp_path, num_nodes=NUM_NODES, lease_ttl_s=LEASE_TTL_S, num_spares=0) as harness:
        await harness.all_nodes_up(NUM_NODES)
        await _strike_all(harness, oracle)


async def _strike_all(harness: FaultHarness, oracle: Oracle) -> None:
    spec = faulty_job("unexpected", batches=80)
    before = harness.cluster.node_pids
    ailing: dict[str, NodeRecord] = {}

    async def strike() -> None:
        names = sorted(before)
        faults: list[Fault] = [
            {"at": "activity", "when": {"name": name, "node": node}, "do": "raise"}
            for name in EVERYWHERE
            for node in names
        ]
        faults += [
            {"at": "activity", "when": {"name": name, "node": names[number % len(names)]}, "do": "raise"}
            for number, name in enumerate(SOMEWHERE)
        ]
        harness.arm(*faults)
        async with asyncio.timeout(TIMEOUT_S):
            while sum(note["at"] == "activity" for note in harness.struck()) < len(faults):
                await asyncio.sleep(0.05)
            while len(ailing) < len(names):
                view = await harness.session.view()
                ailing.update({name: node for name, node in view.nodes.items() if node.ailments})
                await asyncio.sleep(0.05)

    outcome = await harness.train(spec, during=strike, timeout_s=JOB_S)
    outcome.assert_exact(oracle, strikes=len(EVERYWHERE) * len(before) + len(SOMEWHERE))
    assert harness.cluster.node_pids == before
    assert outcome.num_rollbacks == 0
    for name in before:
        assert "InjectedFaultError: injected fault" in str(ailing[name].ailments), name
