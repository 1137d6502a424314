"""Fault matrix, links inside a node: three workers of one daemon train over unix sockets, through a cut."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.exactness.training import Oracle
from tests.rigs.fault_harness import ROW_S, at_operation, fault_harness, faulty_job

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(ROW_S)]


@pytest.mark.slow
async def test_workers_of_one_node_train_over_unix_sockets(tmp_path: Path, oracle: Oracle) -> None:
    """Three stages in one node, links cut amid a batch: the bits of the reference, and nothing is rolled back."""
    spec = faulty_job("one-node")
    spec = replace(spec, train=replace(spec.train, link="grpc"))
    async with fault_harness(tmp_path, num_nodes=1, num_devices=3, devices="cpu") as harness:
        outcome = await harness.train(spec, at_operation(1, 10, do="cut_links", seconds=0.5))
    outcome.assert_exact(oracle)
    assert outcome.num_rollbacks == 0
    opened = [line for path in tmp_path.rglob("*") for line in _lines(path) if "link_opened" in line]
    assert len([line for line in opened if "unix socket" in line]) >= 2, "a link opened, and again after the cut"
    assert not [line for line in opened if "TCP" in line]


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return path.read_bytes().decode(errors="replace").splitlines()
