"""Estimates a layer's floating-point operations, and its bytes on the device, from the job alone. Pure.

Matrix products are counted exactly (2 operations per multiply-add, backward twice forward). Memory-bound work is
counted in bytes moved. Until times are measured, a device's rates turn both into seconds. A device whose bandwidth is
not known has it in its speed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Final

from headway.daemon.cluster.records import Device
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.block_shapes import adapter_shapes, mixing_shapes, mlp_shapes, num_idle, vector_sizes
from headway.daemon.plan.block_widths import block_widths
from headway.daemon.plan.update_memory import DTYPE_BYTES, FP32_BYTES, update_bytes
from headway.optim.spec import STEP_COUNT, GroupSpec
from headway.stages.spec import (
    MIXING_HALF,
    MLP_HALF,
    NF4_BLOCK,
    RULE_CHUNK,
    ModelSpec,
    Recompute,
    TrainSpec,
    whole_layer,
)

CPU_FLOPS_PER_THREAD: Final = {"float32": 60e9, "bfloat16": 120e9}
"""Operations a second of small matrix products on one thread: half of the rate of 1024³ products."""
CUDA_FLOPS: Final = {"float32": 30e12, "bfloat16": 300e12}
CPU_BYTES_PER_S: Final = 8e9
CUDA_BYTES_PER_S: Final = 2e12
GIGA: Final = 1e9
START_S: Final = {"embed": 0.1e-3, "block": 0.46e-3, "head": 0.18e-3}
"""Processor seconds in which a core starts the operations of a layer's forward and backward, however small they are: of
`bench/hot_path.py --rows starts`, while all cores compute.
"""
UPDATE_START_S: Final = {"embed": 0.25e-3, "block": 1.0e-3, "head": 0.25e-3}
"""The same of an update."""
FORWARD_PASSES: Final = 2.0
"""Times that the elementwise operations of a forward read or write each byte that it keeps for its backward. A count of
all operations on meta tensors gives 1.8 to 2.1, for blocks of width 1024 to 4096, with the fused kernels of a card.
"""
BACKWARD_PASSES: Final = 3.3
"""The same for those of a backward: 3.1 to 3.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The cost of one layer. Operations and activation bytes are per microbatch, the update's per batch."""

    name: str
    num_parameters: int
    forward_flops: float
    backward_flops: float
    moved_bytes: float
    """Bytes that forward and backward move beside their products: elementwise work, weights, and gradient sums."""
    update_flops: float
    """Operations of Newton–Schulz, or of SOAP's rotations."""
    update_dtype: str
    """Their dtype: its rate counts for them, whatever the job's dtype."""
    largest_update_flops: float
    """The same on the matrix that takes the most."""
    shared_bytes: int
    """Bytes of Newton–Schulz's results, which replicas send each other where they share an update."""
    update_bytes: float
    """Bytes that the elementwise part of the update moves."""
    state_bytes: int
    """Bytes of the layer's file at a boundary: live versions and optimizer state."""
    master_bytes: int
    """Bytes of fp32 masters on the device; 0: the versions are fp32 themselves."""
    version_bytes: int
    """Bytes of the weights as the forward sees them, in two versions."""
    optimizer_bytes: int
    """Bytes of momentum, second moments and Error Feedback."""
    gradient_bytes: int
    """Bytes of gradient sets, except those of the groups."""
    group_bytes: int
    """Bytes on the device for each reduction group whose gradient is summed there."""
    activation_bytes: int
    """Bytes on the device for each microbatch in flight."""
    loss_bytes: int = 0
    """Part of `activation_bytes` that the loss keeps for its backward."""
    backward_bytes: int = 0
    """Part of `gradient_bytes` that one backward returns."""
    moment_bytes: int = 0
    """Bytes that one update takes beside state and gradient. They count for one layer at a time, while no backward has
    its gradients.
    """
    frozen_bytes: int = 0
    """Bytes of the weights beside an adapter: one version, in no file of a boundary."""
    passing_bytes: int = 0
    """Additional bytes for a moment of the backward: a recomputed graph, or the loss's gradients. They count for one
    microbatch, in one layer at a time.
    """

    @property
    def resident_bytes(self) -> int:
        """Return the bytes on the device before any microbatch, except the groups' gradient sets."""
        live = self.master_bytes + self.version_bytes + self.frozen_bytes
        return live + self.optimizer_bytes + self.gradient_bytes

    @property
    def loaded_bytes(self) -> int:
        """Return the bytes that a worker loads which does not have the layer yet."""
        return self.state_bytes + self.frozen_bytes


