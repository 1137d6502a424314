"""Parts that tests of replicas share."""

from dataclasses import replace
from typing import Any, Literal

from headway.daemon.jobs.job import FaultSpec, JobSpec, PlacementSpec
from tests.integration.exactness.training import small_job
from tests.rigs.fault_harness import SNAPSHOT_EVERY

SNAPSHOTS = FaultSpec(snapshot_every=SNAPSHOT_EVERY, copies=2, checkpoint_every=0, link_timeout_s=20.0)


def replicated_job(
    name: str,
    *shape: int,
    reduction_groups: int = 4,
    share_updates: Literal["auto", "always", "never"] = "always",
    **train: Any,
) -> JobSpec:
    """A job whose stages have so many workers, which share their updates."""
    spec = small_job(name, reduction_groups=reduction_groups, **train)
    return replace(spec, fault=SNAPSHOTS, placement=PlacementSpec(replicas=shape, share_updates=share_updates))
