"""What workers measure: the times of their layers, and the speeds of idle devices.

Speeds are measured once and remembered in the state folder, one for each dtype of jobs. They are rounded to a tenth, so
that a benchmark's noise makes no difference between two machines. A file that has float32 alone is of an earlier
version: the devices count by it until they are measured again.
"""

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import structlog

from headway.daemon.cluster.measurements import DeviceSpeed, LayerTime, ProfileRecord, is_speed
from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.outlook import LEAST_SAMPLES
from headway.daemon.plan.devices import faded, measured_demand
from headway.daemon.worker.goal import Heartbeat

log = structlog.get_logger()

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


def _differs(one: float, other: float) -> bool:
    return abs(one - other) > MOVED * max(abs(one), abs(other))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.3g}")


FILE: Final = "device-speeds.json"
BFLOAT16: Final = "bfloat16 "
MEMORY: Final = "memory "
"""Prefixes of the file's keys for bfloat16, and for a card's memory_gb_s; without one they are for float32."""
STEP: Final = 1.1
LEAST_STEP: Final = 0.001
SPEEDS_PERIOD_S: Final = 2.0


def stepped(speed: float) -> float:
    """Round to the nearest step; never to 0, which means not measured."""
    return max(round(STEP ** round(math.log(speed) / math.log(STEP)), 3), LEAST_STEP)


class DeviceSpeeds:
    """The measured speeds, by device model and arithmetic class; a damaged file, or an impossible speed in it, leads to
    another measurement."""

    def __init__(self, directory: Path, *, arithmetic_class: str) -> None:
        """arithmetic_class: of devices that do not say theirs. It contains the torch version, whose kernels determine
        the speed.
        """
        self._path = directory / FILE
        self._class = arithmetic_class
        self._known: dict[str, float] = {}
        self._heard: set[str] = set()
        """Keys that a worker of this daemon's life has measured."""
        try:
            told = msgspec.json.decode(self._path.read_bytes(), type=dict[str, float])
            self._known = {key: speed for key, speed in told.items() if is_speed(speed)}
        except (OSError, ValueError, RecursionError):
            log.info("device_speeds_unknown", path=str(self._path))

    def of(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return the devices with their known speeds."""
        return tuple(map(self._told, devices))

    def knows(self, device: Device) -> bool:
        """Return whether nothing is left to measure."""
        prefixes = ("", BFLOAT16, MEMORY) if device.kind == "cuda" else ("", BFLOAT16)
        return {prefix + self._key(device) for prefix in prefixes} <= self._known.keys()

    def learn(self, device: Device, speed: DeviceSpeed) -> bool:
        """Remember a measurement; return whether it is news. If the folder cannot be written, the next start measures
        again.
        """
        key = self._key(device)
        measured = {key: speed.float32, BFLOAT16 + key: speed.bfloat16, MEMORY + key: speed.memory_gb_s}
        news = {name: stepped(value) for name, value in measured.items() if is_speed(value) and name not in self._heard}
        if not news:
            return False
        self._heard |= news.keys()
        self._known |= news
        told = self._told(device)
        log.info("device_measured", device=device.model, speed=told.speed, bfloat16_speed=told.bfloat16_speed)
        try:
            self._path.write_text(json.dumps(self._known, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            log.warning("device_speed_not_kept", path=str(self._path), reason=error.strerror)
        return True

    async def follow(
        self,
        devices: Sequence[Device],
        heartbeats: Callable[[], Mapping[int, Heartbeat]],
        tell: Callable[[tuple[Device, ...]], None],
    ) -> None:
        """Learn the workers' measurements and report the devices' speeds, until all are known."""
        while not all(map(self.knows, devices)):
            await asyncio.sleep(SPEEDS_PERIOD_S)
            for index, beat in heartbeats().items():
                if not self.knows(devices[index]) and self.learn(devices[index], beat.speed):
                    tell(self.of(devices))

    def _told(self, device: Device) -> Device:
        """Return the device with its known speeds."""
        key = self._key(device)
        return replace(
            device,
            speed=self._known.get(key, device.speed),
            bfloat16_speed=self._known.get(BFLOAT16 + key, device.bfloat16_speed),
            memory_gb_s=self._known.get(MEMORY + key, device.memory_gb_s),
        )

    def _key(self, device: Device) -> str:
        return f"{device.kind} {device.model} {device.arithmetic_class or self._class}"
