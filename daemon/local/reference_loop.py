"""The oracle: the recurrence of docs/numerics.md in one plain loop, with autograd over the whole model.

Every run of a job on a cluster must end in the bits of this loop. So it shares with the pipeline the code that computes
a layer, draws a batch and steps an optimizer. It shares nothing that schedules, sends, stores or recovers.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headway.optim.layer_optimizer import optimizer_factory
from headway.stages.data.microbatch import Microbatch
from headway.stages.data.tokens import TokenShards
from headway.stages.early_stop import EvaluationTally, StopRule
from headway.stages.errors import NonFiniteLossError
from headway.stages.ids import LayerName
from headway.stages.links.codec import Codec, codec_between
from headway.stages.links.compression import Feedback, decode, encode
from headway.stages.model.adapters import set_draw
from headway.stages.model.compilation import compile_ahead, compile_layer
from headway.stages.model.decoder import build_layer
from headway.stages.model.determinism import configure
from headway.stages.model.experts import set_router_losses
from headway.stages.model.flash3 import choose_flash
from headway.stages.model.initial_weights import frozen_beside, initial_adapters, initial_parameters
from headway.stages.model.objective import beside_frozen, objective_loss
from headway.stages.model.positions import document_rows
from headway.stages.spec import ROUTER_BIAS, TIED, layer_names
from headway.stages.state.optimizer import OptimizerFactory

if TYPE_CHECKING:
    from headway.daemon.jobs.job import JobSpec

Weights = dict[str, dict[str, Tensor]]
"""Layer name to parameter name to tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The result of one batch."""

    batch: int
    loss: float
    """Mean over the microbatches, nats per token."""
    tokens: int
    seconds: float
    eval_loss: float | None = None
    """Mean over the evaluation's held-out microbatches; None: the batch begins without one."""
    gradient_norm: float
    """Of the batch's gradient, before clipping."""
    final_eval_loss: float | None = None
    """As `eval_loss`, on the weights that `reference` returns; None: there are no evaluations, or more batches."""


def reference(
    job: "JobSpec",
    tokens: TokenShards,
    *,
    on_batch: Callable[[BatchResult], None],
    coded_cuts: Sequence[str] = (),
    device: torch.device | str = "cpu",
    optimizers_from: OptimizerFactory | None = None,
    initial: Callable[[str], dict[str, Tensor]] | None = None,
    adapters: Callable[[str], dict[str, Tensor]] | None = None,
    last_evaluated: int = 0,
) -> Weights:
    """Train a job in this process and return W_B: fp32, for any dtype of the job. `on_batch` is called with each batch.
    If evaluations end the job at boundary S, it is W_S.

    Under an adapter that is the adapters alone.

    Raises NonFiniteLossError at a batch with such a loss, unless the job continues; CompilationError, KernelError.

    coded_cuts: layers whose input, and its gradient, the job's codec rounds: the first layers of the stages whose links
    with the earlier stage are coded. A cluster with these cuts, and one plan from beginning to end, has equal bits.

    optimizers_from replaces the job's own optimizers. initial: returns a layer's W_0 in fp32; None: the seed says it.
    adapters: returns those with which a layer begins; None: as `initial`. last_evaluated: held-out microbatches of the
    evaluation after the last update; 0: as the job says. Sets the process's threads and determinism (`configure`).
    """
    train, device, names = job.train, torch.device(device), layer_names(job.model)
    configure(train, device)
    choose_flash(job.model, train, device)
    if train.compile:
        compile_ahead(names, job.model, train, device)
    if initial is None:
        initial = partial(initial_parameters, spec=job.model, seed=job.job.seed)
    frozen = Weights()
    if job.model.has_adapter:
        frozen = {n: frozen_beside(initial(n), LayerName(n), job.model, train, device=device) for n in names}
        initial = adapters or partial(initial_adapters, spec=job.model, seed=job.job.seed)
    master = {name: _moved(initial(name), device) for name in names}
    make_optimizer = optimizers_from or optimizer_factory(job.optim, **train.of_optimizers)
    versions = _Versions(job, master, frozen, make_optimizer)
    cuts = {name: _CodedCut(job) for name in coded_cuts}
    rule, tally, end = StopRule.of(train), EvaluationTally(), train.batches
    last = last_evaluated or (train.num_evaluated if train.eval_every else 0)
    for b in range(train.batches):
        if b == end:
            break
        started = perf_counter()
        version = train.weight_version(b) % 2
        model = versions.models[version]
        eval_loss = _evaluated(job, model, tokens, device, train.num_evaluated) if train.evaluates(b) else None
        if rule is not None and eval_loss is not None:
            tally = rule.judge(tally, b, eval_loss)
            end = tally.end or train.batches
        losses, group_sums = _gradients(job, model, versions.parameters[version], tokens, b, cuts, device)
        norm = versions.step(b, group_sums)
        loss, seconds = _fold(losses) / train.microbatches, perf_counter() - started
        known = partial(BatchResult, batch=b, tokens=train.tokens_per_batch, gradient_norm=norm)
        final = _evaluated(job, versions.models[end % 2], tokens, device, last) if last and b + 1 == end else None
        on_batch(known(loss=loss, seconds=seconds, eval_loss=eval_loss, final_eval_loss=final))
    return versions.weights(end)


