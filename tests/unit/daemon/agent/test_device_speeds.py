"""A node's device speeds: measured once, remembered, reported in steps."""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from headway.daemon.agent import profiling
from headway.daemon.agent.profiling import FILE, DeviceSpeeds, stepped
from headway.daemon.cluster.measurements import DeviceSpeed
from headway.daemon.cluster.records import Device, NodeRecord
from headway.daemon.decide.outlook import as_fast_as_their_like
from headway.daemon.plan.layer_costs import CPU_BYTES_PER_S
from headway.daemon.worker import device as device_module
from headway.daemon.worker.device import flops_per_s, measure_speed, speed
from headway.daemon.worker.goal import Heartbeat
from tests.rigs.clusters import job, node, planned

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
    """On one thread, as in a worker: within a factor of twenty of the reference on anything that runs this test.

    A CPU that emulates bfloat16 is slower than that in it, and still has a number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = measure_speed(torch.device("cpu"))
    finally:
        torch.set_num_threads(before)
    assert 0.05 < measured.float32 < 20.0
    assert 0.001 < measured.bfloat16 < 20.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_of_random_numbers(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A card draws less power for constant ones, and would promise a clock that no job holds. Nobody else's numbers
    change."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "mm", lambda *factors, **_: seen.extend(factors))
    before = torch.get_rng_state()
    device_module._products(torch.device("cpu"), dtype)
    assert all(tensor.dtype is dtype and len(set(tensor.flatten().tolist())) > 100 for tensor in seen[:2])
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("flops", "sizes"), [(50e9, [64, 256]), (0.1e9, [64])])
def test_a_product_that_would_take_too_long_is_estimated(flops: float, sizes: list[int]) -> None:
    """The smaller product comes first: at 0.1 GFLOP/s one of 256 rows would take 0.34 s, and is left out."""
    asked: list[int] = []

    def seconds_of(size: int, within_s: float) -> float:
        asked.append(size)
        assert (within_s > 0) is (size == 256)
        return 2.0 * size**3 / flops

    rate, size = flops_per_s(seconds_of, 256)
    assert rate == pytest.approx(flops)
    assert (asked, size) == (sizes, sizes[-1])


def test_a_device_that_lacks_a_dtype_has_no_speed_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old card refuses products in bfloat16: its float32 speed is known all the same."""

    def products(_: torch.device, dtype: torch.dtype) -> float:
        if dtype is torch.bfloat16:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return 2.0

    monkeypatch.setattr(device_module, "_products", products)
    monkeypatch.setattr(device_module, "_bytes_per_s", lambda _: CPU_BYTES_PER_S)
    assert measure_speed(torch.device("cpu")) == DeviceSpeed(float32=speed(2.0, 1.0), bfloat16=0.0)


async def test_what_a_worker_measured_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat has it → the device has it, and so it is after a restart; another torch is measured anew."""
    monkeypatch.setattr(profiling, "SPEEDS_PERIOD_S", 0.0)
    speeds = DeviceSpeeds(tmp_path, arithmetic_class="torch one")
    assert not speeds.knows(DEVICE)
    told: list[tuple[Device, ...]] = []
    beats = {0: Heartbeat(speed=DeviceSpeed(float32=2.02, bfloat16=0.31))}
    await asyncio.wait_for(speeds.follow([DEVICE], lambda: beats, told.append), timeout=30)
    assert told == [(replace(DEVICE, speed=stepped(2.02), bfloat16_speed=stepped(0.31)),)]
    again = DeviceSpeeds(tmp_path, arithmetic_class="torch one")
    assert again.of([DEVICE]) == told[0]
    assert not DeviceSpeeds(tmp_path, arithmetic_class="torch two").knows(DEVICE)


def test_a_file_of_float32_alone_counts_until_bfloat16_is_measured(tmp_path: Path) -> None:
    """An earlier version wrote it. The next measurement has both; a worker that lacks one dtype tells no news twice."""
    (tmp_path / FILE).write_text(json.dumps({"cpu fast one torch one": 2.144}))
    speeds = DeviceSpeeds(tmp_path, arithmetic_class="torch one")
    assert speeds.of([DEVICE]) == (replace(DEVICE, speed=2.144),)
    assert not speeds.knows(DEVICE)
    assert speeds.learn(DEVICE, DeviceSpeed(float32=1.0))
    assert not speeds.learn(DEVICE, DeviceSpeed(float32=1.2))
    assert not speeds.knows(DEVICE)
    assert speeds.learn(DEVICE, DeviceSpeed(float32=1.2, bfloat16=0.5))
    assert speeds.knows(DEVICE)
    assert speeds.of([DEVICE]) == (replace(DEVICE, speed=1.0, bfloat16_speed=stepped(0.5)),)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_asks_for_the_speed_in_the_jobs_own_dtype(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 4090 has the float32 of an H100 and a quarter of its bfloat16: most layers are where the job runs faster."""
    monkeypatch.setattr(profiling, "SPEEDS_PERIOD_S", 0.0)
    measured = {
        "NVIDIA GeForce RTX 4090": DeviceSpeed(float32=1.9, bfloat16=0.5, memory_gb_s=1000.0),
        "NVIDIA H100": DeviceSpeed(float32=1.4, bfloat16=2.0, memory_gb_s=1000.0),
    }
    nodes = []
    for name, (model, measure) in zip("ab", measured.items(), strict=True):
        device = Device(kind="cuda", model=model)
        speeds = DeviceSpeeds(tmp_path, arithmetic_class=name)
        beat = Heartbeat(speed=measure)
        told: list[tuple[Device, ...]] = []
        asyncio.run(_told_once(speeds, device, beat, told))
        nodes.append(replace(node(name), devices=told[0]))
    found = as_fast_as_their_like(nodes).values()
    plan = planned(job(num_blocks=24, dtype=dtype, sequence_length=512), found)
    layers = {stage.node: len(stage.layers) for stage in plan.workers}
    assert (layers.get("a", 0) > layers.get("b", 0)) is (dtype == "float32")


