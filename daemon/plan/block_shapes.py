"""The shapes of a block's parameters, or of those of its half. Pure."""

from headway.stages.spec import MIXING_HALF, MLP_HALF, ModelSpec, adapted_names, matrix_names


def mixing_shapes(model: ModelSpec, block: int) -> tuple[tuple[int, int], ...]:
    """Return the shapes of the matrices of a block's attention, full or linear: (rows, columns)."""
    hidden, query = model.hidden_size, model.num_attention_heads * model.head_width_of(block)
    key_value = model.key_value_heads_of(block) * model.head_width_of(block)
    inputs: tuple[int, ...] = (query * (1 + model.attn_output_gate), key_value, key_value)
    if model.has_values_of_keys(block):
        inputs = inputs[:2]
    if model.fused_projections:
        inputs = (query + 2 * key_value,)
    elif model.type_of(block) == "linear_attention":
        query, heads = model.linear_value_width, model.linear_num_value_heads
        inputs = (2 * model.linear_key_width + query, query, heads, heads)
    return (*((rows, hidden) for rows in inputs), (hidden, query))


def mlp_shapes(model: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return the shapes of the MLP's matrices, or of all experts': (rows, columns)."""
    hidden, wide = model.hidden_size, model.intermediate_size
    if model.has_experts:
        widths = [model.moe_intermediate_size] * model.num_experts
        if model.num_shared_experts:
            widths.append(model.num_shared_experts * model.moe_intermediate_size)
        return tuple(shape for width in widths for shape in ((width, hidden), (width, hidden), (hidden, width)))
    inputs = (2 * wide,) if model.fuses_gate_up else (wide, wide)
    return (*((rows, hidden) for rows in inputs), (hidden, wide))


def adapter_shapes(model: ModelSpec, block: int, half: str) -> tuple[tuple[int, int], ...]:
    """Return the shapes of a block's adapters, or its half's: (rows, columns) of A and B beside each matrix that has
    them.
    """
    names, of_mixing, of_mlp = matrix_names(model, block), mixing_shapes(model, block), mlp_shapes(model)
    if model.has_experts:  # the three matrices of one expert after those of another
        names = (*names[: len(of_mixing)], *names[len(of_mixing) :] * (len(of_mlp) // 3))
    rank, adapted = model.adapter.rank, adapted_names(model, block)
    named = list(zip(names, (*of_mixing, *of_mlp), strict=True))
    first, end = (len(of_mixing) if half == MLP_HALF else 0), (len(of_mixing) if half == MIXING_HALF else None)
    chosen = [shape for name, shape in named[first:end] if name in adapted]
    return tuple(shape for rows, columns in chosen for shape in ((rank, columns), (rows, rank)))


def vector_sizes(model: ModelSpec, block: int, half: str) -> list[int]:
    """Return the sizes of the parameters of a block, or of its half, that are no matrices for Muon: norms, biases, a
    router's, a convolution's.
    """
    of_norms = [model.hidden_size] * (2 if model.norm_placement == "both" else 1)
    mixing = [] if half == MLP_HALF else of_norms + _mixing_vectors(model, block)
    return mixing if half == MIXING_HALF else mixing + of_norms + _mlp_vectors(model)


def _mixing_vectors(model: ModelSpec, block: int) -> list[int]:
    sizes = []
    if model.type_of(block) == "linear_attention":
        channels = 2 * model.linear_key_width + model.linear_value_width
        sizes += [channels * model.linear_conv_kernel_dim, model.linear_value_head_dim]
        sizes += [model.linear_num_value_heads] * 2
    elif model.qk_norm:
        of_heads = model.num_attention_heads, model.key_value_heads_of(block)
        sizes += [model.head_width_of(block) * (number if model.qk_norm_over == "heads" else 1) for number in of_heads]
    if model.attention_sinks and model.type_of(block) != "linear_attention":
        sizes.append(model.num_attention_heads)
    if model.qkv_bias:
        sizes += [rows for rows, _ in mixing_shapes(model, block)[:-1]]
    if model.output_bias:
        sizes.append(model.hidden_size)
    return sizes


def _mlp_vectors(model: ModelSpec) -> list[int]:
    sizes = []
    if model.layer_scalar:
        sizes.append(1)
    if model.has_experts:
        sizes.append(model.num_experts * model.hidden_size)
    if model.router_bias:
        sizes.append(model.num_experts)
    if model.expert_bias:
        sizes += [model.num_experts, *(rows for rows, _ in mlp_shapes(model))]
    if model.shared_expert_gate:
        sizes.append(model.hidden_size)
    if model.mlp_bias:
        sizes += [rows for rows, _ in mlp_shapes(model)]
    return sizes


def num_idle(model: ModelSpec) -> int:
    """Return the elements of matrices that a token does not meet: those of the experts to which it does not go."""
    idle = model.num_experts - model.num_experts_per_tok
    return 3 * idle * model.hidden_size * model.moe_intermediate_size
