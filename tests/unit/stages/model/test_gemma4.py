"""Gemma 4: blocks whose heads differ by type, on any cut of the model, in documents and in plans."""

from dataclasses import replace

import pytest

from headway.daemon.jobs.rules import num_parameters
from headway.daemon.plan.block_widths import block_widths
from headway.daemon.plan.layer_costs import layer_costs
from headway.stages.attention_kernels import why_not
from headway.stages.ids import LayerName
from headway.stages.model.decoder import parameter_shapes
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.spec import AdapterSpec, ModelSpec, RopeSpec, TrainSpec, layer_names, matrix_names
from headway.stages.state.journal import Journal
from tests.rigs.block_widths import MOST_BESIDE, TOKENS, saved_values
from tests.rigs.pipeline import EF, MODEL, Pipeline, assert_exact, initial_layers, make_job, with_train

GEMMA4 = replace(
    MODEL,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_global_key_value_heads=2,
    head_dim=8,
    global_head_dim=12,
    attention_k_eq_v=True,
    attention_multiplier=1.0,
    embedding_multiplier=MODEL.hidden_size**0.5,
    final_logit_softcapping=3.0,
    hidden_act="gelu_pytorch_tanh",
    layer_scalar=True,
    layer_types=("sliding_attention", "full_attention"),
    norm_placement="both",
    qk_norm=True,
    rms_norm_eps=1e-2,
    rope_scaling=RopeSpec(rope_type="proportional", factor=1.0, partial_rotary_factor=0.5),
    sliding_window=4,
    tie_word_embeddings=True,
    value_norm=True,
    window_rope_theta=100.0,
)
DOCUMENTS = {"loss_mask": "data", "documents": "separate"}
JOBS = {
    "2bw": make_job(with_train(reduction_groups=2), EF, model=GEMMA4),
    "documents, recomputed": make_job(with_train(**DOCUMENTS, recompute="block"), EF, model=GEMMA4),
    "documents, attention recomputed": make_job(
        with_train(**DOCUMENTS, recompute="attention", loss_chunk=5, schedule="1f1b", dtype="bfloat16"),
        EF,
        model=replace(GEMMA4, window_rope_theta=0.0),
    ),
    "adapters": make_job(with_train(), EF, model=replace(GEMMA4, adapter=AdapterSpec(rank=2))),
    "adapters of values": make_job(
        with_train(), EF, model=replace(GEMMA4, adapter=AdapterSpec(rank=2, targets=("q_proj", "v_proj")))
    ),
}


@pytest.mark.parametrize("num_stages", [1, pytest.param(3, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("name", JOBS)
def test_any_cut_has_the_bits_of_the_plain_loop(name: str, num_stages: int) -> None:
    """All layers on one stage, each on its own, or between; the constants of the blocks are those of the beginning."""
    job = JOBS[name]
    layers, journal = initial_layers(job), Journal()
    assert set(Pipeline(job, layers, journal, num_stages=num_stages).run()) == {4}
    assert_exact(job, layers, journal)
    if not job.model.has_adapter:
        for index in range(job.model.num_hidden_layers):
            assert layers[LayerName(f"block.{index}")].weights()["layer_scalar"].tolist() == [1.0]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("adapter", [AdapterSpec(), AdapterSpec(rank=3), AdapterSpec(rank=3, targets=("v_proj",))])
def test_the_plan_counts_what_a_block_has_and_keeps(index: int, adapter: AdapterSpec) -> None:
    """Each parameter of either type of block once; what its forward keeps for its backward but for a little, and for
    the mask of a window.
    """
    model = replace(GEMMA4, adapter=adapter, sliding_window=TOKENS)
    cost = layer_costs(make_job(with_train(), EF, model=GEMMA4))[1 + index]
    assert cost.num_parameters == sum(shape.numel() for shape in parameter_shapes(f"block.{index}", model).values())
    counted = block_widths(model, TrainSpec(batches=1), block=index).kept
    assert 0 <= saved_values(model, f"block.{index}") / TOKENS - counted <= MOST_BESIDE


def test_the_plan_knows_that_blocks_of_full_attention_are_wider() -> None:
    """Their heads, their matrices without values, and their scores → products of their own size."""
    of_window, of_full = layer_costs(make_job(with_train(), EF, model=GEMMA4))[1:3]
    heads, length = GEMMA4.num_attention_heads, with_train().sequence_length
    mlp = 2 * 3 * GEMMA4.hidden_size * GEMMA4.intermediate_size
    tokens = length * with_train().microbatch_size
    for cost, width, keys in ((of_window, 8, 4 + 4), (of_full, 12, 2)):
        products = 2 * GEMMA4.hidden_size * width * (2 * heads + keys)
        assert cost.forward_flops == tokens * (products + mlp + 4 * length * heads * width)


def test_a_model_is_as_large_as_its_blocks() -> None:
    """The bound on a job's parameters counts each block's own heads."""
    shapes = [shape for name in layer_names(GEMMA4) for shape in parameter_shapes(name, GEMMA4).values()]
    norms_of_heads = sum(2 * GEMMA4.head_width_of(block) + 1 for block in range(GEMMA4.num_hidden_layers))
    assert num_parameters(GEMMA4) == sum(shape.numel() for shape in shapes) - norms_of_heads


def test_a_kernel_must_have_the_widest_heads() -> None:
    """512 values are too many for flash on a card, though most blocks have 256."""
    model = replace(GEMMA4, head_dim=256, global_head_dim=512, sliding_window=4096)
    train = TrainSpec(dtype="bfloat16")
    assert "these have 512" in why_not("flash", model, train, device_kind="cuda", capability="9.0")
    assert why_not("efficient", model, train, device_kind="cuda", capability="9.0") == ""


def test_blocks_without_values_of_their_own_have_no_matrix_for_them() -> None:
    """The constant is one at the beginning; an adapter of v_proj lies in the other blocks."""
    assert matrix_names(GEMMA4, 1)[:3] == ("q_proj", "k_proj", "o_proj")
    assert "v_proj" in matrix_names(GEMMA4)
    weights = initial_parameters("block.1", GEMMA4, seed=0)
    assert weights["layer_scalar"].tolist() == [1.0]
    assert "self_attn.v_proj.weight" not in weights
    assert weights["self_attn.q_norm.weight"].tolist() == [1.0] * 12
    assert ModelSpec().head_width_of(0) == ModelSpec().head_width
