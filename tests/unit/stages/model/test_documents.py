"""A row of several documents computes what each document computes alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from headway.daemon.plan.layer_costs import document_bytes
from headway.stages.attention_kernels import why_not
from headway.stages.ids import LayerName
from headway.stages.model.decoder import build_layer
from headway.stages.model.hugging_face import checkpoint_name, hugging_face_config
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.model.positions import document_rows
from headway.stages.spec import ModelSpec, RopeSpec, TrainSpec, layer_names
from tests.rigs.pipeline import make_job

LENGTHS = (3, 5, 1, 7)
MODEL = ModelSpec(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    initializer_range=0.2,
)
LLAMA3 = RopeSpec(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8
)
MODELS: dict[str, ModelSpec] = {
    "Llama": MODEL,
    "Mistral's window": replace(MODEL, sliding_window=3),
    "llama3": replace(MODEL, rope_scaling=LLAMA3),
    "gated delta rule": replace(
        MODEL,
        layer_types=("linear_attention", "full_attention"),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        attn_output_gate=True,
        partial_rotary_factor=0.5,
        zero_centered_norms=True,
        rms_norm_eps=1e-2,
    ),
}
MODELS["heads by type"] = replace(
    MODEL,
    num_key_value_heads=4,
    num_global_key_value_heads=2,
    global_head_dim=12,
    attention_k_eq_v=True,
    layer_types=("sliding_attention", "full_attention"),
    rope_scaling=RopeSpec(rope_type="proportional", factor=1.0, partial_rotary_factor=0.5),
    sliding_window=3,
)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).to(torch.int32)[None]


def layers_of(model: ModelSpec) -> list[nn.Module]:
    layers = []
    for name in layer_names(model):
        layers.append(build_layer(name, model))
        layers[-1].load_state_dict(initial_parameters(LayerName(name), model, seed=3), assign=True)
    return layers


def logits_of(model: ModelSpec, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Of a row; with positions, each of its documents by itself."""
    embed, *blocks, head = layers_of(model)
    documents = () if positions is None else (document_rows(positions, model, torch.float32),)
    hidden = embed(tokens)
    for block in blocks:
        hidden = block(hidden, *documents)
    found: Tensor = head(hidden)
    return found


def row() -> Tensor:
    return torch.randint(64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_packed_document_has_the_logits_that_it_has_alone(name: str) -> None:
    """Four documents in one row → within 1e-5 the logits of each by itself, and not those of the joined row."""
    model, tokens = MODELS[name], row()
    packed = logits_of(model, tokens, POSITIONS)
    alone = [logits_of(model, document) for document in tokens.split(LENGTHS, 1)]  # type: ignore[no-untyped-call]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-5)
    joined = logits_of(model, tokens)
    assert (packed - joined)[:, : LENGTHS[0]].abs().max() < 1e-5
    assert (packed - joined)[:, LENGTHS[0] :].abs().max() > 1e-2


@torch.no_grad()
def test_a_packed_row_has_the_logits_of_transformers() -> None:
    """The same row, its positions and a mask of its documents in transformers' Llama → within 1e-5 its logits."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**hugging_face_config(MODEL, dtype="float32", sequence_length=16))
    theirs = transformers.LlamaForCausalLM(config).eval()
    weights = {
        checkpoint_name(name, key, MODEL): tensor
        for name in layer_names(MODEL)
        for key, tensor in initial_parameters(LayerName(name), MODEL, seed=3).items()
    }
    theirs.load_state_dict(weights)
    number = (POSITIONS == 0).cumsum(1)
    attends = (number[:, :, None] == number[:, None]).tril()[:, None]
    mask = torch.where(attends, 0.0, torch.finfo(torch.float32).min)
    expected = theirs(row(), attention_mask=mask, position_ids=POSITIONS.long()).logits
    torch.testing.assert_close(logits_of(MODEL, row(), POSITIONS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "gated delta rule"])
def test_no_gradient_crosses_the_end_of_a_document(name: str) -> None:
    """The last document's loss → no gradient for the hidden states before it."""
    _, block, *_ = layers_of(MODELS[name])
    hidden = torch.randn(1, sum(LENGTHS), 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
    output = block(hidden, document_rows(POSITIONS, MODELS[name], torch.float32))
    (gradient,) = torch.autograd.grad(output[:, -LENGTHS[-1] :].square().sum(), hidden)
    assert not gradient[:, : -LENGTHS[-1]].any()
    assert gradient[:, -LENGTHS[-1] :].abs().min() > 0


@pytest.mark.parametrize("name", ["Llama", "Mistral's window", "gated delta rule", "heads by type"])
def test_the_plan_counts_what_a_microbatch_keeps(name: str) -> None:
    """Masks, cosines and sines → exactly the bytes of the cost model; none without separate documents."""
    model = MODELS[name]
    train = TrainSpec(microbatch_size=2, sequence_length=16, loss_mask="data", documents="separate")
    job = replace(make_job(train), model=model)
    kept = document_rows(POSITIONS.repeat(2, 1), model, torch.float32)
    assert document_bytes(job) == sum(tensor.nbytes for tensor in kept if tensor is not None)
    assert document_bytes(replace(job, train=replace(train, documents="joined"))) == 0


def test_flash_takes_no_mask_on_a_card() -> None:
    """Separate documents → another kernel on a card; a CPU's takes the mask."""
    train = TrainSpec(loss_mask="data", documents="separate", dtype="bfloat16")
    assert "takes no mask" in why_not("flash", MODEL, train, device_kind="cuda", capability="9.0")
    assert why_not("efficient", MODEL, train, device_kind="cuda", capability="9.0") == ""
    assert why_not("flash", MODEL, train, device_kind="cpu") == ""
