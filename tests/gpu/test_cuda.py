"""The promise on a CUDA device: one stage through daemon and worker against the plain loop on the same card."""

from pathlib import Path

import pytest
import torch

from headway.daemon.local.cluster import LocalCluster
from tests.integration.exactness.training import Oracle, assert_same_bits, small_job, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_one_stage_on_a_card_gives_the_bits_of_the_plain_loop_there(tmp_path: Path, dtype: str) -> None:
    """A one-node job on the card ends with the losses and weights of the reference on that card."""
    spec = small_job(f"cuda-{dtype}", device="cuda", dtype=dtype)
    async with LocalCluster(tmp_path / "state", num_nodes=1) as cluster:
        result = await train(cluster, spec, tmp_path / "out", num_nodes=1)
    assert_same_bits(result, Oracle(tmp_path / "oracle", device="cuda")(spec))


async def test_two_stages_on_one_card_give_the_same_bits(tmp_path: Path) -> None:
    """Two nodes share the card, their stages talk over gRPC: the bits are those of one loop."""
    spec = small_job("cuda-two", device="cuda")
    async with LocalCluster(tmp_path / "state", num_nodes=2) as cluster:
        result = await train(cluster, spec, tmp_path / "out", num_nodes=2)
    assert_same_bits(result, Oracle(tmp_path / "oracle", device="cuda")(spec))
