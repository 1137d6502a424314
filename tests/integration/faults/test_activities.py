"""Activities of daemons raise what nobody expects, while a job trains: no daemon ends, and the bits are right."""

import asyncio

import pytest

from headway.daemon.records import NodeRecord
from tests.integration.exactness.training import Oracle
from tests.integration.faults.ground import TIMEOUT_S, Fault, Ground, faulty_job

pytestmark = pytest.mark.asyncio(loop_scope="session")

EVERYWHERE = ("cluster watch", "registration", "cluster", "agent", "leadership", "companions")
"""Without one of these a daemon is deaf or dumb: they are struck on every node."""
SOMEWHERE = (
    "workers",
    "watch over workers",
    "sightings",
    "state folder lock",
    "progress reports",
    "goodput reports",
    "profile reports",
    "state sweep",
    "probing",
    "reaching",
    "checkpoint sweep",
    "compiled code",
)


@pytest.mark.slow
async def test_each_activity_raises_and_no_daemon_ends(field: Ground, oracle: Oracle) -> None:
    """The daemons and workers stay, the job ends with the reference's bits, and nodes say what ailed them."""
    spec = faulty_job("unexpected", batches=400)
    before = field.cluster.node_pids
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
        field.arm(*faults)
        async with asyncio.timeout(TIMEOUT_S):
            while sum(note["at"] == "activity" for note in field.struck()) < len(faults):
                await asyncio.sleep(0.05)
            while len(ailing) < len(names):
                view = await field.session.view()
                ailing.update({name: node for name, node in view.nodes.items() if node.ailments})
                await asyncio.sleep(0.05)

    outcome = await field.train(spec, during=strike)
    outcome.assert_exact(oracle, strikes=len(EVERYWHERE) * len(before) + len(SOMEWHERE))
    assert field.cluster.node_pids == before
    assert outcome.num_rollbacks == 0
    for name in before:
        assert "InjectedFaultError: injected fault" in str(ailing[name].ailments), name
