"""The gated delta rule in chunks: what its definition computes token by token, and nothing of another document."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.daemon.plan.block_widths import block_widths
from headway.daemon.plan.layer_costs import layer_costs
from headway.optim.routing import Group, kind_of_rest, route
from headway.stages.model.decoder import build_layer, parameter_shapes
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.model.linear_attention import gated_delta_rule
from headway.stages.model.positions import document_rows
from headway.stages.spec import AdapterSpec, TrainSpec
from headway.stages.state.journal import Journal
from tests.rigs.block_widths import MOST_BESIDE, TOKENS, saved_values
from tests.rigs.pipeline import (
    DOCUMENTS,
    EF,
    HYBRID,
    LONG,
    Pipeline,
    assert_exact,
    initial_layers,
    load_all,
    make_job,
    save_all,
    with_train,
)

ADAPTED = replace(HYBRID, adapter=AdapterSpec(rank=2))
LENGTHS = (3, 70, 1, 64, 30)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).to(torch.int32)[None]


def by_definition(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, positions: Tensor) -> Tensor:
    """Token by token, from the state's definition."""
    repeats = value.shape[2] // key.shape[2]
    query, key = query.repeat_interleave(repeats, 2), key.repeat_interleave(repeats, 2)
    state = value.new_zeros(*value.shape[::2], key.shape[-1])[..., None, :].transpose(-1, -2) * value[:, 0, :, None]
    outputs = []
    for t in range(value.shape[1]):
        state = torch.where(positions[:, t, None, None, None] == 0, torch.zeros_like(state), state)
        state = state * decay[:, t, :, None, None].exp()
        seen = (state * key[:, t, :, :, None]).sum(-2)
        state = state + key[:, t, :, :, None] * (rate[:, t, :, None] * (value[:, t] - seen))[:, :, None]
        outputs.append((state * query[:, t, :, :, None]).sum(-2))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("length", [1, 64, 168])
@pytest.mark.parametrize("has_documents", [False, True])
def test_chunks_compute_what_the_definition_does(*, has_documents: bool, length: int) -> None:
    """Outputs and all gradients within 1e-5 of a loop in float64, over chunks' and documents' ends."""
    torch.manual_seed(1)
    unit = torch.nn.functional.normalize
    inputs = (
        unit(torch.randn(2, length, 2, 8), dim=-1),
        unit(torch.randn(2, length, 2, 8), dim=-1),
        torch.randn(2, length, 4, 12),
        -2 * torch.rand(2, length, 4),
        torch.rand(2, length, 4),
    )
    positions = POSITIONS[:, :length] if has_documents else torch.arange(length, dtype=torch.int32)[None]
    upstream = torch.randn(2, length, 4, 12)

    def run(rule: object, dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        output = rule(*leaves, positions)  # type: ignore[operator]
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(dtype))]

    wanted = run(by_definition, torch.float64)
    for found, exact in zip(run(gated_delta_rule, torch.float32), wanted, strict=True):
        torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)


def test_no_bit_of_a_document_depends_on_another() -> None:
    """The documents around the fourth one, which lies in the second and the third chunk, are drawn anew → equal bits of
    the fourth.
    """
    block = build_layer("block.0", HYBRID)
    block.load_state_dict(initial_parameters("block.0", HYBRID, seed=3), assign=True)
    documents = document_rows(POSITIONS, HYBRID, torch.float32)
    first, other = torch.randn(2, 1, sum(LENGTHS), HYBRID.hidden_size, generator=torch.Generator().manual_seed(2))
    own = slice(sum(LENGTHS[:3]), sum(LENGTHS[:4]))
    other = other.clone()
    other[:, own] = first[:, own]
    assert torch.equal(block(first, documents)[:, own], block(other, documents)[:, own])


