"""Keeps the speeds of a node's devices: measured once by an idle worker, remembered in the state folder.

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

from headway.daemon.records.records import Device
from headway.proto import control_pb2

log = structlog.get_logger()

FILE: Final = "device-speeds.json"
STEP: Final = 1.1
PERIOD_S: Final = 2.0


def stepped(speed: float) -> float:
    """Round to the nearest step."""
    return round(STEP ** round(math.log(speed) / math.log(STEP)), 3)


class DeviceSpeeds:
    """The measured speeds, by device model and arithmetic class; a damaged file leads to another measurement."""

    def __init__(self, directory: Path, *, arithmetic_class: str) -> None:
        """arithmetic_class: of devices that do not say theirs. It contains the torch version, whose kernels determine
        the speed.
        """
        self._path = directory / FILE
        self._class = arithmetic_class
        self._known: dict[str, float] = {}
        try:
            self._known = msgspec.json.decode(self._path.read_bytes(), type=dict[str, float])
        except (OSError, ValueError):
            log.info("device_speeds_unknown", path=str(self._path))

    def of(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return the devices with their known speeds."""
        return tuple(
            replace(device, speed=self._known[key]) if (key := self._key(device)) in self._known else device
            for device in devices
        )

    def knows(self, device: Device) -> bool:
        """Return whether nothing is left to measure."""
        return self._key(device) in self._known

    def learn(self, device: Device, speed: float) -> None:
        """Remember a measurement. If the folder cannot be written, the next start measures again."""
        self._known[self._key(device)] = stepped(speed)
        log.info("device_measured", device=device.model, speed=self._known[self._key(device)])
        try:
            self._path.write_text(json.dumps(self._known, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            log.warning("device_speed_not_kept", path=str(self._path), reason=error.strerror)

    async def follow(
        self,
        devices: Sequence[Device],
        heartbeats: Callable[[], Mapping[int, control_pb2.Heartbeat]],
        tell: Callable[[tuple[Device, ...]], None],
    ) -> None:
        """Learn the workers' measurements and report the devices' speeds, until all are known."""
        while not all(map(self.knows, devices)):
            await asyncio.sleep(PERIOD_S)
            for index, beat in heartbeats().items():
                if beat.device_speed > 0 and not self.knows(devices[index]):
                    self.learn(devices[index], beat.device_speed)
                    tell(self.of(devices))

    def _key(self, device: Device) -> str:
        return f"{device.kind} {device.model} {device.arithmetic_class or self._class}"
