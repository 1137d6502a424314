"""Counts what a block's forward keeps for its backward, and what the backward adds, in values per token. Pure.

A matrix keeps its input only to differentiate by its own weights. Beside an adapter the matrix is frozen, so that input
is kept for the adapter alone, or not at all. A frozen norm does not keep its normed input.
"""

from dataclasses import dataclass, replace

from headway.stages.spec import MLP_HALF, MLP_MATRICES, ModelSpec, Recompute, TrainSpec, adapted_names


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWidths:
    """Values per token of one microbatch, except what the kernel of attention keeps."""

    kept: int
    """From the forward to the backward."""
    kept_above: int
    """Part of `kept` from attention's output on."""
    passing: int = 0
    """Gradients inside the MLP at the backward's fullest moment, as far as no gradient of weights makes room for
    them.
    """

    def of_half(self, half: str) -> "BlockWidths":
        """Return those of a half of the block; empty: of the whole."""
        if half == MLP_HALF:
            return replace(self, kept=self.kept_above)
        return replace(self, kept=self.kept - self.kept_above, kept_above=0, passing=0) if half else self


def block_widths(model: ModelSpec, train: TrainSpec, *, block: int = 0, recompute: Recompute = "none") -> BlockWidths:
    """Return the widths of a block that computes elementwise results again, if `recompute` does so, and the gated delta
    rule. Attention and whole blocks count as kept.
    """
    is_lean = recompute in ("elementwise", "attention")
    if model.has_adapter:
        return _beside_adapters(model, train, block, is_lean=is_lean)
    hidden, inner = model.hidden_size, _inner_width(model)
    # Both norms' inputs and outputs; four of the MLP's width. In float32 both norms also keep the normed input, as on a
    # CPU; the fused norm of a card, where bfloat16 is at home, does not.
    # One with a gain of 1 + weight is in float32 anyway.
    of_norms = 2 if train.dtype == "bfloat16" and not model.zero_centered_norms else 3
    # A second norm of a branch keeps its input, which nothing else does. Its output is added, and not kept.
    second = (of_norms - 1) * hidden if model.norm_placement == "both" else 0
    # Made again: what a norm before a branch returns, and the MLP's silu and product; its limits are kept.
    of_norm = hidden if is_lean and model.norm_placement != "after" else 0
    of_mlp = (4 + _of_limit(model) - is_lean * _num_made_again(model)) * inner
    above = of_norms * hidden - of_norm + second + of_mlp + _of_routing(model)
    is_linear = model.type_of(block) == "linear_attention"
    normed = _of_q_and_k(model, block) if model.qk_norm and of_norms == 3 and not is_linear else 0
    below = of_norms * hidden - of_norm + second + normed + _of_mixing(model, block)
    return BlockWidths(kept=below + above, kept_above=above)


def _inner_width(model: ModelSpec) -> int:
    """Return the width of the MLP, or of all experts together that a token meets."""
    if not model.has_experts:
        return model.intermediate_size
    return (model.num_experts_per_tok + model.num_shared_experts) * model.moe_intermediate_size


def _num_made_again(model: ModelSpec) -> int:
    """Return how many results of the MLP's width can be made again: the product, and the silu in it."""
    return 1 if model.swiglu_limit else 2


def _of_limit(model: ModelSpec) -> int:
    """Return how many values more an expert of limited size keeps for each of its width."""
    return 3 if model.swiglu_limit else 0


def _of_routing(model: ModelSpec) -> int:
    """Return the widths of rows that have come back from their experts, and of the router's scores. Experts that are
    trained keep the rows on their way to them too, and a gate keeps what it weighs.
    """
    num_ways = 1 if model.has_adapter else 2
    weighed = model.hidden_size if model.shared_expert_gate else 0
    return weighed + model.num_experts_per_tok * num_ways * model.hidden_size + 4 * model.num_experts


def _of_mixing(model: ModelSpec, block: int, *, keeps_output: bool = True) -> int:
    """Return the widths of q, k, v and the mix, and of what q and k were before their norms and turns; or what linear
    attention projects, and its mix. keeps_output: the output's projection needs its input.
    """
    if model.type_of(block) == "linear_attention":
        projected = 2 * model.linear_key_width + 2 * model.linear_value_width + 2 * model.linear_num_value_heads
        return projected + model.linear_value_width * keeps_output
    query = model.num_attention_heads * model.head_width_of(block)
    value = model.key_value_heads_of(block) * model.head_width_of(block)
    # Norms keep their inputs. v is a part of a fused projection's output, and keeps all of it.
    before = _of_q_and_k(model, block) if model.qk_norm or model.fused_projections else 0
    if model.value_norm and not model.has_values_of_keys(block):
        before += value
    # The gate and its sigmoid, and the mix times that.
    gate = (2 + keeps_output) * query if model.attn_output_gate else 0
    return query + _of_q_and_k(model, block) + value + before + gate


def _of_q_and_k(model: ModelSpec, block: int) -> int:
    return (model.num_attention_heads + model.key_value_heads_of(block)) * model.head_width_of(block)


def _beside_adapters(model: ModelSpec, train: TrainSpec, block: int, *, is_lean: bool) -> BlockWidths:
    hidden, inner = model.hidden_size, _inner_width(model)
    adapted = adapted_names(model, block)
    in_mlp = [name for name in adapted if name in MLP_MATRICES]
    in_attention = [name for name in adapted if name not in in_mlp]
    has_down = "down_proj" in adapted
    # The norm's input; its output if an adapter reads it. The MLP's gate, up and silu; their product for an adapter.
    num_norms = 2 if model.norm_placement == "both" else 1
    normed = hidden * (not is_lean or model.norm_placement == "after")
    # The experts' rows are kept all the same.
    of_mlp = (hidden if model.has_experts else normed) * any(name != "down_proj" for name in in_mlp)
    of_mlp += inner * (has_down and not is_lean)
    of_attention = normed * any(name not in ("o_proj", "out_proj") for name in in_attention)
    if model.adapter.dropout:  # instead, each adapter keeps an input of its own, and which values that has: bytes
        own = {
            "o_proj": model.num_attention_heads * model.head_width_of(block),
            "out_proj": model.linear_num_value_heads * model.linear_value_head_dim,
            "down_proj": inner,
        }
        of_mlp, of_attention = (sum(own.get(n, hidden) for n in names) for names in (in_mlp, in_attention))
        size = 2 if train.dtype == "bfloat16" else 4
        of_mlp, of_attention = of_mlp + of_mlp // size, of_attention + of_attention // size
    num_met = 1
    if model.has_experts and in_mlp:  # an expert's rows are its own; a token has as many as experts that it meets
        num_met = model.num_experts_per_tok + model.num_shared_experts
        of_mlp += hidden * (num_met - 1) * any(name != "down_proj" for name in in_mlp)
    of_mlp += inner * (3 + _of_limit(model) - is_lean * (_num_made_again(model) - 1))
    above = hidden * num_norms + of_mlp + model.adapter.rank * len(in_mlp) * num_met + _of_routing(model)
    below = hidden * num_norms + of_attention + model.adapter.rank * len(in_attention)
    mixing = _of_mixing(model, block, keeps_output=bool({"o_proj", "out_proj"} & {*adapted}))
    # The gradients of the product, of silu and of up; the first takes the place of the product, if that was kept.
    return BlockWidths(kept=below + above + mixing, kept_above=above, passing=inner * (3 - has_down) + 2 * hidden)
