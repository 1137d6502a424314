"""What a worker measures of its layers: the right layer's seconds, at next to no cost, without moving a bit."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from statistics import median
from timeit import repeat
from typing import ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

from headway.stages.data.microbatch import Microbatch
from headway.stages.device.cpu import CpuDevice, CpuMark
from headway.stages.device.device import StageDevice
from headway.stages.ids import LayerName
from headway.stages.model.decoder import build_layer
from headway.stages.stage.graph import StageGraph
from headway.stages.state.journal import Journal
from headway.stages.state.layer_state import LayerState
from headway.stages.telemetry.layer_times import (
    MICROBATCHES_PER_SAMPLE,
    NUM_EARLY,
    SECONDS_PER_SAMPLE,
    UPDATES_PER_SAMPLE,
    WINDOW,
    LayerTimes,
    Sample,
)
from tests.rigs.pipeline import MODEL, TRAIN, Pipeline, factory_of, initial_layers, make_job

CPU = CpuDevice()
FORWARD_S, BACKWARD_S = 0.004, 0.008


class Slow(torch.autograd.Function):
    """The identity, at its own pace both ways."""

    slept_s: ClassVar[dict[float, list[float]]] = {FORWARD_S: [], BACKWARD_S: []}
    """What each pause came to: a busy machine wakes a thread late."""

    @classmethod
    def pause(cls, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        cls.slept_s[seconds].append(time.perf_counter() - began)

    @staticmethod
    def forward(_context: object, hidden: Tensor) -> Tensor:
        Slow.pause(FORWARD_S)
        return hidden.clone()

    @staticmethod
    def backward(_context: object, gradient: Tensor) -> Tensor:
        Slow.pause(BACKWARD_S)
        return gradient.clone()


class SlowBlock(nn.Module):
    """A block that takes its time, under the names of a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, part in block.named_children():
            self.add_module(name, part)
        self._forward = block.forward

    def forward(self, hidden: Tensor) -> Tensor:
        return self._forward(Slow.apply(hidden))  # type: ignore[no-any-return, no-untyped-call]


def whole_model(recompute: str, times: LayerTimes | None) -> StageGraph:
    job = make_job(replace(TRAIN, recompute=recompute, batches=NUM_EARLY + 1))  # type: ignore[arg-type]
    layers = [
        LayerState.initial(
            LayerName(name), job.model, job.train, seed=7, device="cpu", optimizer_factory=factory_of(job)
        )
        for name in job.layers
    ]
    return StageGraph(layers, job.model, job.train, is_first=True, is_last=True, times=times)


def names() -> tuple[str, ...]:
    return ("embed", *(f"block.{k}" for k in range(MODEL.num_hidden_layers)), "head")


