"""What the job alone says of a layer's memory and of its update, checked by hand."""

from dataclasses import replace
from typing import Any

import pytest

from headway.daemon.cluster.records import Device
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.layer_costs import CUDA_BYTES_PER_S, CUDA_FLOPS, LayerCost, layer_costs, update_seconds
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.spec import ModelSpec
from tests.rigs.clusters import job

LLAMA_8B = ModelSpec(
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
)
S = 8192
SCORES = 32 * S * S
LOGITS = S * 128_256


def long_job(**train: Any) -> JobSpec:
    """An 8B model at 8k context, one sequence a microbatch."""
    settings: dict[str, Any] = {"microbatch_size": 1, "sequence_length": S, "dtype": "bfloat16"} | train
    return replace(job(**settings), model=LLAMA_8B)


def costs(**train: Any) -> dict[str, LayerCost]:
    return {cost.name: cost for cost in layer_costs(long_job(**train))}


@pytest.mark.parametrize("backend", ["flash", "efficient", "auto"])
def test_a_fused_kernel_keeps_no_scores(backend: str) -> None:
    """1.5 GB a block: hidden states, and fp32 log-sum-exp of 32 heads; s² scores would be 8.6 GB more."""
    width = 6 * 4096 + 2 * 8 * 128 + 4 * 14336
    assert costs(attention_backend=backend)["block.0"].activation_bytes == 2 * S * width + 4 * 32 * S


def test_math_keeps_its_scores() -> None:
    """Before and after the softmax."""
    kept = costs(attention_backend="math")["block.0"].activation_bytes
    assert kept - costs(attention_backend="flash")["block.0"].activation_bytes >= 2 * 2 * SCORES - 4 * 32 * S


def test_shared_heads_are_copied_for_the_efficient_kernel_in_float32() -> None:
    """Each of 8 key and value heads is there four times: (32 - 8) · 128 values of each more."""
    one, other = (costs(dtype="float32", attention_backend=name)["block.0"] for name in ("efficient", "flash"))
    assert one.activation_bytes - other.activation_bytes == 4 * S * 2 * (32 - 8) * 128


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_takes_twelve_bytes_a_logit(dtype: str) -> None:
    """The fp32 log-softmax is kept; its gradient and that of the logits pass, before the weights' gradient is there.

    Measured: 12 in either dtype.
    """
    head = costs(dtype=dtype)["head"]
    own_gradient = head.version_bytes // 2
    assert 12 * LOGITS <= head.activation_bytes + head.passing_bytes + own_gradient <= 12.5 * LOGITS


def test_a_loss_in_chunks_keeps_no_logits() -> None:
    """512 rows at a time → 12 bytes for their logits, 4 for the sum of the matrix' gradients, and no more products."""
    head, plain = costs(loss_chunk=512)["head"], costs()["head"]
    matrix = 128_256 * 4096
    returned = 2 * (matrix + 4096)  # the gradient that a backward returns is counted by itself
    assert head.loss_bytes == 2 * matrix + S * 4096 * 2  # the gradients that the forward makes
    assert head.activation_bytes == 2 * S * 4096 * 2 + head.loss_bytes
    assert head.passing_bytes == 12 * 512 * 128_256 + 4 * matrix - returned
    assert head.backward_flops == plain.backward_flops
    # The matrix' gradient is written and summed 16 times: 101 GB.
    assert head.moved_bytes - plain.moved_bytes == 16 * 12 * matrix


def test_one_product_takes_the_gradients_of_all_logits() -> None:
    """2 bytes a logit instead of the float32 sum and a chunk's part beside it, and no sums: 101 GB less, 4.2 more."""
    head, by_chunk = costs(loss_chunk=512, loss_gradient="whole")["head"], costs(loss_chunk=512)["head"]
    matrix = 128_256 * 4096
    assert head.passing_bytes == 2 * LOGITS - 2 * (matrix + 4096)  # a chunk has gone before the product is there
    assert by_chunk.moved_bytes - head.moved_bytes == 16 * 12 * matrix - 4 * LOGITS
    assert (head.activation_bytes, head.backward_flops) == (by_chunk.activation_bytes, by_chunk.backward_flops)


