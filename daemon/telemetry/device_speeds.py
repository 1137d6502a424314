"""Keeps the speeds of a node's devices: measured once by an idle worker, remembered in the state folder.

Each dtype of jobs has its own speed. A file that has float32 alone is of an earlier version: the devices count by it
until they are measured again.

Speeds are rounded to a tenth, so that a benchmark's noise makes no difference between two machines.
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

from headway.daemon.records.measurements import DeviceSpeed, is_speed
from headway.daemon.records.records import Device
from headway.daemon.workers.goal import Heartbeat

log = structlog.get_logger()

FILE: Final = "device-speeds.json"
BFLOAT16: Final = "bfloat16 "
"""Prefix of the file's keys for bfloat16; without it they are for float32."""
STEP: Final = 1.1
LEAST_STEP: Final = 0.001
PERIOD_S: Final = 2.0


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
        return {self._key(device), BFLOAT16 + self._key(device)} <= self._known.keys()

    def learn(self, device: Device, speed: DeviceSpeed) -> bool:
        """Remember a measurement; return whether it is news. If the folder cannot be written, the next start measures
        again.
        """
        key = self._key(device)
        measured = {key: speed.float32, BFLOAT16 + key: speed.bfloat16}
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
            await asyncio.sleep(PERIOD_S)
            for index, beat in heartbeats().items():
                speed = DeviceSpeed(float32=beat.device_speed, bfloat16=beat.device_bfloat16_speed)
                if not self.knows(devices[index]) and self.learn(devices[index], speed):
                    tell(self.of(devices))

    def _told(self, device: Device) -> Device:
        """Return the device with its known speeds."""
        key = self._key(device)
        return replace(
            device,
            speed=self._known.get(key, device.speed),
            bfloat16_speed=self._known.get(BFLOAT16 + key, device.bfloat16_speed),
        )

    def _key(self, device: Device) -> str:
        return f"{device.kind} {device.model} {device.arithmetic_class or self._class}"