def tokens(seed: int) -> Tensor:
    shape = (TRAIN.microbatch_size, TRAIN.sequence_length)
    return torch.randint(MODEL.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def train(graph: StageGraph, num_batches: int, updates_s: list[float] | None = None) -> list[Tensor]:
    """Batches of one microbatch, without delay; the losses and all gradients. updates_s: gets the time of updates."""
    seen = []
    for batch in range(num_batches):
        loss = graph.forward((batch, 0), Microbatch(tokens(batch), tokens(batch + 1)), version=batch)
        gradients, _ = graph.backward((batch, 0), None)
        seen += [loss, *(gradient.clone() for gradient in gradients)]
        began = time.perf_counter()
        graph.update(batch, gradients)
        if updates_s is not None:
            updates_s.append(time.perf_counter() - began)
    return seen


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_the_slow_layers_are_the_ones_that_take_long(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that sleep → a block takes that long, each way; embedding and head do not; nobody knows before a sample.

    A block that is computed again takes its forward a second time in its backward.
    """

    def build_slow(name: str, *args: object, **kwargs: object) -> nn.Module:
        layer = build_layer(name, *args, **kwargs)  # type: ignore[arg-type]
        return SlowBlock(layer) if name.startswith("block.") else layer

    monkeypatch.setattr("headway.stages.stage.graph.build_layer", build_slow)
    times = LayerTimes(names(), CPU)
    graph = whole_model(recompute, times)
    train(graph, 1)
    assert not times.measured.layers
    graph = whole_model(recompute, times)
    updates_s: list[float] = []
    train(graph, NUM_EARLY, updates_s)
    measured = times.measured
    assert set(measured.layers) == {"embed", "block", "head"}
    assert (measured.num_samples, measured.peak_bytes) == (NUM_EARLY, 0)
    block = measured.layers["block"]
    backward_s = BACKWARD_S + (FORWARD_S if recompute == "block" else 0.0)
    forward_slept_s, backward_slept_s = (median(Slow.slept_s[each]) for each in (FORWARD_S, BACKWARD_S))
    backward_slept_s += forward_slept_s if recompute == "block" else 0.0
    assert FORWARD_S <= block.forward_s < 3 * forward_slept_s
    assert backward_s <= block.backward_s < 3 * backward_slept_s
    for kind in ("embed", "head"):
        other = measured.layers[kind]
        assert 0 < other.forward_s < forward_slept_s
        assert 0 < other.backward_s < backward_slept_s
    assert all(0 < layer.update_s < max(updates_s) for layer in measured.layers.values())


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_being_timed_moves_no_bit(recompute: str) -> None:
    """The same batches with every early one timed, and without → equal losses and gradients."""
    times = LayerTimes(names(), CPU)
    num_batches = NUM_EARLY + 1
    timed = train(whole_model(recompute, times), num_batches)
    plain = train(whole_model(recompute, None), num_batches)
    assert times.measured.num_samples == NUM_EARLY
    for one, other in zip(timed, plain, strict=True):
        assert torch.equal(one, other)


def test_every_layer_is_timed_once_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampled microbatch of a stage → each layer once forward, from the first, and once backward, from the last."""
    seen: list[Sample] = []
    times = LayerTimes(names(), CPU)
    monkeypatch.setattr(times, "finished", seen.append)
    train(whole_model("none", times), 2)
    microbatch, update = seen
    order = list(range(len(names())))
    assert [layer for layer, _, _ in microbatch.spans["forward"]] == order
    assert [layer for layer, _, _ in microbatch.spans["backward"]] == order[::-1]
    assert [layer for layer, _, _ in update.spans["update"]] == order
    for spans in (microbatch.spans["forward"], microbatch.spans["backward"], update.spans["update"]):
        assert all(one[2] == other[1] for one, other in pairwise(spans))


def sampled(times: LayerTimes, what: str, how_many: int) -> list[int]:
    ask = times.microbatch if what == "microbatch" else times.update
    return [number for number in range(how_many) if ask() is not None]


def test_few_microbatches_and_updates_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a start the first of each is left out, the next ones are timed, then one in so many."""
    monkeypatch.setattr("headway.stages.telemetry.layer_times.perf_counter", lambda: 1.0)
    times = LayerTimes(names(), CPU)
    early = list(range(1, NUM_EARLY + 1))
    assert sampled(times, "microbatch", 2 * MICROBATCHES_PER_SAMPLE + 1) == [
        *early, MICROBATCHES_PER_SAMPLE, 2 * MICROBATCHES_PER_SAMPLE
    ]  # fmt: skip
    assert sampled(times, "update", 2 * UPDATES_PER_SAMPLE + 1) == [*early, UPDATES_PER_SAMPLE, 2 * UPDATES_PER_SAMPLE]


@pytest.mark.parametrize("what", ["microbatch", "update"])
def test_where_they_are_slow_each_one_is_timed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes twice the interval → all but the first are timed."""
    times, now = LayerTimes(names(), CPU), 0.0
    monkeypatch.setattr("headway.stages.telemetry.layer_times.perf_counter", lambda: now)
    found = []
    for number in range(3 * NUM_EARLY):
        found += [number for _ in sampled(times, what, 1)]
        now += 2 * SECONDS_PER_SAMPLE
    assert found == list(range(1, 3 * NUM_EARLY))


def tell(times: LayerTimes, what: str, seconds: float) -> None:
    """One sample that took each layer so long."""
    clock = iter(CpuMark(seconds * k) for k in range(100))
    sample = Sample(lambda: next(clock))
    for layer in range(len(names())):
        sample.ended(what, layer)
    times.finished(sample)


def test_a_median_follows_what_lasts() -> None:
    """One slow sample changes nothing; once most of the newest are slow, the layer is."""
    times = LayerTimes(names(), CPU)
    for what in ("forward", "backward", "update"):
        for seconds in [1.0, *[0.5] * (WINDOW - 2)]:
            tell(times, what, seconds)
    assert times.measured.layers["block"].forward_s == pytest.approx(0.5)
    for _ in range(WINDOW // 2):
        tell(times, "forward", 2.0)
    assert times.measured.layers["block"].forward_s == pytest.approx(0.5)
    tell(times, "forward", 2.0)
    block = times.measured.layers["block"]
    assert block.forward_s == pytest.approx(2.0)
    assert block.backward_s == pytest.approx(0.5)


def test_what_is_not_timed_costs_next_to_nothing() -> None:
    """Asking whether to time a microbatch takes less than 0.3 % of a microbatch of a millisecond."""
    times = LayerTimes(names(), CPU)
    calls = 1000
    seconds = min(repeat(times.microbatch, number=calls, repeat=20)) / calls
    assert seconds < 0.003 * 1e-3


def test_every_stage_of_a_pipeline_knows_its_layers() -> None:
    """A run of two stages → the first has measured the embedding and blocks, the last one blocks and the head."""
    job = make_job()
    pipeline = Pipeline(job, initial_layers(job), Journal(), num_stages=2)
    pipeline.run()
    kinds = [set(loop.executor.layer_times.measured.layers) for loop in pipeline.loops]
    assert kinds == [{"embed", "block"}, {"block", "head"}]


class HungAllocator:
    """A device whose allocator answers the computing thread alone: it is hung for any other."""

    def __init__(self) -> None:
        self.mark = CPU.mark
        self._computing = threading.get_ident()

    def begin_peak(self) -> None: ...

    @property
    def peak_bytes(self) -> int:
        assert threading.get_ident() == self._computing, "a heartbeat would wait for the card"
        return 1000


def test_a_heartbeat_never_asks_the_device() -> None:
    """The computing thread keeps the peak with each sample; another thread reads it, whatever the card does."""
    times = LayerTimes(names(), cast(StageDevice, HungAllocator()))
    train(whole_model("none", times), NUM_EARLY)
    with ThreadPoolExecutor(1) as heartbeat:
        assert heartbeat.submit(lambda: times.measured.peak_bytes).result(timeout=20) == 1000


def test_blocks_that_are_computed_again_are_another_kind() -> None:
    """Each stage computes another part again → its blocks are known by that, the embedding and the head as always."""
    job = make_job()
    pipeline = Pipeline(job, initial_layers(job), Journal(), num_stages=2, recompute=("attention", "block"))
    pipeline.run()
    kinds = [set(loop.executor.layer_times.measured.layers) for loop in pipeline.loops]
    assert kinds == [{"embed", "block+attention"}, {"block+block", "head"}]
