"""A node's device speeds: measured once, remembered, reported in steps."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from headway.daemon.records.records import Device, NodeRecord
from headway.daemon.situation.outlook import as_fast_as_their_like
from headway.daemon.telemetry.device_speeds import FILE, DeviceSpeeds, stepped
from headway.daemon.worker.benchmark import measure_speed, speed
from headway.proto.control_pb2 import Heartbeat

DEVICE = Device(kind="cpu", model="fast one")


def test_speeds_are_told_in_steps_of_a_tenth() -> None:
    """A few percent of noise are no difference, twice is."""
    assert stepped(1.0) == stepped(1.03) == stepped(0.97) == 1.0
    assert stepped(2.0) == pytest.approx(2.0, rel=0.05)
    steps = sorted({stepped(0.1 + index / 100) for index in range(1000)})
    assert all(1.09 < upper / lower < 1.11 for lower, upper in pairwise(steps))


def test_products_weigh_more_than_memory() -> None:
    assert speed(1.0, 1.0) == pytest.approx(1.0)
    assert speed(2.0, 1.0) > 1.5 > speed(1.0, 2.0) > 1.0


def test_a_benchmark_is_quick_and_says_something() -> None:
    """On one thread, as in a worker: within a factor of twenty of the reference on anything that runs this test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert 0.05 < measure_speed(torch.device("cpu")) < 20.0
    finally:
        torch.set_num_threads(before)


async def test_what_a_worker_measured_is_told_and_kept(tmp_path: Path) -> None:
    """The heartbeat has it → the device has it, and so it is after a restart; another torch is measured anew."""
    speeds = DeviceSpeeds(tmp_path, arithmetic_class="torch one")
    assert not speeds.knows(DEVICE)
    told: list[tuple[Device, ...]] = []
    beats = {0: Heartbeat(device_speed=2.02)}
    await asyncio.wait_for(speeds.follow([DEVICE], lambda: beats, told.append), timeout=30)
    assert told == [(replace(DEVICE, speed=stepped(2.02)),)]
    again = DeviceSpeeds(tmp_path, arithmetic_class="torch one")
    assert again.of([DEVICE]) == told[0]
    assert not DeviceSpeeds(tmp_path, arithmetic_class="torch two").knows(DEVICE)


def test_a_damaged_file_is_measured_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    speeds = DeviceSpeeds(tmp_path, arithmetic_class="one")
    assert speeds.of([DEVICE]) == (DEVICE,)


def test_devices_of_one_model_are_as_fast_as_the_fastest_of_them() -> None:
    def node(name: str, model: str, speed: float) -> NodeRecord:
        return NodeRecord(
            name=name,
            incarnation="",
            address="",
            host="",
            site="",
            devices=(Device(kind="cpu", model=model, speed=speed),),
            memory_bytes=0,
            arithmetic_class="",
        )

    nodes = [node("a", "x", 1.0), node("b", "x", 1.1), node("c", "y", 0.5), node("d", "", 0.7), node("e", "", 2.0)]
    speeds = {name: found.devices[0].speed for name, found in as_fast_as_their_like(nodes).items()}
    assert speeds == {"a": 1.1, "b": 1.1, "c": 0.5, "d": 0.7, "e": 2.0}