async def _told_once(speeds: DeviceSpeeds, device: Device, beat: Heartbeat, told: list[tuple[Device, ...]]) -> None:
    await asyncio.wait_for(speeds.follow([device], lambda: {0: beat}, told.append), timeout=30)


def test_a_card_is_measured_once_its_memory_is(tmp_path: Path) -> None:
    """Its bandwidth has a time of its own in plans. On a CPU it is a part of the speeds."""
    card, speeds = Device(kind="cuda", model="card"), DeviceSpeeds(tmp_path, arithmetic_class="one")
    assert speeds.learn(card, DeviceSpeed(float32=1.0, bfloat16=1.0))
    assert not speeds.knows(card)
    assert speeds.learn(card, DeviceSpeed(float32=1.0, bfloat16=1.0, memory_gb_s=2800.0))
    assert speeds.knows(card)
    assert speeds.of([card])[0].memory_gb_s == stepped(2800.0)


def test_a_damaged_file_is_measured_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    speeds = DeviceSpeeds(tmp_path, arithmetic_class="one")
    assert speeds.of([DEVICE]) == (DEVICE,)


def test_devices_of_one_model_are_as_fast_as_the_fastest_of_them() -> None:
    """In each dtype; a model that does not name itself is like no other."""

    def of(name: str, model: str, speed: float, bfloat16_speed: float) -> NodeRecord:
        device = Device(kind="cpu", model=model, speed=speed, bfloat16_speed=bfloat16_speed)
        return replace(node(name), devices=(device,))

    nodes = [of("a", "x", 1.0, 2.0), of("b", "x", 1.1, 0.0), of("c", "y", 0.5, 0.0), of("d", "", 0.7, 0.1)]
    nodes.append(of("e", "", 2.0, 3.0))
    found = {name: each.devices[0] for name, each in as_fast_as_their_like(nodes).items()}
    speeds = {name: (device.speed, device.bfloat16_speed) for name, device in found.items()}
    assert speeds == {"a": (1.1, 2.0), "b": (1.1, 2.0), "c": (0.5, 0.0), "d": (0.7, 0.1), "e": (2.0, 3.0)}


@pytest.mark.parametrize("speed_told", [float("inf"), float("nan"), 1e308, 5e-324, -1.0])
def test_an_impossible_measurement_is_none(tmp_path: Path, speed_told: float) -> None:
    """Other nodes set aside a node that says it, so it must not get into this node's record or its file."""
    speeds = DeviceSpeeds(tmp_path, arithmetic_class="one")
    assert not speeds.learn(DEVICE, DeviceSpeed(float32=speed_told, bfloat16=speed_told))
    assert speeds.of([DEVICE]) == (DEVICE,)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("kept", [0.0, -3.0, 1e308])
def test_an_impossible_speed_in_the_file_is_measured_again(tmp_path: Path, kept: float) -> None:
    """The other dtype's speed stays."""
    key = f"{DEVICE.kind} {DEVICE.model} one"
    (tmp_path / FILE).write_text(json.dumps({key: kept, f"bfloat16 {key}": 2.0}))
    speeds = DeviceSpeeds(tmp_path, arithmetic_class="one")
    assert speeds.of([DEVICE]) == (replace(DEVICE, bfloat16_speed=2.0),)
    assert not speeds.knows(DEVICE)


def test_a_very_slow_device_has_a_speed() -> None:
    """0 would say that it was not measured."""
    assert stepped(1e-5) > 0