@lru_cache(maxsize=256)
def layer_costs(spec: JobSpec, recompute: Recompute | None = None) -> tuple[LayerCost, ...]:
    """Return the cost of every layer, in the model's order.

    recompute: what a block's backward computes again; None: the job's own choice, or the fastest one that it allows.
    """
    model, again = spec.model, recompute or spec.train.recomputes[0]
    cost_of = _own_block_cost if model.has_own_block else _block_cost
    costs = (_embed_cost(spec), *(cost_of(spec, name, again) for name in spec.layers[1:-1]), _head_cost(spec))
    return tuple(_beside_frozen(cost, spec, again) for cost in costs) if spec.train.learns_preferences else costs


def _beside_frozen(cost: LayerCost, spec: JobSpec, recompute: Recompute) -> LayerCost:
    """Return the cost of a layer that is computed a second time without adapters, forward alone, on rows of its own."""
    if cost.name == "embed":
        return cost
    is_twice = recompute == "block" and cost.name != "head"
    more_flops = (1 + is_twice) * cost.forward_flops
    return replace(
        cost,
        forward_flops=2 * cost.forward_flops,
        backward_flops=cost.backward_flops + is_twice * cost.forward_flops,
        moved_bytes=cost.moved_bytes * (1 + more_flops / (cost.forward_flops + cost.backward_flops)),
        activation_bytes=cost.activation_bytes + hidden_bytes(spec) // 2,  # the lower half of its output
        passing_bytes=cost.passing_bytes
        + (2 + is_twice) * hidden_bytes(spec),  # both halves beside the whole, forward and backward
    )


def kind_of_layer(name: str) -> str:
    """Return `embed`, `block` or `head`."""
    return name.partition(".")[0]


def microbatch_seconds(cost: LayerCost, device: Device, train: TrainSpec) -> float:
    """Return the seconds of forward and backward of one microbatch of one layer on a device."""
    products = (cost.forward_flops + cost.backward_flops) / _flops(device, train.dtype, train.threads)
    if device.num_cores:
        return products + _part(cost) * START_S[kind_of_layer(cost.name)] / _cores(device, 1)
    return products + (cost.moved_bytes / (GIGA * device.memory_gb_s) if device.memory_gb_s else 0.0)


def update_seconds(cost: LayerCost, device: Device, train: TrainSpec) -> float:
    """Return the seconds of one update of one layer on a device."""
    products = cost.update_flops / _flops(device, cost.update_dtype, train.threads)
    if device.memory_gb_s:
        return products + cost.update_bytes / (GIGA * device.memory_gb_s)
    bandwidth = CUDA_BYTES_PER_S if device.kind == "cuda" else CPU_BYTES_PER_S * _cores(device, 1)
    has_start = device.num_cores and cost.update_bytes
    start_s = _part(cost) * UPDATE_START_S[kind_of_layer(cost.name)] / _cores(device, 1) if has_start else 0.0
    return products + cost.update_bytes / bandwidth / device.speed + start_s


def _part(cost: LayerCost) -> float:
    """Return what part of its kind's operations a layer starts."""
    return 1.0 if cost.name == whole_layer(cost.name) else 0.5


def shareable_part(cost: LayerCost, device: Device, train: TrainSpec) -> float:
    """Return the part of an update's seconds that Newton–Schulz takes, and that replicas can share. In [0, 1]."""
    seconds = update_seconds(cost, device, train)
    products = cost.update_flops / _flops(device, cost.update_dtype, train.threads)
    return products / seconds if seconds else 0.0


def num_hidden(spec: JobSpec) -> int:
    """Return the number of values that a link carries each way per microbatch: the hidden states, or their gradient."""
    return spec.train.hidden_rows * spec.train.sequence_length * spec.model.hidden_size


