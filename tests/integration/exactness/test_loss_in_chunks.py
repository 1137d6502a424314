"""A loss in chunks, and one product for the gradient of the vocabulary's matrix: the plain loop's bits."""

from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.jobs.job import JobSpec
from headway.daemon.local.cluster import LocalCluster
from tests.integration.exactness.training import Oracle, assert_same_bits, small_job, train
from tests.rigs.fault_harness import FaultHarness, at_operation, faulty_job

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]


def in_chunks(name: str, loss_gradient: str) -> JobSpec:
    """32 tokens a microbatch, of which at most 10 have logits at once; the last chunk has 2."""
    return small_job(name, dtype="bfloat16", loss_chunk=10, loss_gradient=loss_gradient)


@pytest.mark.parametrize(
    ("loss_gradient", "nodes"),
    [
        pytest.param("whole", 1, marks=pytest.mark.slow),
        ("whole", 2),
        ("whole", 3),
        pytest.param("chunks", 2, marks=pytest.mark.slow),
    ],
)
async def test_any_number_of_nodes_makes_the_gradients_of_the_plain_loop(
    cluster: LocalCluster, oracle: Oracle, tmp_path: Path, loss_gradient: str, nodes: int
) -> None:
    """A bfloat16 job with either gradient, on so many nodes → the losses and weights of the plain loop."""
    spec = in_chunks(f"{loss_gradient}-{nodes}", loss_gradient)
    assert_same_bits(await train(cluster, spec, tmp_path, num_nodes=nodes), oracle(spec))


async def test_a_kill_changes_no_gradient(harness: FaultHarness, oracle: Oracle) -> None:
    """The worker of the last stage is killed between two operations, and a boundary restored: the same bits."""
    spec = faulty_job("whole-killed")
    train = replace(spec.train, dtype="bfloat16", loss_chunk=100, loss_gradient="whole")
    outcome = await harness.train(replace(spec, train=train), at_operation(2, 10))
    (struck,) = outcome.struck
    outcome.assert_exact(oracle, hit=frozenset({struck["node"]}))
    assert outcome.num_rollbacks == 1
