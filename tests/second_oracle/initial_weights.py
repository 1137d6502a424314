"""W_0: each parameter is a function of the seed and of its own name (docs/numerics.md, section 9)."""

from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from tests.second_oracle.job import Adapter, Model

Weights = dict[str, dict[str, Tensor]]
"""Layer name to parameter name to tensor. Layers are in the model's order."""


def parameter_shapes(model: Model) -> dict[str, dict[str, tuple[int, ...]]]:
    """Layer name to parameter name to shape. A linear weight is [outputs, inputs]."""
    blocks = {f"block.{index}": block_shapes(model, index) for index in range(model.num_hidden_layers)}
    vocabulary = (model.vocab_size, model.hidden_size)
    head = {"norm.weight": (model.hidden_size,), "lm_head.weight": vocabulary}
    return {"embed": {"weight": vocabulary}, **blocks, "head": head}


def block_shapes(model: Model, index: int) -> dict[str, tuple[int, ...]]:
    """Parameter name to shape of one block."""
    hidden, inner = model.hidden_size, model.intermediate_size
    width, num_keys = model.heads_of(index)
    queries, keys = model.num_attention_heads * width, num_keys * width
    block: dict[str, tuple[int, ...]] = {}

    def linear(name: str, outputs: int, inputs: int, *, has_bias: bool) -> None:
        block[f"{name}.weight"] = (outputs, inputs)
        if has_bias:
            block[f"{name}.bias"] = (outputs,)

    if model.fused_projections:
        linear("self_attn.qkv_proj", queries + 2 * keys, hidden, has_bias=model.qkv_bias)
    else:
        linear("self_attn.q_proj", queries * (1 + model.attn_output_gate), hidden, has_bias=model.qkv_bias)
        linear("self_attn.k_proj", keys, hidden, has_bias=model.qkv_bias)
        if not (model.attention_k_eq_v and model.type_of(index) == "full_attention"):
            linear("self_attn.v_proj", keys, hidden, has_bias=model.qkv_bias)
    linear("self_attn.o_proj", hidden, queries, has_bias=model.output_bias)
    if model.attention_sinks:
        block["self_attn.sinks"] = (model.num_attention_heads,)
    if model.qk_norm:
        together = model.qk_norm_over == "heads"
        block["self_attn.q_norm.weight"] = (queries if together else width,)
        block["self_attn.k_norm.weight"] = (keys if together else width,)
    if model.num_experts:
        linear("mlp.gate", model.num_experts, hidden, has_bias=model.expert_bias)
        if model.router_bias:
            block["mlp.gate.e_score_correction_bias"] = (model.num_experts,)
        if model.shared_expert_gate:
            linear("mlp.shared_expert_gate", 1, hidden, has_bias=False)
        experts = {f"mlp.experts.{e}": model.moe_intermediate_size for e in range(model.num_experts)}
        if model.num_shared_experts:
            experts["mlp.shared_experts"] = model.num_shared_experts * model.moe_intermediate_size
        for name, width in experts.items():
            linear(f"{name}.gate_proj", width, hidden, has_bias=model.expert_bias)
            linear(f"{name}.up_proj", width, hidden, has_bias=model.expert_bias)
            linear(f"{name}.down_proj", hidden, width, has_bias=model.expert_bias)
    elif model.fused_projections or model.fused_gate_up:
        linear("mlp.gate_up_proj", 2 * inner, hidden, has_bias=model.mlp_bias)
    else:
        linear("mlp.gate_proj", inner, hidden, has_bias=model.mlp_bias)
        linear("mlp.up_proj", inner, hidden, has_bias=model.mlp_bias)
    if not model.num_experts:
        linear("mlp.down_proj", hidden, inner, has_bias=model.mlp_bias)
    norms = {
        "before": ["input", "post_attention"],
        "after": ["post_attention", "post_feedforward"],
        "both": ["input", "post_attention", "pre_feedforward", "post_feedforward"],
    }
    for name in norms[model.norm_placement]:
        block[f"{name}_layernorm.weight"] = (hidden,)
    if model.layer_scalar:
        block["layer_scalar"] = (1,)
    if model.type_of(index) != "linear_attention":
        return block
    return {name: shape for name, shape in block.items() if not name.startswith("self_attn.")} | delta_rule(model)


def delta_rule(model: Model) -> dict[str, tuple[int, ...]]:
    """Parameter name to shape of linear attention."""
    values = model.linear_num_value_heads * model.linear_value_head_dim
    channels = 2 * model.linear_num_key_heads * model.linear_key_head_dim + values
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj_qkv.weight": (channels, model.hidden_size),
        "in_proj_z.weight": (values, model.hidden_size),
        "in_proj_b.weight": (model.linear_num_value_heads, model.hidden_size),
        "in_proj_a.weight": (model.linear_num_value_heads, model.hidden_size),
        "out_proj.weight": (model.hidden_size, values),
        "conv1d.weight": (channels, 1, model.linear_conv_kernel_dim),
        "A_log": (model.linear_num_value_heads,),
        "dt_bias": (model.linear_num_value_heads,),
        "norm.weight": (model.linear_value_head_dim,),
    }
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def initial_weights(model: Model, *, seed: int) -> Weights:
    """W_0 in float32: norms are ones, biases zeros, everything else is normal."""

    def initial(layer: str, name: str, shape: tuple[int, ...]) -> Tensor:
        if name == "linear_attn.A_log":
            u = torch.from_numpy(_generator(f"{seed}/{layer}/{name}").random(shape, dtype=np.float32))
            return torch.log(15.99 * u + 0.01)
        if name in ("linear_attn.dt_bias", "linear_attn.norm.weight"):
            return torch.ones(shape)
        if len(shape) == 1 and name.endswith("norm.weight") and model.zero_centered_norms:
            return torch.zeros(shape)
        if len(shape) == 1 and name != "self_attn.sinks":
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        is_copy = model.tie_word_embeddings and name == "lm_head.weight"
        key = f"{seed}/embed/weight" if is_copy else f"{seed}/{layer}/{name}"
        return _normal(shape, deviation=model.initializer_range, key=key)

    return {
        layer: {name: initial(layer, name, shape) for name, shape in shapes.items()}
        for layer, shapes in parameter_shapes(model).items()
    }


def initial_adapters(model: Model, adapter: Adapter, *, seed: int) -> Weights:
    """Boundary 0 of what is trained beside frozen weights: A is uniform, B zeros."""
    found: Weights = {}
    for layer, shapes in parameter_shapes(model).items():
        found[layer] = {}
        for name, shape in shapes.items():
            matrix = name.removesuffix(".weight")
            if not layer.startswith("block.") or len(shape) != 2:
                continue
            if model.num_experts and not adapter.targets and not name.startswith("self_attn."):
                continue
            if adapter.targets and matrix.split(".")[-1] not in adapter.targets:
                continue
            key = f"{matrix}.lora_A.weight"
            drawn = _generator(f"{seed}/{layer}/{key}").random((adapter.rank, shape[1]), dtype=np.float32)
            bound = np.float32(1 / shape[1] ** 0.5)
            found[layer][key] = torch.from_numpy((np.float32(2) * drawn - np.float32(1)) * bound)
            found[layer][f"{matrix}.lora_B.weight"] = torch.zeros(shape[0], adapter.rank)
    return found


def _generator(key: str) -> np.random.Generator:
    number = int.from_bytes(blake2b(key.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=number))


def _normal(shape: tuple[int, ...], *, deviation: float, key: str) -> Tensor:
    drawn = _generator(key).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(drawn * np.float32(deviation))
