"""Writes the workers' measurements of their layers from heartbeats to etcd, when they have changed."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import structlog

from headway.daemon.costs.devices import faded, measured_demand
from headway.daemon.errors import ConflictError, LeaseLostError, StoreError
from headway.daemon.etcd.client import EtcdClient
from headway.daemon.etcd.transaction import Compare, Put
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import LayerTime, ProfileRecord
from headway.daemon.records.records import NodeRecord
from headway.daemon.situation.outlook import LEAST_SAMPLES
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView
from headway.daemon.workers.goal import Heartbeat

log = structlog.get_logger()

PERIOD_S: Final = 1.0
PAUSE_S: Final = 5.0
"""Interval of records of one device."""
MOVED: Final = 0.05
"""A value that differs by more, relatively, has changed."""
NEGLIGIBLE: Final = 0.01
"""A smaller change, as a share of one layer of each kind together, changes no plan."""


def profile_of(beat: Heartbeat) -> ProfileRecord:
    """Return a heartbeat's measurements, to three digits."""
    return ProfileRecord(
        generation=beat.generation,
        layers={
            kind: LayerTime(
                forward_s=_rounded(times.forward_s),
                backward_s=_rounded(times.backward_s),
                update_s=_rounded(times.update_s),
                spread=_rounded(times.spread),
            )
            for kind, times in sorted(beat.layers.items())
        },
        peak_bytes=beat.peak_bytes,
        num_samples=beat.num_samples,
        replan_s=_rounded(beat.replan_s),
    )


def has_moved(before: ProfileRecord | None, after: ProfileRecord) -> bool:
    """Return whether a profile has news. Plans ask under which plan it was measured."""
    if before is None or before.layers.keys() != after.layers.keys() or before.replan_s != after.replan_s:
        return True
    if before.generation != after.generation or before.num_samples < LEAST_SAMPLES <= after.num_samples:
        return True
    whole_s = sum(times.forward_s + times.backward_s for times in after.layers.values())
    for kind, times in after.layers.items():
        old = before.layers[kind]
        pairs = (
            (old.forward_s, times.forward_s),
            (old.backward_s, times.backward_s),
            (old.update_s, times.update_s),
        )
        if any(_differs(one, other) and abs(one - other) > NEGLIGIBLE * whole_s for one, other in pairs):
            return True
    return _differs(before.peak_bytes, after.peak_bytes) or _differs(before.demand, after.demand)


def with_demand(record: ProfileRecord, job: JobView, node: NodeRecord | None, index: int) -> ProfileRecord:
    """Return a profile with the plan's estimate of its peak, and the factor for plans to come on this device.

    What an earlier plan has shown stays for a while, because the next plan may have its cut again.
    """
    if node is None or index >= len(node.devices):
        return record
    device, before = node.devices[index], job.profiles.get((node.name, index))
    plan = job.plan if job.plan is not None and job.plan.generation == record.generation else None
    mine = [each for each in (plan.workers if plan else ()) if (each.node, each.device_index) == (node.name, index)]
    predicted = mine[0].device_bytes if mine else 0
    demand = measured_demand(record.peak_bytes, predicted, usable_bytes=device.usable_bytes)
    record = replace(record, predicted_bytes=predicted, device_kind=device.kind, device_model=device.model)
    return replace(record, demand=max(demand, _still_remembered(before, record)))


def _still_remembered(before: ProfileRecord | None, record: ProfileRecord) -> float:
    """Return what is left of the earlier factor. Each plan whose peak was measured halves its excess once: a single
    odd peak would otherwise count for the job's whole life.
    """
    if before is None:
        return 1.0
    was_counted = before.generation == record.generation and before.num_samples >= LEAST_SAMPLES
    is_measured = record.peak_bytes > 0 and record.predicted_bytes > 0 and record.num_samples >= LEAST_SAMPLES
    return faded(before.demand) if is_measured and not was_counted else before.demand


class ProfileReports:
    """`run` writes changes: each device's record once in `PAUSE_S` at most."""

    def __init__(self, view: ClusterView, etcd: EtcdClient, *, node: str, lease_id: Callable[[], int]) -> None:
        self._view = view
        self._etcd = etcd
        self._node = node
        self._lease_id = lease_id
        self._rests_until: dict[str, float] = {}

    async def run(self, heartbeats: Callable[[], Mapping[int, Heartbeat]]) -> None:
        """Write until cancelled. heartbeats: the newest of each worker, by device index."""
        while True:
            await asyncio.sleep(PERIOD_S)
            now = time.monotonic()
            self._rests_until = {key: at for key, at in self._rests_until.items() if at > now}
            for index, beat in heartbeats().items():
                job = self._view.jobs.get(beat.job)
                if job is not None and job.submission is not None and beat.layers:
                    record = with_demand(profile_of(beat), job, self._view.nodes.get(self._node), index)
                    await self._write(job, index, record, now)

    async def _write(self, job: JobView, index: int, record: ProfileRecord, now: float) -> None:
        """Write the profiles; a record that etcd does not take now is retried after the pause."""
        key = Keys.profile(job.name, self._node, index)
        if key in self._rests_until or not has_moved(job.profiles.get((self._node, index)), record):
            return
        self._rests_until[key] = now + PAUSE_S
        spec = Keys.of(job.name, "spec")
        condition = Compare.unchanged(spec, self._view.revision_of(spec))
        try:
            await self._etcd.transaction([condition], [Put(key, encode(record), self._lease_id())])
        except (ConflictError, LeaseLostError):
            return
        except StoreError as error:
            log.warning("profile_not_written", job=job.name, error=str(error))


def _differs(one: float, other: float) -> bool:
    return abs(one - other) > MOVED * max(abs(one), abs(other))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.3g}")
