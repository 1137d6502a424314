"""Fault matrix: files that are full, read-only, altered or cut."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.checkpoint_folder import begin_with, read_checkpoint
from headway.daemon.client.job_requests import submit
from headway.daemon.cluster.records import Phase
from tests.integration.exactness.training import Oracle
from tests.rigs.fault_harness import ROW_S, FaultHarness, at_operation, fault_harness, faulty_job

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(ROW_S)]


@pytest.mark.parametrize("do", ["flip_bit", pytest.param("truncate", marks=pytest.mark.slow)])
async def test_stored_file_is_damaged(harness: FaultHarness, oracle: Oracle, do: str) -> None:
    """A file of its own store is bad when a worker loads it: it is fetched from another holder."""
    damage = {"at": "load", "when": {"stage": 1, "boundary": 8, "layer": "block.2"}, "do": do}
    damages = [damage | {"when": {"boundary": 8, "layer": f"block.{block}"}, "after": 0} for block in range(1, 4)]
    outcome = await harness.train(faulty_job(f"damage-{do.replace('_', '-')}"), at_operation(1, 10), *damages)
    outcome.assert_exact(oracle, strikes=2, hit=frozenset({outcome.struck[0]["node"]}))


@pytest.mark.slow
async def test_holder_serves_a_damaged_file(harness: FaultHarness, oracle: Oracle) -> None:
    """The lost node's copy is bad on its buddy: an older boundary or another holder serves."""
    serve = {"at": "transfer.file", "when": {"boundary": 8}, "do": "flip_bit", "after": 0}
    outcome = await harness.train(faulty_job("serve"), at_operation(1, 10, do="kill_parent"), serve)
    outcome.assert_exact(oracle, hit=frozenset(outcome.pids_before))


@pytest.mark.slow
async def test_state_store_full(tmp_path: Path, oracle: Oracle) -> None:
    """No room for snapshots: training goes on without, status says so, and a death goes back to the checkpoint."""
    spec = faulty_job("full", num_nodes=2)
    spec = replace(spec, fault=replace(spec.fault, checkpoint_every=0))
    async with fault_harness(tmp_path, num_nodes=2, store_quota_bytes=100_000) as harness:
        outcome = await harness.train(spec, at_operation(1, 14))
    outcome.assert_exact(oracle, hit=frozenset({outcome.struck[0]["node"]}))


@pytest.fixture
def own_memory(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 4 MiB."""
    folder = tmp_path / "memory"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False).returncode:
        pytest.skip("only root may mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
async def test_memory_for_state_is_full(tmp_path: Path, own_memory: Path, oracle: Oracle) -> None:
    """Somebody else fills the file system of a node's store: status says so, training goes on, and so it does from the
    beginning after a death; once there is room again, the job ends as ever.
    """
    ballast = own_memory / "ballast"

    async def cure() -> None:
        await harness.until(
            lambda _, job: any("No space left" in of.trouble for of in job.goodput.values()), "no-space"
        )
        await harness.until(lambda _, job: job.plan is not None and job.plan.generation > 1, "no-space")
        ballast.unlink()

    async with fault_harness(tmp_path, num_nodes=1) as harness:
        await harness.cluster.add_node(settings={"store_dir": own_memory / "store"})
        with ballast.open("wb", buffering=0) as file:
            room = os.statvfs(own_memory)
            file.write(bytes(room.f_bavail * room.f_bsize))
        assert os.statvfs(own_memory).f_bavail == 0
        outcome = await harness.train(faulty_job("no-space", num_nodes=2, batches=40), at_operation(1, 20), during=cure)
    outcome.assert_exact(oracle, hit=frozenset({outcome.struck[0]["node"]}))
    assert outcome.num_rollbacks == 1


@pytest.mark.slow
async def test_checkpoint_folder_cannot_be_written(harness: FaultHarness, tmp_path: Path, oracle: Oracle) -> None:
    """A file lies where the folder should be: training goes on; the end is retried until it is cured."""
    spec = faulty_job("readonly", num_nodes=2)
    target = tmp_path / "checkpoints"
    target.write_text("in the way")
    spec = replace(spec, fault=replace(spec.fault, checkpoint_every=8, checkpoint_dir=str(target)))

    async def cure() -> None:
        await harness.until(
            lambda _, job: any(record.trouble for records in job.state.values() for record in records.values()),
            "readonly",
        )
        await harness.until(lambda _, job: job.phase.phase is Phase.STOPPING, "readonly")
        await asyncio.sleep(0.5)
        target.unlink()

    outcome = await harness.train(spec, during=cure)
    outcome.assert_exact(oracle, strikes=0)


@pytest.mark.slow
async def test_restart_from_nothing_but_the_checkpoint(tmp_path: Path, oracle: Oracle) -> None:
    """Etcd, daemons and memory are gone; a new cluster goes on from the folder, as the same job and as a child."""
    spec = faulty_job("phoenix", num_nodes=2, batches=32)
    target = tmp_path / "checkpoints"
    spec = replace(spec, fault=replace(spec.fault, checkpoint_every=8, checkpoint_dir=str(target)))
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with fault_harness(tmp_path / "one", num_nodes=2) as harness:
        harness.arm(at_operation(0, 20, do="stop"))
        await submit(harness.session, spec)
        await harness.until(lambda _, job: job.checkpoint is not None and job.checkpoint.boundary >= 8, "phoenix")
        for node in harness.cluster.nodes:
            harness.cluster.remove_node(node.name)
    manifest = read_checkpoint(str(target / "phoenix"))
    assert 8 <= manifest.checkpoint.boundary <= 16
    child = replace(manifest.spec, job=replace(spec.job, name="child"))
    async with fault_harness(tmp_path / "two", num_nodes=2, num_spares=0) as harness:
        for again in (manifest.spec, child):
            await submit(harness.session, again, checkpoint=begin_with(manifest), generation=manifest.generation)
            outcome = await harness.wait(again)
            outcome.assert_exact(oracle, strikes=0)
            assert outcome.job.submission is not None
            assert outcome.job.submission.parent == f"phoenix, boundary {manifest.checkpoint.boundary}"