def hidden_bytes(spec: JobSpec) -> int:
    """Return the bytes of hidden states on their device, and on links without a codec."""
    return num_hidden(spec) * element_bytes(spec.train)


def tied_bytes(spec: JobSpec) -> int:
    """Return the bytes of one reduction group's sum of the tied matrix, which each end sends per batch; 0: no ties."""
    model = spec.model
    return FP32_BYTES * model.vocab_size * model.hidden_size if model.trains_tie else 0


def document_bytes(spec: JobSpec) -> int:
    """Return the bytes that a stage with blocks keeps of a microbatch's documents: masks, cosines and sines."""
    model, train = spec.model, spec.train
    if not train.separates_documents:
        return 0
    num_masks = 2 if 0 < model.sliding_window < train.sequence_length else 1
    width = int((model.global_head_dim or model.head_width) * model.partial_rotary_factor)
    turning = width + (model.rotary_width if model.turns_by_type else 0)
    values = num_masks * train.sequence_length + 2 * turning
    positions = position_bytes(train) if model.has_linear_attention else 0
    return element_bytes(train) * _tokens(train) * values + positions


def position_bytes(train: TrainSpec) -> int:
    """Return the bytes of a microbatch's positions, which go down with its hidden states."""
    return 4 * _tokens(train) if train.separates_documents else 0


def evaluation_bytes(spec: JobSpec) -> float:
    """Return the bytes of held-out microbatches that a link carries down per microbatch, the mean over all batches.

    They are never coded. No gradient of theirs comes up.
    """
    return spec.train.evaluated_share * (hidden_bytes(spec) + position_bytes(spec.train))


def element_bytes(train: TrainSpec) -> int:
    """Return the bytes of one weight or activation as the forward sees it."""
    return DTYPE_BYTES[train.dtype]


def _flops(device: Device, dtype: str, threads: int) -> float:
    """Return the operations a second of matrix products of a dtype on a device."""
    reference = CUDA_FLOPS[dtype] if device.kind == "cuda" else CPU_FLOPS_PER_THREAD[dtype] * _cores(device, threads)
    return reference * device.speed_of(dtype)


def _cores(device: Device, threads: int) -> float:
    """Return how many cores a CPU's threads keep busy."""
    return min(threads, device.num_cores or threads)


def _tokens(train: TrainSpec) -> int:
    """Return the tokens of one microbatch."""
    return train.microbatch_size * train.sequence_length