class _Versions:
    """The two weight versions that are alive, and what takes one to the next."""

    def __init__(self, job: "JobSpec", master: Weights, frozen: Weights, make_optimizer: OptimizerFactory) -> None:
        self._job = job
        self._dtype = getattr(torch, job.train.dtype)
        self._master = master
        """W_b in fp32, of a job that computes in another dtype. Of a float32 job it is W_0 for ever."""
        self._optimizers = {name: make_optimizer(LayerName(name), master[name]) for name in master}
        self.models = [_assembled(job, master, frozen, self._dtype) for _ in range(2)]
        """W_k is in models[k % 2]. A float32 job's weights are these; those of another job are casts of `master`."""
        self._sets = [{name: _trained(layer) for name, layer in model.items()} for model in self.models]
        self.parameters = [[each for layer in trained.values() for each in layer.values()] for trained in self._sets]

    @torch.no_grad()
    def step(self, b: int, group_sums: list[list[Tensor]]) -> float:
        """Make W_{b+1} of W_b and the gradients of batch b; return their norm. The sums are used up."""
        job, train = self._job, self._job.train
        if job.model.trains_tie:
            _tie(group_sums)
        summed = group_sums[0]
        for group in group_sums[1:]:
            _accumulate(summed, group)
        torch._foreach_mul_(summed, 1 / train.microbatches)
        numbered = iter(summed)
        gradient = {
            name: {parameter: next(numbered) for parameter in trained} for name, trained in self._master.items()
        }
        norm = norm_of(gradient, is_tied=job.model.trains_tie)
        if train.clip_norm > 0:
            coefficient = min(1.0, train.clip_norm / (norm + 1e-6))
            for tensor in summed:
                tensor.mul_(coefficient)
        current, target = self._sets[b % 2], self._sets[(b + 1) % 2]
        for name, optimizer in self._optimizers.items():
            if self._dtype == torch.float32:
                optimizer.step(b, current=current[name], target=target[name], gradients=gradient[name])
                continue
            master = self._master[name]
            optimizer.step(b, current=master, target=master, gradients=gradient[name])
            for parameter, tensor in master.items():
                target[name][parameter].copy_(tensor)
        return norm

    def weights(self, boundary: int) -> Weights:
        """Return W_boundary, the newest version, in fp32."""
        final = self._sets[boundary % 2] if self._dtype == torch.float32 else self._master
        return {name: {parameter: tensor.detach() for parameter, tensor in final[name].items()} for name in final}


def _gradients(
    job: "JobSpec",
    model: dict[str, nn.Module],
    parameters: Sequence[Tensor],
    tokens: TokenShards,
    batch: int,
    cuts: Mapping[str, "_CodedCut"],
    device: torch.device,
) -> tuple[list[float], list[list[Tensor]]]:
    """Return the losses of a batch's microbatches, and the sums of their gradients in each reduction group.

    Raises NonFiniteLossError.
    """
    train, m = job.train, job.train.microbatches
    losses: list[Tensor] = []
    group_sums: list[list[Tensor]] = [[] for _ in range(train.reduction_groups)]
    for i in range(m):
        rows = tokens.microbatch(train, seed=job.job.seed, batch=batch, microbatch=i)
        carry = {name: partial(cut.carry, microbatch=i) for name, cut in cuts.items()}
        loss = _loss(job, model, rows, device, carry=carry, draw=f"{job.job.seed}/{batch}/{i}")
        _accumulate(group_sums[i % train.reduction_groups], torch.autograd.grad(loss, parameters))
        losses.append(loss.detach())
    found: list[float] = torch.stack(losses).tolist()
    for i, value in enumerate(found):
        if job.fault.non_finite == "stop" and not math.isfinite(value):
            raise NonFiniteLossError(batch, i, value)
    return found, group_sums


