"""Names and arithmetic are Hugging Face Llama's."""

import pytest
import torch

from headway.stages.model.hugging_face import checkpoint_name, hugging_face_config, model_spec
from headway.stages.model.positions import rotary_table
from headway.stages.spec import ModelSpec, RopeSpec


@pytest.mark.parametrize(
    ("layer", "parameter", "expected"),
    [
        ("embed", "weight", "model.embed_tokens.weight"),
        ("block.0", "input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        ("block.13", "self_attn.q_proj.weight", "model.layers.13.self_attn.q_proj.weight"),
        ("head", "norm.weight", "model.norm.weight"),
        ("head", "lm_head.weight", "lm_head.weight"),
    ],
)
def test_parameters_have_the_checkpoint_names(layer: str, parameter: str, expected: str) -> None:
    """Each layer's parameter lies where LlamaForCausalLM looks for it."""
    assert checkpoint_name(layer, parameter, ModelSpec()) == expected


def test_a_config_reads_back_as_its_spec() -> None:
    """Every field of a spec far from the defaults survives config.json."""
    spec = ModelSpec(
        num_hidden_layers=3,
        hidden_size=96,
        intermediate_size=128,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=1000,
        rms_norm_eps=1e-6,
        rope_theta=500_000.0,
        initializer_range=0.01,
    )
    assert model_spec(hugging_face_config(spec, dtype="float32", sequence_length=64)) == spec


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_a_config_of_another_kind_of_model_is_refused(change: dict[str, object], named: str) -> None:
    """The error names the key that is not ours."""
    config = hugging_face_config(ModelSpec(), dtype="float32", sequence_length=64) | change
    with pytest.raises(ValueError, match=named):
        model_spec(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_is_rotate_half(dtype: torch.dtype) -> None:
    """x·cos + rolled(x)·signed sine against x·cos + rotate_half(x)·sin, written out with complex numbers in float64."""
    length, head_dim, theta = 40, 12, 10_000.0
    heads = torch.randn(2, length, 3, head_dim, generator=torch.Generator().manual_seed(0))
    cosine, sine = rotary_table(
        length, head_dim, theta=theta, scaling=RopeSpec(), device=torch.device("cpu"), dtype=dtype
    )
    found = heads * cosine.float() + heads.roll(head_dim // 2, -1) * sine.float()

    half = torch.arange(head_dim // 2, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * theta ** (-2 * half / head_dim)
    pairs = torch.complex(heads[..., : head_dim // 2].double(), heads[..., head_dim // 2 :].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_rotary_tables_made_while_sampling_serve_training() -> None:
    """The cache may be filled under inference mode; a graph can still save what it holds."""
    rotary_table.cache_clear()
    with torch.inference_mode():
        cosine, _ = rotary_table(8, 4, theta=100.0, scaling=RopeSpec(), device=torch.device("cpu"), dtype=torch.float32)
    heads = torch.ones(1, 8, 1, 4, requires_grad=True)
    (heads * cosine).sum().backward()  # type: ignore[no-untyped-call]
    assert heads.grad is not None
