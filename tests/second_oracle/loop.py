"""The recurrence of docs/numerics.md, section 1: one process, one version of the weights after another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tests.second_oracle.clipping import clipped, norm
from tests.second_oracle.decoder import normed_output
from tests.second_oracle.dropout import kept_inputs
from tests.second_oracle.experts import Routed
from tests.second_oracle.gradient_sums import mean_gradient, mean_tied_gradient
from tests.second_oracle.initial_weights import Weights, initial_adapters, initial_weights
from tests.second_oracle.job import Job
from tests.second_oracle.quantized import through_codes
from tests.second_oracle.token_loss import differentiated_loss, differentiated_preference
from tests.second_oracle.token_windows import Rows, Stream, held_out_microbatch, microbatch
from tests.second_oracle.update import Update
from tests.second_oracle.wire import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a job ends with."""

    losses: list[float]
    weights: Weights
    evaluations: dict[int, float]
    """Loss on held-out text by the batch that begins with it."""
    final_evaluation: float | None
    """Loss on held-out text of the weights; None: a job without evaluations."""
    norms: list[float]
    """Of each batch's gradient, before clipping."""


def train(
    job: Job, streams: Sequence[Stream], *, coded_cuts: Sequence[str] = (), held_out: Sequence[Stream] = ()
) -> Trained:
    """Losses of all batches, and W_B in float32; if evaluations end the job at boundary S, those below S, and W_S. Sets
    the threads of this process.

    coded_cuts: layers whose input, and its gradient, the job's codec rounds.
    """
    settings, delay, k = job.train, job.train.delay, job.train.sync_batches
    torch.set_num_threads(settings.threads)
    wire = Wire(settings.wire, coded_cuts, has_feedback=settings.wire_feedback, num_groups=settings.reduction_groups)
    base = initial_weights(job.model, seed=job.seed)
    if job.adapter.quantize != "none":
        base = through_codes(base, job.adapter.quantize)
    versions = {0: initial_adapters(job.model, job.adapter, seed=job.seed) if job.adapter.rank else base}
    update = Update(job, versions[0])
    losses, evaluations, norms = [], {}, []
    best, num_failed, end = math.inf, 0, settings.batches
    for b in range(settings.batches):
        if b == end:
            break
        version = versions[b if b < k else max(k, b - delay)]
        if settings.eval_every and b % settings.eval_every == 0:
            assert len(held_out) == len(streams), "an evaluation needs validation splits"
            evaluations[b] = evaluation(job, held_out, version, base)
            is_lower = evaluations[b] < best - settings.eval_min_delta
            best, num_failed = (evaluations[b], 0) if is_lower else (best, num_failed + 1)
            if num_failed == settings.eval_patience and not is_lower:
                end = min(end, b + 2 + delay)
        done = [gradient_of(job, streams, wire, version, base, b=b, i=i) for i in range(settings.microbatches)]
        losses.append(mean_loss([value for value, _ in done]))
        gradient = mean_gradient([gradient for _, gradient in done], num_groups=settings.reduction_groups)
        is_tied = job.model.tie_word_embeddings and not job.adapter.rank
        if is_tied:
            tied = mean_tied_gradient([each for _, each in done], num_groups=settings.reduction_groups)
            gradient["embed"]["weight"] = gradient["head"]["lm_head.weight"] = tied
        norms.append(norm(gradient, is_tied=is_tied))
        versions[b + 1] = update(b, versions[b], clipped(gradient, clip_norm=settings.clip_norm, is_tied=is_tied))
        versions.pop(b - delay, None)
    final = evaluation(job, held_out, versions[end], base) if settings.eval_every else None
    return Trained(losses=losses, weights=versions[end], evaluations=evaluations, final_evaluation=final, norms=norms)


def evaluation(job: Job, held_out: Sequence[Stream], weights: Weights, base: Weights) -> float:
    """Mean loss of the held-out microbatches, on links without a codec."""
    wire = Wire("none", (), has_feedback=False, num_groups=1)
    number = job.train.eval_microbatches or job.train.microbatches
    rows = [held_out_microbatch(held_out, job.train, job.weights, i=i, number=number) for i in range(number)]
    return mean_loss([loss_and_gradient(job, each, wire, weights, base, i=0)[0] for each in rows])


def gradient_of(
    job: Job, streams: Sequence[Stream], wire: Wire, weights: Weights, base: Weights, *, b: int, i: int
) -> tuple[float, Weights]:
    """Loss and gradient of one microbatch of a batch."""
    rows = microbatch(streams, job.train, job.weights, seed=job.seed, b=b, i=i)
    draw = f"{job.seed}/{b}/{i}" if job.adapter.dropout else ""
    return loss_and_gradient(job, rows, wire, weights, base, i=i, draw=draw)


def loss_and_gradient(
    job: Job, rows: Rows, wire: Wire, weights: Weights, base: Weights, *, i: int, draw: str = ""
) -> tuple[float, Weights]:
    """Loss and gradient of rows, on the weights in the job's dtype. draw: of the dropout; empty: nothing is dropped."""
    dtype = getattr(torch, job.train.dtype)
    leaves = {
        layer: {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in parameters.items()}
        for layer, parameters in weights.items()
    }
    complete, below = leaves, None
    if job.adapter.rank:
        divisor = math.sqrt(job.adapter.rank) if job.adapter.rslora else job.adapter.rank
        scale = torch.tensor(job.adapter.alpha / divisor, dtype=torch.float64)
        frozen = {layer: {name: tensor.to(dtype) for name, tensor in of.items()} for layer, of in base.items()}
        below = frozen if job.train.objective == "dpo" else None
        complete = {layer: {**frozen[layer], **leaves[layer], "scale": scale} for layer in leaves}
        if draw:
            dropout = torch.tensor(job.adapter.dropout, dtype=torch.float64)
            kept = kept_inputs(weights, *rows.inputs.shape, share=job.adapter.dropout, draw=draw)
            complete = {layer: {**complete[layer], **kept[layer], "dropout": dropout} for layer in leaves}
    routed = Routed(job.train.router_balance_loss, job.train.router_z_loss)
    normed = normed_output(
        job.model,
        complete,
        rows.inputs,
        rows.positions,
        attention_backend=job.train.attention_backend,
        carry=partial(wire.carry, i=i),
        routed=routed,
        frozen=below,
    )
    vocabulary = complete["head"]["lm_head.weight"]
    chunk = job.train.loss_chunk
    scaling = (job.model.logits_scaling, job.model.final_logit_softcapping)
    if below is None:
        value = differentiated_loss(
            normed,
            vocabulary,
            rows.targets,
            scaling=scaling,
            chunk=chunk,
            is_whole=job.train.loss_gradient == "whole",
            divisor=rows.divisor,
            more=routed.losses,
        )
    else:
        assert rows.positions is not None
        assert rows.divisor is not None
        value = differentiated_preference(
            normed,
            vocabulary,
            rows.targets,
            rows.positions,
            scaling=scaling,
            chunk=chunk,
            beta=job.train.dpo_beta,
            divisor=rows.divisor,
        )
    for bias, overload in routed.overloads:
        bias.grad = overload.to(bias.dtype)
    gradients = {layer: {name: _gradient(leaf) for name, leaf in leaves[layer].items()} for layer in leaves}
    return value, gradients


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def mean_loss(values: list[float]) -> float:
    """(Σ_i ℓ_{b,i}) / m in float64, in order of i."""
    total = values[0]
    for value in values[1:]:
        total += value
    return total / len(values)
