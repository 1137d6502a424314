"""A journal whose old rows lie in the checkpoint folder: a long job, paused, moved elsewhere and continued."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.blobs.checkpoint_names import part_name
from headway.daemon.client.checkpoint_folder import begin_with, read_checkpoint
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import pause, resume, submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.lineage import MIN_ROWS
from headway.daemon.cluster.records import Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import FaultSpec, PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from headway.stages.state.state_file import read_state
from tests.integration.exactness.training import TIMEOUT_S, finished, small_job, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BATCHES = MIN_ROWS + 400
EVERY = 128
LONG_S = 240.0


def has_part(_: ClusterView, job: JobView) -> bool:
    """A checkpoint has closed a part, and the next one is there."""
    checkpoint = job.checkpoint
    return (
        checkpoint is not None
        and bool(checkpoint.journal_parts)
        and checkpoint.boundary > checkpoint.journal_parts[-1].boundary
    )


@pytest.mark.asyncio(loop_scope="session")
async def test_every_row_is_shown_and_none_is_kept_twice(cluster: LocalCluster, tmp_path: Path) -> None:
    """Old rows leave the snapshots when a checkpoint has them. A pause, and a new job from a copied folder, keep all.

    The part is written once, next to the checkpoints; the child copies it to its own folder, and no longer needs the
    parent's.
    """
    folder = tmp_path / "checkpoints"
    fault = FaultSpec(snapshot_every=32, checkpoint_every=EVERY, checkpoint_dir=str(folder))
    spec = small_job("long", batches=BATCHES, microbatches=2, sequence_length=8)
    spec = replace(
        spec,
        model=replace(spec.model, num_hidden_layers=1),
        fault=fault,
        placement=PlacementSpec(min_nodes=2, max_nodes=2),
    )
    async with ClusterSession(cluster.address) as session:
        await submit(session, spec)
        await until(session, has_part, "long", timeout_s=LONG_S)
        await pause(session, "long")
        await wait_for_phase(session, "long", frozenset({Phase.PAUSED}), timeout_s=TIMEOUT_S)
        await resume(session, "long")
        result = await finished(session, "long", tmp_path / "out", timeout_s=LONG_S)
        assert len(result.losses) == BATCHES
        manifest = read_checkpoint(str(folder / "long"))
        [part] = manifest.checkpoint.journal_parts
        rows = read_state(Path(manifest.checkpoint.url) / "journal.safetensors")[1]["batch"].tolist()
        assert rows == list(range(part.boundary, BATCHES))

        moved = tmp_path / "moved"
        shutil.move(folder / "long", moved)
        elsewhere = read_checkpoint(str(moved))
        child = replace(
            spec, job=replace(spec.job, name="child"), train=replace(spec.train, batches=BATCHES + EVERY + 10)
        )
        await submit(session, child, checkpoint=begin_with(elsewhere), generation=elsewhere.generation)
        longer = await finished(session, "child", tmp_path / "out of the child")
        assert longer.losses[:BATCHES] == result.losses
        assert len(longer.losses) == BATCHES + EVERY + 10
        copied = list((folder / "child").glob(f"*/journal/{part_name(*part.place)}"))
        assert [path.read_bytes() for path in copied] == [
            path.read_bytes() for path in moved.glob(f"*/journal/{part_name(*part.place)}")
        ]
        shutil.rmtree(moved)
        again = await finished(session, "child", tmp_path / "out once more")
        assert again.losses == longer.losses