JOBS = {
    "2bw": make_job(with_train(**LONG, reduction_groups=2), EF, model=HYBRID),
    "documents, recomputed": make_job(with_train(**DOCUMENTS, recompute="block"), EF, model=HYBRID),
    "documents, attention recomputed, tied": make_job(
        with_train(**DOCUMENTS, recompute="attention", loss_chunk=5),
        EF,
        model=replace(HYBRID, tie_word_embeddings=True),
    ),
    "bfloat16, 1f1b": make_job(with_train(schedule="1f1b", dtype="bfloat16"), EF, model=HYBRID),
    "adapters in one kind of block": make_job(
        with_train(), EF, model=replace(HYBRID, adapter=AdapterSpec(rank=2, targets=("in_proj_z",)))
    ),
    "mixture": make_job(
        with_train(**DOCUMENTS, router_balance_loss=0.05, recompute="block"),
        EF,
        model=replace(
            HYBRID,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            norm_topk_prob=True,
            num_shared_experts=1,
            shared_expert_gate=True,
        ),
    ),
    "adapters": make_job(with_train(), EF, model=ADAPTED),
    "adapters beside 4 bits, documents": make_job(
        with_train(**LONG, **DOCUMENTS), EF, model=replace(HYBRID, adapter=AdapterSpec(rank=2, quantize="nf4"))
    ),
    "preferences, recomputed": make_job(
        with_train(**LONG, **DOCUMENTS, objective="dpo", recompute="attention"), EF, model=ADAPTED
    ),
}


@pytest.mark.parametrize("num_stages", [1, pytest.param(3, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("name", JOBS)
def test_any_cut_has_the_bits_of_the_plain_loop(name: str, num_stages: int) -> None:
    """All layers on one stage, and each on its own; in a slow run also what lies between."""
    job = JOBS[name]
    layers, journal = initial_layers(job), Journal()
    assert set(Pipeline(job, layers, journal, num_stages=num_stages).run()) == {4}
    assert_exact(job, layers, journal)


@pytest.mark.parametrize("name", ["2bw", "preferences, recomputed"])
def test_replicas_change_no_bit(name: str) -> None:
    """Two workers at each end and one between."""
    job = replace(JOBS[name], train=replace(JOBS[name].train, reduction_groups=2))
    layers, journal = initial_layers(job), Journal()
    Pipeline(job, layers, journal, num_stages=3, replicas=(2, 1, 2)).run()
    assert_exact(job, layers, journal)


def test_a_stop_and_another_cut_change_no_bit(tmp_path: Path) -> None:
    """Convolutions and decays go through files with all of their state."""
    job = JOBS["2bw"]
    layers, journal = initial_layers(job), Journal()
    stopped = Pipeline(job, layers, journal, num_stages=3, stop_after_batch=0).run()
    save_all(tmp_path, job, layers, journal)
    layers, journal = load_all(tmp_path, job, stopped[0])
    assert set(Pipeline(job, layers, journal, num_stages=2, generation=2).run()) == {4}
    assert_exact(job, layers, journal)


def test_muon_steps_true_matrices_alone() -> None:
    """Five projections; the convolution always decays, and gates count as norms."""
    shapes = {name: torch.empty(shape) for name, shape in parameter_shapes("block.0", HYBRID).items()}
    own = {name.removeprefix("linear_attn."): tensor for name, tensor in shapes.items() if "linear_attn" in name}
    groups = {name: route("block.0", f"linear_attn.{name}", tensor) for name, tensor in own.items()}
    matrices = {name for name, group in groups.items() if group is Group.MATRICES}
    assert matrices == {f"in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")} | {"out_proj.weight"}
    assert kind_of_rest("linear_attn.conv1d.weight", own["conv1d.weight"]) is None
    assert {kind_of_rest(name, own[name]) for name in ("A_log", "dt_bias", "norm.weight")} == {"norms"}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("adapter", [AdapterSpec(), AdapterSpec(rank=3), AdapterSpec(rank=3, targets=("in_proj_z",))])
def test_the_plan_counts_what_a_block_has_and_keeps(index: int, adapter: AdapterSpec) -> None:
    """Each parameter of either kind of block once; what its forward keeps for its backward but for a little."""
    model = replace(HYBRID, adapter=adapter)
    cost = layer_costs(make_job(with_train(), EF, model=HYBRID))[1 + index]
    assert cost.num_parameters == sum(shape.numel() for shape in parameter_shapes(f"block.{index}", model).values())
    counted = block_widths(model, TrainSpec(batches=1), block=index).kept
    assert 0 <= saved_values(model, f"block.{index}") / TOKENS - counted <= MOST_BESIDE