def _frozen_bytes(spec: JobSpec, matrices: Sequence[tuple[int, int]], num_others: int) -> int:
    """Return the bytes of a block's weights beside its adapters: quantized matrices are codes and float32 scales."""
    size, num_elements = element_bytes(spec.train), sum(rows * columns for rows, columns in matrices)
    if spec.model.adapter.quantize == "nf4":
        of_matrices = sum(-(-n // 2) - FP32_BYTES * (-n // NF4_BLOCK) for n in (r * c for r, c in matrices))
    elif spec.model.adapter.quantize == "int8":
        of_matrices = num_elements + FP32_BYTES * sum(rows for rows, _ in matrices)
    else:
        of_matrices = size * num_elements
    return of_matrices + size * num_others


def _dequantized_bytes(spec: JobSpec, matrices: Sequence[tuple[int, int]]) -> int:
    """Return the bytes of a quantized matrix while it is used. int8 passes through float32."""
    if spec.model.adapter.quantize == "none":
        return 0
    size = element_bytes(spec.train)
    if spec.model.adapter.quantize == "int8" and spec.train.dtype != "float32":
        size += FP32_BYTES
    return size * max(rows * columns for rows, columns in matrices)


def _update_flops(group: GroupSpec, rows: int, columns: int) -> float:
    """Return the operations of the products in a matrix's update, of the mean update if they differ."""
    if group.kind.newton_schulz:
        # A = X Xᵀ, A², and B X, on the shorter side r, take 4 r² c + 2 r³ each step.
        short, long = min(rows, columns), max(rows, columns)
        return group.kind.newton_schulz * group.newton_schulz_steps * (4.0 * short * short * long + 2.0 * short**3)
    if group.name != "soap":
        return 0.0
    # By each basis, of the gradient, the mean and back, and a Gram matrix; seldom a product and QR, of 8/3 n³.
    sides = [size for size in (rows, columns) if size <= group.max_precondition_dim]
    return sum(8.0 * rows * columns * size + 14 / 3 * size**3 / group.precondition_frequency for size in sides)


def _sequence_costs(model: ModelSpec, train: TrainSpec, index: int) -> tuple[float, int, int]:
    """Return what a block does along the sequence: operations per token, kept bytes, and passing bytes."""
    if model.type_of(index) == "linear_attention":
        return _rule_flops(model), 0, _rule_bytes(model, train)
    attention = 4.0 * train.sequence_length * model.num_attention_heads * model.head_width_of(index)
    # gradients of the scores after and before the softmax
    return attention, _attention_bytes(model, train, index), 2 * _score_bytes(model, train)


def _block_cost(spec: JobSpec, name: str, recompute: Recompute) -> LayerCost:
    """Return the cost of a block, or of half of one beside whose layer the stage has not the other half."""
    model, train, group = spec.model, spec.train, spec.optim.matrices
    index, _, half = name.removeprefix("block.").partition(".")
    block, mixes, has_mlp = int(index), half != MLP_HALF, half != MIXING_HALF
    of_attention = mixing_shapes(model, block) if mixes else ()
    shapes = (*of_attention, *(mlp_shapes(model) if has_mlp else ()))
    num_matrix, vectors = sum(rows * columns for rows, columns in shapes), vector_sizes(model, block, half)
    num_used = num_matrix - has_mlp * num_idle(model)
    tokens, size = _tokens(train), element_bytes(train)
    plain, widths = (
        block_widths(model, train, block=block, recompute=each).of_half(half) for each in ("none", recompute)
    )
    is_linear = mixes and model.type_of(block) == "linear_attention"
    attention, kept, passing = _sequence_costs(model, train, block) if mixes else (0.0, 0, 0)
    of_rule, again = (passing, tokens * attention) if is_linear else (0, 0.0)  # the rule is always computed again
    whole, kept = tokens * size * plain.kept + kept, tokens * size * widths.kept + kept
    above, of_input = tokens * size * widths.kept_above, tokens * size * model.hidden_size
    made_again = plain.kept_above - widths.kept_above  # by 10 operations each, and there at the MLP's fullest moment
    of_mlp, again = tokens * size * (plain.passing + made_again), again + 10.0 * tokens * made_again
    if recompute == "attention" or is_linear:
        # Before they are computed again, the backward of the block's other half has freed what that kept.
        passing -= above
    if recompute == "block":
        kept, again = of_input, again + tokens * (2.0 * num_used + attention)
        of_mlp, passing = of_mlp + whole - kept, passing + whole - kept
    elif recompute == "attention" and mixes:
        kept = of_input + above  # all from attention's output on
        passing += whole - tokens * size * plain.kept_above - of_input
        again += tokens * (2.0 * sum(rows * columns for rows, columns in of_attention) + attention)
    trained, others, num_adapter = shapes, vectors, 0
    if model.has_adapter:
        trained, others = adapter_shapes(model, block, half), []
        num_adapter = sum(rows * columns for rows, columns in trained)
    return _cost(
        spec,
        name,
        parts=((trained, group), ([(size,) for size in others], spec.optim.rest)),
        frozen_bytes=_frozen_bytes(spec, shapes, sum(vectors)) if model.has_adapter else 0,
        frozen_flops=2.0 * tokens * num_used if model.has_adapter else 0.0,
        moment_bytes=update_bytes(spec, trained, others),
        forward_flops=tokens * (2.0 * (num_used + num_adapter) + attention),
        passed_bytes=(FORWARD_PASSES + BACKWARD_PASSES) * (whole + of_rule) + FORWARD_PASSES * (whole - kept + of_rule),
        matrices=trained,
        recomputed_flops=again,
        activation_bytes=kept,
        passing_bytes=max(passing, of_mlp, 0) + _dequantized_bytes(spec, shapes),
    )


def _own_block_cost(spec: JobSpec, name: str, recompute: Recompute) -> LayerCost:
    """Return the cost of a plug-in's block, by what was counted when the job was submitted."""
    shapes = [shape for _, shape in spec.model.block_shapes]
    matrices = [(shape[0], shape[1]) for shape in shapes if len(shape) == 2]
    others = [shape for shape in shapes if len(shape) != 2]
    group, whole = spec.optim.matrices, spec.plugins.block_values * element_bytes(spec.train)
    is_again = recompute == "block"
    kept = hidden_bytes(spec) if is_again else whole
    return _cost(
        spec,
        name,
        parts=((matrices, group), (others, spec.optim.rest)),
        moment_bytes=update_bytes(spec, matrices, [prod(shape) for shape in others]),
        forward_flops=spec.plugins.block_flops,
        passed_bytes=(FORWARD_PASSES + BACKWARD_PASSES) * whole + FORWARD_PASSES * (whole - kept),
        matrices=matrices,
        recomputed_flops=is_again * spec.plugins.block_flops,
        activation_bytes=kept,
        passing_bytes=max(whole - kept, hidden_bytes(spec)),
    )


def _embed_cost(spec: JobSpec) -> LayerCost:
    """Return the cost of a look-up without product. Its activations are the hidden states and the tokens."""
    model, train = spec.model, spec.train
    num_matrix = model.vocab_size * model.hidden_size
    return _cost(
        spec,
        "embed",
        parts=() if model.has_adapter else (([(model.vocab_size, model.hidden_size)], spec.optim.rest),),
        frozen_bytes=element_bytes(spec.train) * num_matrix if model.has_adapter else 0,
        moment_bytes=update_bytes(spec, (), [] if model.has_adapter else [num_matrix]),
        forward_flops=2.0 * _tokens(train) * model.hidden_size,
        passed_bytes=(FORWARD_PASSES + BACKWARD_PASSES) * hidden_bytes(spec),
        activation_bytes=hidden_bytes(spec) + 16 * _tokens(train),
    )


def _head_cost(spec: JobSpec) -> LayerCost:
    """Return the cost of norm, product with the vocabulary, and the loss.

    The loss keeps its fp32 log-softmax. In its backward the fp32 gradients of that and of the logits come to it: 12
    bytes a logit in all, in either dtype, before the gradient of the head's weights is there. Its forward needs less.
    In chunks it keeps none, but the gradients of its input and of the weight. The forward makes them, the weight's as
    an fp32 sum beside the chunk's own, or from the gradients of all logits. Of preferences each chunk is computed a
    second time instead.
    """
    model, train = spec.model, spec.train
    num_matrix = model.vocab_size * model.hidden_size
    logits = _tokens(train) * model.vocab_size
    is_frozen = model.has_adapter
    own_gradient = 0 if is_frozen else element_bytes(train) * (num_matrix + model.hidden_size)
    of_tanh = element_bytes(train) if model.final_logit_softcapping else 0
    kept, passing = (FP32_BYTES + of_tanh) * logits, max(2 * FP32_BYTES * logits - own_gradient, 0)
    # Logits are made fp32 and log-softmax; the gradients of both are made, and those of the logits in the job's dtype.
    of_forward = 2 * FP32_BYTES + (FP32_BYTES + element_bytes(train)) * (train.dtype != "float32")
    moved = (2 * of_forward + 2 * FP32_BYTES) * logits
    is_again = train.loss_chunk > 0 and train.learns_preferences
    if train.loss_chunk:
        rows = min(train.loss_chunk, _tokens(train))
        of_matrix, sum_bytes = (0 if is_frozen else size * num_matrix for size in (element_bytes(train), FP32_BYTES))
        moved += is_again * of_forward * logits
        kept = 0 if is_again else hidden_bytes(spec) + of_matrix
        of_chunk = (3 * FP32_BYTES + of_tanh) * rows * model.vocab_size
        if train.loss_gradient == "whole":  # no chunk is left when its product is made
            moved += 2 * element_bytes(train) * logits
            passing = element_bytes(train) * logits + max(of_chunk - of_matrix, 0) - own_gradient
        else:
            moved += 2 * (sum_bytes + of_matrix) * -(-_tokens(train) // rows)
            passing = of_chunk + sum_bytes - own_gradient
        passing = max(passing, 0)
    return _cost(
        spec,
        "head",
        parts=() if is_frozen else (([(model.vocab_size, model.hidden_size), (model.hidden_size,)], spec.optim.rest),),
        frozen_bytes=element_bytes(train) * (num_matrix + model.hidden_size) if is_frozen else 0,
        frozen_flops=_tokens(train) * 2.0 * num_matrix if is_frozen else 0.0,
        moment_bytes=update_bytes(spec, (), [] if is_frozen else [num_matrix, model.hidden_size]),
        forward_flops=_tokens(train) * 2.0 * num_matrix + 10.0 * logits,
        passed_bytes=2 * (FORWARD_PASSES + BACKWARD_PASSES) * hidden_bytes(spec) + moved,
        recomputed_flops=is_again * (_tokens(train) * 2.0 * num_matrix + 10.0 * logits),
        activation_bytes=2 * _tokens(train) * element_bytes(train) * model.hidden_size + kept,
        loss_bytes=kept,
        passing_bytes=passing,
    )


def _rule_flops(model: ModelSpec) -> float:
    """Return the operations of the gated delta rule a token: pairs inside a chunk, and reads and writes of the
    state.
    """
    keys, values = model.linear_key_head_dim, model.linear_value_head_dim
    return 2.0 * model.linear_num_value_heads * (RULE_CHUNK * (3 * keys + 2 * values) + 3 * keys * values)


def _rule_bytes(model: ModelSpec, train: TrainSpec) -> int:
    """Return the bytes of what the gated delta rule computes again for its backward, and of gradients inside it, all in
    float32. Their coefficients are a fit to measured peaks.
    """
    channels = 2 * model.linear_key_width + model.linear_value_width
    keys = model.linear_num_value_heads * model.linear_key_head_dim
    values, pairs = model.linear_value_width, model.linear_num_value_heads * RULE_CHUNK
    # Inputs of a convolution that is trained, tap by tap; matrices of pairs; a state for each chunk.
    num_copies = 0 if model.has_adapter else model.linear_conv_kernel_dim - 1
    width = (2 + num_copies) * channels + 7 * keys + 9 * values + 15 * pairs // 2
    states = -(-train.sequence_length // RULE_CHUNK) * train.microbatch_size * keys * model.linear_value_head_dim
    return FP32_BYTES * (_tokens(train) * width + states)


def _attention_bytes(model: ModelSpec, train: TrainSpec, block: int) -> int:
    """Return what the kernel of attention keeps of a microbatch, beside its inputs and its output.

    A fused kernel keeps one fp32 log-sum-exp a token and head, `math` all scores after the softmax, in fp32. `auto` is
    resolved when a job is submitted; before that it counts as fused.
    """
    tokens = _tokens(train)
    has_copies = train.attention_backend == "math" or (train.attention_backend, train.dtype) == ("efficient", "float32")
    copied = 2 * (model.num_attention_heads - model.key_value_heads_of(block)) * model.head_width_of(block)
    num_copied = copied if has_copies or model.attn_logit_softcapping else 0
    if model.attn_logit_softcapping:
        # The tanh and the shares, which in bfloat16 are there twice.
        return element_bytes(train) * tokens * num_copied + 2 * _score_bytes(model, train)
    if train.attention_backend == "math" and model.attention_sinks:
        # The shares, which in bfloat16 are there twice.
        times = 3 if train.dtype == "bfloat16" else 2
        return element_bytes(train) * tokens * num_copied + times * _score_bytes(model, train) // 2
    if train.attention_backend == "math":
        return FP32_BYTES * tokens * num_copied + _score_bytes(model, train)
    return FP32_BYTES * tokens * (num_copied + model.num_attention_heads)


def _score_bytes(model: ModelSpec, train: TrainSpec) -> int:
    """Return the bytes of a microbatch's fp32 scores in one block; 0: the kernel keeps none."""
    if train.attention_backend != "math" and not model.attn_logit_softcapping:
        return 0
    return FP32_BYTES * model.num_attention_heads * _tokens(train) * train.sequence_length


def _slot_bytes(shapes: Sequence[tuple[int, ...]], group: GroupSpec) -> int:
    """Return the bytes of an optimizer's state for parameters of these shapes, without Error Feedback's."""
    of_one = {
        shape: sum(
            _dtype_bytes(each.dtype) * prod(each.shape) for each in group.state_of(shape) if each.slot != STEP_COUNT
        )
        for shape in set(shapes)
    }
    return sum(of_one[shape] for shape in shapes)


def _dtype_bytes(dtype: str) -> int:
    """Return the bytes of an element of any dtype of torch: a plug-in may keep what it likes."""
    bits = re.search("[0-9]+", dtype)
    return int(bits[0]) // 8 if bits else 1


def _cost(
    spec: JobSpec,
    name: str,
    *,
    parts: tuple[tuple[Sequence[tuple[int, ...]], GroupSpec], ...],
    forward_flops: float,
    passed_bytes: float,
    activation_bytes: int,
    moment_bytes: int,
    matrices: Sequence[tuple[int, int]] = (),
    loss_bytes: int = 0,
    passing_bytes: int = 0,
    recomputed_flops: float = 0.0,
    frozen_bytes: int = 0,
    frozen_flops: float = 0.0,
) -> LayerCost:
    """passed_bytes: of the elementwise work, and of what is beside the sum of each gradient and two uses of weights.

    parts: the shapes of what is trained, by its optimizer.
    matrices: shapes of those of `matrices` in [optim]. recomputed_flops: the part of the forward that the
    backward computes again. frozen_flops: the part of the forward whose weights get no gradient.
    """
    train, group = spec.train, spec.optim.matrices
    num_parameters = sum(prod(shape) for shapes, _ in parts for shape in shapes)
    of_matrices = [_update_flops(group, *shape) for shape in matrices]
    shared = matrices if group.kind.is_muon else ()
    backward_flops = 2.0 * forward_flops + recomputed_flops - frozen_flops
    slot_bytes = sum(_slot_bytes(shapes, group) for shapes, group in parts)
    if spec.optim.error_feedback * train.delay > 0:
        slot_bytes += num_parameters * DTYPE_BYTES[spec.optim.error_feedback_dtype]
    master_bytes = FP32_BYTES * num_parameters if train.dtype == "bfloat16" else 0
    set_bytes = element_bytes(train) * num_parameters
    live_bytes = master_bytes + (train.delay if master_bytes else 1 + train.delay) * set_bytes
    return LayerCost(
        name=name,
        num_parameters=num_parameters,
        forward_flops=forward_flops,
        backward_flops=backward_flops,
        # Forward and backward read the weights; a gradient is written, and read with its sum, which is written.
        moved_bytes=passed_bytes + 2 * (set_bytes + frozen_bytes) + 2 * set_bytes + 2 * FP32_BYTES * num_parameters,
        update_flops=sum(of_matrices),
        update_dtype=group.newton_schulz_dtype,
        largest_update_flops=max(of_matrices, default=0.0),
        shared_bytes=sum(rows * columns for rows, columns in shared) * DTYPE_BYTES[group.newton_schulz_dtype],
        # Read the weights, the gradient and every slot, write the weights and every slot; twice for temporaries.
        update_bytes=2.0 * (3 * FP32_BYTES * num_parameters + 2 * slot_bytes),
        state_bytes=live_bytes + slot_bytes,
        master_bytes=master_bytes,
        version_bytes=2 * set_bytes,
        optimizer_bytes=slot_bytes,
        # The set that waits for its update under delay 1, and what one backward returns, in the job's dtype.
        gradient_bytes=FP32_BYTES * train.delay * num_parameters + set_bytes,
        backward_bytes=set_bytes,
        moment_bytes=moment_bytes,
        group_bytes=FP32_BYTES * num_parameters,
        activation_bytes=activation_bytes,
        loss_bytes=loss_bytes,
        frozen_bytes=frozen_bytes,
        passing_bytes=passing_bytes,
    )
