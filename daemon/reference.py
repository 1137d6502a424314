"""The oracle: the recurrence of docs/numerics.md in one plain loop, with autograd over the whole model.

Whatever the cluster does to a job must end in the bits that this loop ends in. So it shares with the pipeline what
computes a layer, draws a batch and steps an optimizer, and nothing that schedules, sends, stores or recovers.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call

from headway.optim.layer_optimizer import optimizer_factory
from headway.stages.determinism import configure
from headway.stages.ids import LayerName
from headway.stages.initial_weights import initial_parameters
from headway.stages.model import build_layer, token_loss
from headway.stages.optimizer import OptimizerFactory
from headway.stages.spec import weight_version
from headway.stages.tokens import TokenShards

if TYPE_CHECKING:
    from headway.daemon.job import JobSpec

Weights = dict[str, dict[str, Tensor]]
"""Layer name to parameter name to tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What one batch gave."""

    batch: int
    loss: float
    """Mean over the microbatches, nats per token."""
    tokens: int
    seconds: float


def reference(
    job: "JobSpec",
    tokens: TokenShards,
    *,
    on_batch: Callable[[BatchResult], None],
    device: torch.device | str = "cpu",
    optimizers_from: OptimizerFactory | None = None,
) -> Weights:
    """Train a job in this process and return W_B: fp32, whatever the job's dtype. `on_batch` is told of each batch.

    optimizers_from replaces the job's own optimizers. Sets the process's threads and determinism (`configure`).
    """
    train, m = job.train, job.train.microbatches
    device = torch.device(device)
    configure(train, device)
    dtype = getattr(torch, train.dtype)

    layers = {name: build_layer(name, job.model, attention_backend=train.attention_backend) for name in job.layers}
    master = {name: _moved(initial_parameters(name, job.model, seed=job.job.seed), device) for name in layers}
    make_optimizer = optimizers_from or optimizer_factory(job.optim, num_batches=train.batches, delay=train.delay)
    optimizers = {name: make_optimizer(LayerName(name), master[name]) for name in layers}
    # W_k lives in sets[k % 2]. In a float32 job the sets are the weights; in a bfloat16 job they are casts of `master`.
    sets = [_trainable(master, dtype), _trainable(master, dtype)]

    for b in range(train.batches):
        started = perf_counter()
        weights = sets[weight_version(b, train.delay) % 2]
        parameters = [weights[name][parameter] for name in layers for parameter in weights[name]]
        losses: list[Tensor] = []
        group_sums: list[list[Tensor]] = [[] for _ in range(train.reduction_groups)]
        for i in range(m):
            inputs, targets = tokens.microbatch(
                seed=job.job.seed, batch=b, microbatch=i, size=train.microbatch_size, length=train.sequence_length
            )
            hidden = inputs.to(device)
            for name, layer in layers.items():
                hidden = functional_call(layer, weights[name], (hidden,))
            loss = token_loss(hidden, targets.to(device))
            gradients = torch.autograd.grad(loss, parameters)
            _accumulate(group_sums[i % train.reduction_groups], gradients)
            losses.append(loss.detach())

        with torch.no_grad():
            summed = group_sums[0]
            for group in group_sums[1:]:
                _accumulate(summed, group)
            for total in summed:
                total.mul_(1 / m)
            numbered = iter(summed)
            gradient = {name: {parameter: next(numbered) for parameter in weights[name]} for name in layers}
            if train.clip_norm > 0:
                _clip(gradient, train.clip_norm)
            for name in layers:
                if dtype == torch.float32:
                    current, target = sets[b % 2][name], sets[(b + 1) % 2][name]
                    optimizers[name].step(b, current=current, target=target, gradients=gradient[name])
                else:
                    optimizers[name].step(b, current=master[name], target=master[name], gradients=gradient[name])
                    for parameter, tensor in master[name].items():
                        sets[(b + 1) % 2][name][parameter].copy_(tensor)

        loss_sum = _fold(torch.stack(losses).tolist())
        on_batch(
            BatchResult(batch=b, loss=loss_sum / m, tokens=train.tokens_per_batch, seconds=perf_counter() - started)
        )

    final = sets[train.batches % 2] if dtype == torch.float32 else master
    return {name: {parameter: tensor.detach() for parameter, tensor in final[name].items()} for name in layers}


def _accumulate(sums: list[Tensor], gradients: Iterable[Tensor]) -> None:
    """Add to a group's sums, in fp32; the first microbatch begins them."""
    if sums:
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(gradient.float())
    else:
        sums.extend(gradient.float().contiguous() for gradient in gradients)


def _clip(gradient: Weights, clip_norm: float) -> None:
    """Scale the whole model's gradient down to a norm of at most clip_norm."""
    squares = []
    for layer in reversed(gradient.values()):
        of_parameters = [layer[name].double().square().sum() for name in sorted(layer)]
        squares.append(_fold(torch.stack(of_parameters).tolist()))
    coefficient = min(1.0, clip_norm / (math.sqrt(_fold(squares)) + 1e-6))
    for layer in gradient.values():
        for tensor in layer.values():
            tensor.mul_(coefficient)


def _fold(numbers: list[float]) -> float:
    """Left to right. Not `sum`, which compensates its rounding since Python 3.12."""
    return reduce(add, numbers)


def _moved(parameters: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in parameters.items()}


def _trainable(weights: Weights, dtype: torch.dtype) -> Weights:
    """A tensor set: a copy of the weights that autograd differentiates by."""
    return {
        layer: {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in parameters.items()}
        for layer, parameters in weights.items()
    }
