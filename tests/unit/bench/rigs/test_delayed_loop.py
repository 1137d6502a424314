"""The simulator of delays: exact where Headway is, and by other arithmetic where it is not."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from rigs.delayed_loop import PARTS, Delays, Layer, part, part_of, pipedream, train, uniform, unstashed
from torch import Tensor, nn

from headway.daemon.jobs.job import JobSpec
from headway.daemon.local.reference_loop import Weights
from headway.stages.spec import ScheduleName
from headway.stages.state.journal import Journal
from tests.rigs.pipeline import (
    ADAMW,
    EF,
    MODEL,
    TRAIN,
    CountingTokens,
    Pipeline,
    assert_exact,
    cut,
    initial_layers,
    make_job,
    oracle,
)

ONE_PART = replace(TRAIN, microbatches=1, microbatch_size=4, batches=5)
JOBS = {
    "muon-ef": make_job(ONE_PART, EF),
    "muon-ef-clipped": make_job(replace(ONE_PART, clip_norm=0.05), EF),
    "adamw-no-clip": make_job(replace(ONE_PART, clip_norm=0.0), ADAMW),
}
DEEP = make_job(replace(ONE_PART, batches=3), EF, model=replace(MODEL, num_hidden_layers=16))
Ends = tuple[list[float], Weights]
"""Losses and final weights."""


def simulated(job: JobSpec, delays: Delays) -> Ends:
    losses: list[float] = []
    weights = train(job, CountingTokens(), delays, on_batch=losses.append)
    return losses, weights


def plain(job: JobSpec, schedule: ScheduleName) -> Ends:
    return oracle(replace(job, train=replace(job.train, schedule=schedule)))


def are_equal(some: Ends, others: Ends) -> bool:
    pairs = [zip(some[1][name].items(), others[1][name].items(), strict=True) for name in others[1]]
    return some[0] == others[0] and all(a == b and torch.equal(x, y) for each in pairs for (a, x), (b, y) in each)


@pytest.mark.parametrize("name", JOBS)
def test_delays_of_0_and_1_have_the_bits_of_the_plain_loop(name: str) -> None:
    assert are_equal(simulated(JOBS[name], uniform(0)), plain(JOBS[name], "1f1b"))
    assert are_equal(simulated(JOBS[name], uniform(1)), plain(JOBS[name], "2bw"))


@pytest.mark.parametrize(
    "wrong",
    [uniform(0), uniform(2), Delays((1, 1, 0)), Delays((2, 1, 1)), Delays((1,), 4), Delays((1,), is_stashed=False)],
    ids=str,
)
def test_another_version_on_any_stage_has_other_bits(wrong: Delays) -> None:
    """The comparison with the plain loop would see it."""
    job = JOBS["adamw-no-clip"]
    assert not are_equal(simulated(job, wrong), plain(job, "2bw"))


def test_a_part_that_is_late_with_no_delay_has_the_bits_of_no_delay() -> None:
    """Its layer has two optimizers then."""
    job = JOBS["muon-ef"]
    assert are_equal(simulated(job, Delays((0,), part="norms")), plain(job, "1f1b"))


def test_a_late_part_alone_meets_its_last_version() -> None:
    weights = [{"norm.weight": torch.zeros(1), "lm_head.weight": torch.zeros(1)} for _ in range(2)]
    layer = Layer("head", nn.Identity(), deque(weights), 0, part("norms"))
    met = layer.met(weights[0])
    assert met["norm.weight"] is weights[0]["norm.weight"]
    assert met["lm_head.weight"] is weights[1]["lm_head.weight"]


def test_each_parameter_is_of_one_part() -> None:
    _, weights = simulated(JOBS["muon-ef"], uniform(0))
    found = {part_of(name, each) for name, of in weights.items() for each in of}
    assert found == set(PARTS)
    ends = [simulated(JOBS["muon-ef"], delays)[0] for delays in (*map(part, PARTS), uniform(0), uniform(1))]
    assert len({*map(tuple, ends)}) == len(ends)


def test_stages_are_slices_as_those_of_the_real_pipeline() -> None:
    for num_stages in (1, 2, 3, 16):
        stages = [pipedream(num_stages).stage(index, len(DEEP.layers)) for index in range(len(DEEP.layers))]
        assert stages == [stage for stage, names in enumerate(cut(DEEP.layers, num_stages)) for _ in names]


def test_a_delay_of_1_has_the_same_bits_at_any_depth_of_the_real_pipeline() -> None:
    for num_stages in (2, 4, 8, 16):
        layers, journal = initial_layers(DEEP), Journal()
        Pipeline(DEEP, layers, journal, num_stages=num_stages).run()
        assert_exact(DEEP, layers, journal)
    assert are_equal(simulated(DEEP, uniform(1, 16)), oracle(DEEP))


def versions_of(num_stages: int, stage: int, microbatches: int) -> list[int]:
    """Updates that a stage has made at the forward of each part, by its operations in turn."""
    done, in_flight, met = 0, 0, []
    for _ in range(5 * microbatches):
        while in_flight == num_stages - stage:
            in_flight, done = in_flight - 1, done + 1
        met.append(done // microbatches)
        in_flight += 1
    return met


@pytest.mark.parametrize("microbatches", [1, 3, 8, 16])
def test_a_forward_meets_the_updates_that_its_stage_has_made(microbatches: int) -> None:
    """A stage begins a part when fewer than P − s are in flight, and updates after so many backwards."""
    for num_stages in (1, 2, 8):
        delays = unstashed(num_stages, microbatches)
        assert pipedream(num_stages).of_stages == delays.of_stages
        for stage in range(num_stages):
            met = [delays.met(batch, part, stage) for batch in range(5) for part in range(microbatches)]
            assert met == versions_of(num_stages, stage, microbatches)


def two_matrices(first: Sequence[Tensor], second: Sequence[Tensor], delays: Delays) -> Layer:
    """A layer y = B·A·x, with its versions."""
    module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).to("meta")
    versions = deque({"0.weight": a, "1.weight": b} for a, b in zip(first, second, strict=True))
    return Layer("both", module, versions, 0, delays)


@pytest.mark.parametrize("is_stashed", [True, False])
def test_without_stashing_the_backward_reads_the_newest_weights(is_stashed: bool) -> None:
    """Three of four rows meet the last version but one; the gradients are written out."""
    torch.manual_seed(0)
    first, second = torch.randn(2, 4, 3), torch.randn(2, 2, 4)
    inputs, upstream = torch.randn(4, 3), torch.randn(4, 2)
    layer = two_matrices([*first], [*second], Delays((3, 0), 4, is_stashed=is_stashed))
    outputs = layer.forward(inputs, batch=1)
    torch.testing.assert_close(
        outputs, torch.cat([inputs[:3] @ first[0].T @ second[0].T, inputs[3:] @ first[1].T @ second[1].T])
    )
    layer.update_under_graph()
    leaves = [tensor for leaf in layer.leaves for tensor in leaf.values()]
    found = layer.gradients(iter(torch.autograd.grad(outputs, leaves, upstream)))

    hidden = torch.cat([inputs[:3] @ first[0].T, inputs[3:] @ first[1].T])
    torch.testing.assert_close(outputs, torch.cat([hidden[:3] @ second[0].T, hidden[3:] @ second[1].T]))
    read = second[[0, 0, 0, 1]] if is_stashed else second[[1, 1, 1, 1]]
    torch.testing.assert_close(found["1.weight"], upstream.T @ hidden)
    torch.testing.assert_close(found["0.weight"], torch.einsum("ro,roh,ri->hi", upstream, read, inputs))
    assert torch.equal(layer.versions[0]["1.weight"], second[0])
