"""Some seconds of the soak, with a fixed seed."""

from pathlib import Path

import pytest

from tests.chaos.outages import can_destroy
from tests.chaos.soak_job import SoakCase, soak
from tests.integration.exactness.training import Oracle


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed", "kinds"),
    [
        (4, ("kill", "daemon-kill", "worker-pause", "corrupt", "lease-loss")),
        pytest.param(4, ("partition",), marks=pytest.mark.skipif(not can_destroy(), reason="needs root")),
    ],
)
async def test_random_faults_change_no_bit(tmp_path: Path, seed: int, kinds: tuple[str, ...]) -> None:
    """Three nodes, about four random faults, half of the batches without delay: the reference's bits, every rule of the
    history kept, nothing left."""
    case = SoakCase(
        seed=seed,
        num_nodes=3,
        batches=100,
        duration_s=8.0,
        rate_per_minute=32.0,
        schedule="2bw",
        sync_batches=50,
        reduction_groups=1,
        clip_norm=0.5,
        kinds=kinds,
    )
    told: list[str] = []
    outcome = await soak(case, tmp_path, Oracle(tmp_path / "oracle"), say=told.append)
    assert not outcome.troubles, "\n".join([*told, *outcome.troubles])
    assert len(outcome.blows) >= 2, told
    assert outcome.recoveries_s, "no fault needed a new generation"
