"""Stages of one pipeline that compute different parts again have the bits of the plain loop."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Final, Literal

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from headway.stages.model import decoder
from headway.stages.spec import RECOMPUTES
from headway.stages.state.journal import Journal
from tests.rigs.pipeline import ADAMW, EF, Pipeline, assert_exact, initial_layers, make_job, with_train

Kernel = Literal["math", "flash"]
KERNELS: Final[dict[Kernel, SDPBackend]] = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))]


@contextmanager
def one_kernel(name: Kernel) -> Iterator[None]:
    """The whole process has one kernel of attention: torch's choice is no thread's own, and here stages are threads."""
    with pytest.MonkeyPatch.context() as patched, sdpa_kernel(KERNELS[name]):
        patched.setattr(decoder, "_chosen", lambda _: nullcontext())
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_any_choice_for_each_stage_gives_the_bits_of_the_plain_loop(seed: int) -> None:
    """Random choices on 2 to 4 stages, some with replicas; then others after a stop → the reference, to the bit."""
    chance = random.Random(seed)
    kernel = chance.choice(list(KERNELS))
    train = with_train(
        schedule=chance.choice(["2bw", "1f1b", "gpipe"]),
        dtype=chance.choice(["float32", "bfloat16"]),
        attention_backend=kernel,
        reduction_groups=2,
        recompute="auto",
        batches=4,
    )
    job = make_job(train, chance.choice([EF, ADAMW]))
    num_stages = chance.randint(2, 4)
    mixed = chance.sample(RECOMPUTES, 2) + chance.choices(RECOMPUTES, k=num_stages - 2)
    layers, journal = initial_layers(job), Journal()
    first = Pipeline(job, layers, journal, num_stages=num_stages, recompute=mixed, stop_after_batch=1)
    with one_kernel(kernel):
        first.run()
        Pipeline(job, layers, journal, num_stages=2, recompute=chance.choices(RECOMPUTES, k=2), generation=2).run()
        assert_exact(job, layers, journal)


@pytest.mark.parametrize("late_seed", [None, 5])
def test_replicas_and_late_devices_change_nothing_about_it(late_seed: int | None) -> None:
    """Two replicas that compute attention again before a stage that computes blocks again → the reference."""
    job = make_job(with_train(recompute="auto", attention_backend="math", reduction_groups=4, batches=3), EF)
    layers, journal = initial_layers(job), Journal()
    pipeline = Pipeline(
        job,
        layers,
        journal,
        num_stages=2,
        replicas=(2, 1),
        recompute=("attention", "block"),
        late_seed=late_seed,
    )
    with one_kernel("math"):
        pipeline.run()
        assert_exact(job, layers, journal)
