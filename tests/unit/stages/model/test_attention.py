"""Attention backends compute one function, each repeatably; `auto` leaves the choice to torch."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from headway.stages.model.decoder import AttentionBackend, build_layer
from headway.stages.model.determinism import arithmetic_class, configure
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.spec import ModelSpec, TrainSpec

CPU = torch.device("cpu")
SPEC = ModelSpec(
    hidden_size=48, intermediate_size=64, num_attention_heads=6, num_key_value_heads=2, initializer_range=0.2
)


def run(backend: AttentionBackend, hidden: Tensor, spec: ModelSpec = SPEC) -> tuple[Tensor, ...]:
    """Output of a block, and the gradients of its squares' mean."""
    weights = {name: tensor.requires_grad_() for name, tensor in initial_parameters("block.0", spec, seed=2).items()}
    output = functional_call(build_layer("block.0", spec, attention_backend=backend), weights, (hidden,))
    return output.detach(), *torch.autograd.grad(output.square().mean(), list(weights.values()))


@pytest.fixture
def hidden() -> Tensor:
    configure(TrainSpec(), CPU)
    return torch.randn(2, 33, 48, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("backend", ["auto", "math", "flash"])
def test_a_backend_repeats_itself_and_agrees_with_the_others(backend: AttentionBackend, hidden: Tensor) -> None:
    """Twice the same bits; the plain mathematics to rounding."""
    found = run(backend, hidden)
    for first, again, plain in zip(found, run(backend, hidden), run("math", hidden), strict=True):
        assert torch.equal(first, again)
        torch.testing.assert_close(first, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sliding_window", [0, 5])
def test_sinks_beside_the_fused_kernel_are_those_of_the_whole_softmax(hidden: Tensor, sliding_window: int) -> None:
    """Output and gradients, the sinks' too, agree with the written-out softmax; twice the same bits; no scores kept."""
    spec = replace(SPEC, attention_sinks=True, sliding_window=sliding_window)
    largest = 0

    def note(kept: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, kept.numel())
        return kept

    with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        found = run("auto", hidden, spec)
    for first, again, plain in zip(found, run("auto", hidden, spec), run("math", hidden, spec), strict=True):
        assert torch.equal(first, again)
        torch.testing.assert_close(first, plain, rtol=1e-4, atol=1e-5)
        assert first.abs().max() > 0
    assert largest < hidden.shape[0] * spec.num_attention_heads * hidden.shape[1] ** 2


def test_a_backend_the_device_lacks_is_an_error(hidden: Tensor) -> None:
    """CPUs have no memory-efficient kernel: torch says so, and nothing else is taken in its place."""
    with pytest.raises(RuntimeError, match="No viable backend"):
        run("efficient", hidden)


def test_choosing_a_backend_leaves_no_trace(hidden: Tensor) -> None:
    """Afterwards torch may again choose among all of them."""
    run("math", hidden)
    assert torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    assert torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]


def test_no_token_sees_a_later_one(hidden: Tensor) -> None:
    """Change the last position: every earlier output keeps its bits, the last one moves."""
    changed = hidden.clone()
    changed[:, -1] += 1
    before, after = run("auto", hidden)[0], run("auto", changed)[0]
    torch.testing.assert_close(before[:, :-1], after[:, :-1], rtol=0, atol=0)
    assert not torch.equal(before[:, -1], after[:, -1])


def test_order_matters(hidden: Tensor) -> None:
    """Two positions swapped give another answer at the end: positions are really rotated in."""
    swapped = hidden.clone()
    swapped[:, [3, 20]] = swapped[:, [20, 3]]
    assert not torch.allclose(run("auto", hidden)[0][:, -1], run("auto", swapped)[0][:, -1], atol=1e-4)


def test_every_backend_of_the_job_file_is_known() -> None:
    """The job's choices and the model's are one list."""
    assert get_args(AttentionBackend) == get_args(TrainSpec.__annotations__["attention_backend"])


def test_configuring_fixes_threads_algorithms_and_precision() -> None:
    """What the job says holds for the process; on a CPU, TF32 is not a thing that can be allowed."""
    configure(TrainSpec(threads=2, allow_tf32=True), CPU)
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    configure(TrainSpec(), CPU)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("allowed", "precision"), [(False, "highest"), (True, "high")])
def test_tf32_is_what_the_job_says(allowed: bool, precision: str) -> None:
    """On a card float32 products use TF32 if the job allows it, and only then, whatever the process did before."""
    try:
        torch.set_float32_matmul_precision("medium")
        configure(TrainSpec(allow_tf32=allowed), torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == precision
    finally:
        configure(TrainSpec(), CPU)


def test_the_arithmetic_class_names_versions_and_hardware() -> None:
    """torch's version and the CPU's capability are in it."""
    name = arithmetic_class(CPU)
    assert torch.__version__ in name
    assert torch.backends.cpu.get_cpu_capability() in name