@pytest.mark.parametrize(
    ("rows", "chunk_bytes", "num_chunks"), [(512, 0.79e9, 16), (2048, 3.15e9, 4), (8192, 12.6e9, 1)]
)
def test_larger_chunks_move_less_and_take_no_room_beyond_an_update(
    rows: int, chunk_bytes: float, num_chunks: int
) -> None:
    """By hand, 8k rows: fewer sums of the matrix' gradients. Up to 2048 rows the head's own update takes more."""
    head, small = costs(loss_chunk=rows)["head"], costs(loss_chunk=512)["head"]
    matrix = 128_256 * 4096
    assert head.passing_bytes - small.passing_bytes == 12 * (rows - 512) * 128_256
    assert head.passing_bytes + head.backward_bytes - 4 * matrix == pytest.approx(chunk_bytes, rel=0.01)
    assert small.moved_bytes - head.moved_bytes == 12 * (16 - num_chunks) * matrix
    kept = 2 * matrix  # the gradient that is returned, in the job's dtype
    assert (head.passing_bytes + head.backward_bytes + kept <= head.moment_bytes) == (rows <= 2048)


def test_an_update_costs_what_its_optimizer_multiplies() -> None:
    """NorMuon as much as Muon, by any coefficients; LionMuon half, and none of it shared; SOAP by hand; others none."""

    def update(name: str, **settings: Any) -> tuple[float, int]:
        spec = replace(long_job(), optim=OptimSpec(matrices=GroupSpec(name=name, **settings)))
        block = layer_costs(spec)[1]
        return block.update_flops, block.shared_bytes

    muon, shared = update("muon")
    assert update("normuon") == (muon, shared)
    assert update("muon", newton_schulz_coefficients="polar_express", adjust_lr="match_rms_adamw") == (muon, shared)
    assert update("muon", newton_schulz_coefficients="polar_express", newton_schulz_steps=6)[0] == 1.2 * muon
    assert update("lionmuon") == (muon / 2, 0)
    assert [update(name) for name in ("adan", "mars", "adamw")] == [(0, 0)] * 3
    model = long_job().model
    hidden, inner, keys = (
        model.hidden_size,
        model.intermediate_size,
        model.key_value_heads_of(0) * model.head_width_of(0),
    )
    shapes = [(hidden, hidden)] * 2 + [(keys, hidden)] * 2 + [(inner, hidden)] * 3
    products = sum(8 * rows * columns * (rows + columns) for rows, columns in shapes)
    turns = sum(14 / 3 * (rows**3 + columns**3) for rows, columns in shapes)
    all_sides = {"max_precondition_dim": 100_000}
    assert update("soap", precondition_frequency=1, **all_sides)[0] == pytest.approx(products + turns)
    assert update("soap", precondition_frequency=100, **all_sides)[0] == pytest.approx(products + turns / 100)
    short = sum(8 * rows * columns * hidden + 14 / 3 * hidden**3 for rows, columns in shapes[4:])
    short += sum(
        8 * rows * columns * (rows + columns) + 14 / 3 * (rows**3 + columns**3) for rows, columns in shapes[:4]
    )
    flops, shared = update("soap", precondition_frequency=1, max_precondition_dim=hidden)
    assert flops == pytest.approx(short)
    assert shared == 0


def test_the_update_has_the_rate_of_newton_schulz() -> None:
    """A block's five steps in fp32 take ten times those in bf16 on a card, in a job of either dtype."""
    card = Device(kind="cuda")
    seconds = {}
    for dtype in ("float32", "bfloat16"):
        spec = long_job()
        muon = GroupSpec(name="muon", newton_schulz_dtype=dtype)
        spec = replace(spec, optim=replace(spec.optim, matrices=muon))
        block = layer_costs(spec)[1]
        moving = block.update_bytes / CUDA_BYTES_PER_S
        seconds[dtype] = update_seconds(block, card, spec.train) - moving
        assert seconds[dtype] == pytest.approx(block.update_flops / CUDA_FLOPS[dtype])
    assert seconds["float32"] == pytest.approx(10 * seconds["bfloat16"])
    assert 0.5 < seconds["float32"] < 0.9