def _loss(
    job: "JobSpec",
    model: dict[str, nn.Module],
    rows: Microbatch,
    device: torch.device,
    *,
    carry: Mapping[str, Callable[[Tensor], Tensor]],
    draw: str = "",
) -> Tensor:
    """Return the loss [] of a microbatch. carry: what happens to the input of a layer on a coded link. draw: see
    `set_draw`.
    """
    hidden, positions, documents = rows.inputs.to(device), None, None
    if rows.positions is not None:
        positions = rows.positions.to(device)
        documents = document_rows(positions, job.model, getattr(torch, job.train.dtype))
    is_doubled = job.train.learns_preferences
    for name, layer in model.items():
        set_draw(layer, draw)
        if name in carry:
            hidden = carry[name](hidden)
        if name != "head":
            beside = () if documents is None or name == "embed" else (documents,)
            hidden = beside_frozen(layer, hidden, *beside) if is_doubled else layer(hidden, *beside)
    divisor = None if rows.mean_tokens is None else rows.mean_tokens.to(device)
    targets = rows.targets.to(device)
    return objective_loss(model["head"], hidden, job.train, targets=targets, positions=positions, divisor=divisor)


@torch.no_grad()
def _evaluated(
    job: "JobSpec", model: dict[str, nn.Module], tokens: TokenShards, device: torch.device, number: int
) -> float:
    """Return the mean loss of so many held-out microbatches."""
    train = replace(job.train, eval_microbatches=number)
    losses = [_loss(job, model, tokens.held_out(train, i), device, carry={}) for i in range(number)]
    return _fold(torch.stack(losses).tolist()) / number


class _CodedCut:
    """A coded link in the middle of the loop: rounds hidden states downwards, and gradients upwards."""

    def __init__(self, job: "JobSpec") -> None:
        self.codec = codec_between(job.train, is_between_sites=True)
        has_feedback = self.codec is Codec.INT8 and job.train.wire_feedback
        self.feedback = Feedback(self.codec, num_groups=job.train.reduction_groups) if has_feedback else None

    def carry(self, hidden: Tensor, microbatch: int) -> Tensor:
        """Return the hidden states that arrive."""
        carried: Tensor = _Carried.apply(hidden, self, microbatch)  # type: ignore[no-untyped-call]
        return carried


class _Carried(torch.autograd.Function):
    """The codec both ways; the identity for autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, cut: _CodedCut, microbatch: int) -> Tensor:
        ctx.cut, ctx.microbatch = cut, microbatch
        return decode(encode(hidden, cut.codec), cut.codec, hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), cut = gradients, ctx.cut
        coded = cut.feedback.encode(gradient, ctx.microbatch) if cut.feedback else encode(gradient, cut.codec)
        return decode(coded, cut.codec, gradient.dtype), None, None


def _accumulate(sums: list[Tensor], gradients: Iterable[Tensor]) -> None:
    """Add to a group's sums, in fp32; the first microbatch begins them."""
    in_fp32 = [gradient.float() for gradient in gradients]
    if sums:
        torch._foreach_add_(sums, in_fp32)
    else:
        sums.extend(gradient.contiguous() for gradient in in_fp32)


def _tie(group_sums: list[list[Tensor]]) -> None:
    """Give both copies of a tied matrix the sum of both, group by group: they are the first and the last parameter."""
    for sums in group_sums:
        sums[0] = sums[0] + sums[-1]
        sums[-1] = sums[0].clone()


def norm_of(gradient: Weights, *, is_tied: bool) -> float:
    """Return the norm of the whole model's gradient. A tied matrix counts at the embedding, and a router's bias not
    at all.
    """
    squares = []
    for name, layer in reversed(gradient.items()):
        is_copy = is_tied and name == "head"
        counted = sorted(
            parameter
            for parameter in layer
            if not (is_copy and parameter == TIED["head"]) and not parameter.endswith(ROUTER_BIAS)
        )
        of_parameters = [_square(layer[parameter]) for parameter in counted]
        squares.append(_fold(torch.stack(of_parameters).tolist()) if of_parameters else 0.0)
    return math.sqrt(_fold(squares))


def _square(gradient: Tensor) -> Tensor:
    pieces = torch.split(gradient.reshape(-1), 1 << 20)
    return reduce(add, (piece.double().square().sum() for piece in pieces))


def _fold(numbers: list[float]) -> float:
    """Fold from left to right. `sum` would compensate its rounding since Python 3.12."""
    return reduce(add, numbers)


def _moved(parameters: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in parameters.items()}


def _trained(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}


def _assembled(job: "JobSpec", weights: Weights, frozen: Weights, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Return the model: layer name to module, with its own parameters that start as copies of the weights.

    Frozen ones are no copies.
    """
    model = {}
    for name in layer_names(job.model):
        model[name] = build_layer(name, job.model, attention_backend=job.train.attention_backend)
        copies = {parameter: tensor.to(dtype, copy=True) for parameter, tensor in weights[name].items()}
        model[name].load_state_dict(copies | frozen.get(name, {}), assign=True)
        set_router_losses(model[name], job.train)
        if job.train.compile:
            compile_layer(model[name])
    return model
