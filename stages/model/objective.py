"""What a job learns: the next token, or which of two answers is better (direct preference optimization).

For preferences, the documents of a row are pairs, the preferred answer first. Hidden states are then those of two
models, one below the other: the model with adapters, and the frozen one without. Both go through every stage together,
so the frozen model's log-probabilities take no second model and no second pass. docs/numerics.md, section 9.
"""

import pkgutil
from collections.abc import Callable, Iterator
from functools import lru_cache, partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headway.stages.model.adapters import without_adapters
from headway.stages.model.decoder import Head, described, token_loss
from headway.stages.model.positions import DocumentRows
from headway.stages.plugin_names import PluginError, Settings, imported, told_by
from headway.stages.spec import LOSSES, TrainSpec

# The loss of a microbatch, with the logits of a few rows at a time.
#
# All logits at once take 12 bytes each in the backward: with a vocabulary of 128 thousand more than the whole rest of a
# stage. In chunks the logits live only for a moment. Nothing stands above the loss, so each chunk is differentiated in
# the forward, and no product is computed twice. The last stage has one microbatch in flight, so it keeps the matrix'
# gradient once. torch's own `linear_cross_entropy` rounds the loss to the dtype of the hidden states, to 3 digits in
# bfloat16.


Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""As `token_loss`."""


def microbatch_loss(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    *,
    chunk: int,
    is_whole: bool = False,
    mean_tokens: Tensor | None = None,
    loss_of: Loss = token_loss,
) -> Tensor:
    """Return the mean loss over the tokens of a microbatch, the cross entropy in nats: fp32 [] for any dtype.

    hidden [microbatch, sequence, hidden] is the head's input, targets int64 [microbatch, sequence]. chunk: rows whose
    logits exist at once, of the cross entropy; 0: all. In chunks the loss is what is differentiated, not a function of
    it. is_whole: the gradient of the vocabulary's matrix is one product all the same. mean_tokens: see `token_loss`.
    """
    if chunk == 0:
        return loss_of(head(hidden), targets, mean_tokens)
    assert isinstance(head, Head), "only the head has a loss"
    normed = head.norm(hidden).flatten(0, 1)
    weight, wanted, is_differentiated = head.lm_head.weight, targets.flatten(), torch.is_grad_enabled()
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        normed, weight, wanted, chunk, mean_tokens, head.sum_of_losses, is_differentiated, is_whole
    )
    return loss


_SumOfLosses = Callable[[Tensor, Tensor], Tensor]
"""As `Head.sum_of_losses`."""


class _ChunkedLoss(torch.autograd.Function):
    """normed [rows, hidden], weight [vocabulary, hidden], targets [rows] → loss [], whose own gradient is 1."""

    @staticmethod
    def forward(
        ctx: Any,
        normed: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        mean_tokens: Tensor | None,
        sum_of_losses: _SumOfLosses,
        is_differentiated: bool,
        is_whole: bool,
    ) -> Tensor:
        divisor = len(targets) if mean_tokens is None else mean_tokens
        by_rows, by_weight = (is_differentiated and needed for needed in ctx.needs_input_grad[:2])
        if by_rows or by_weight:
            gradients = _Gradients(normed, weight, by_rows=by_rows, by_weight=by_weight, is_whole=is_whole)
            upstream = torch.ones((), device=normed.device) / divisor
            sums = [gradients.add(*each, sum_of_losses, upstream) for each in _chunks(normed, targets, chunk)]
            ctx.save_for_backward(*gradients.complete())
        else:
            sums = [
                sum_of_losses(functional.linear(rows, weight), wanted)
                for rows, wanted in _chunks(normed, targets, chunk)
            ]
        mean: Tensor = reduce(add, sums) / divisor
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        torch._assert_async(gradients[0] == 1)
        return *ctx.saved_tensors, *[None] * 6


class _Gradients:
    """Those of a loss by the rows and by the vocabulary's matrix, from one chunk after another."""

    def __init__(self, normed: Tensor, weight: Tensor, *, by_rows: bool, by_weight: bool, is_whole: bool) -> None:
        """by_rows, by_weight: which of them are needed; a frozen head's is not. is_whole: see `microbatch_loss`."""
        self._normed, self._weight = normed, weight
        self._by_rows = torch.empty_like(normed) if by_rows else None
        self._needs_sum = by_weight and not is_whole
        self._by_weight: Tensor | None = None
        shape = len(normed), len(weight)
        self._by_products = normed.new_empty(shape) if by_weight and is_whole else None
        self._num_rows = 0

    def add(self, rows: Tensor, targets: Tensor, sum_of_losses: _SumOfLosses, upstream: Tensor) -> Tensor:
        """Return the sum of a chunk's losses [], which has the gradient `upstream`."""
        with torch.enable_grad():
            products = functional.linear(rows.detach().requires_grad_(), self._weight)
            of_products = get_gradient_edge(products)
            loss = sum_of_losses(products, targets)
            del products  # they take memory, and only their gradient is wanted
            (by_products,) = torch.autograd.grad(loss, [of_products], upstream)
        place = slice(self._num_rows, self._num_rows + len(rows))
        if self._by_rows is not None:
            self._by_rows[place] = by_products.mm(self._weight)
        if self._by_products is not None:
            self._by_products[place] = by_products
        if self._needs_sum:
            of_chunk = by_products.t().mm(rows)
            self._by_weight = of_chunk.float() if self._by_weight is None else self._by_weight.add_(of_chunk)
        self._num_rows += len(rows)
        return loss.detach()

    def complete(self) -> tuple[Tensor | None, Tensor | None]:
        """Return both, in the dtype of what they belong to."""
        if self._by_products is not None:
            return self._by_rows, self._by_products.t().mm(self._normed)
        return self._by_rows, None if self._by_weight is None else self._by_weight.to(self._weight.dtype)


def _chunks(normed: Tensor, targets: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(normed.split(chunk), targets.split(chunk), strict=True)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=16)
def _loss_of(name: str, settings: Settings) -> Loss:
    """Return a loss by its name. What a plug-in's returns is looked at. Raises PluginError, also when it is called."""
    if name in LOSSES:
        own: Loss = pkgutil.resolve_name(LOSSES[name])
        return own
    compute = partial(imported(name), **dict(settings))

    def loss_of(logits: Tensor, targets: Tensor, mean_tokens: Tensor | None) -> Tensor:
        with told_by(name):
            loss: Tensor = compute(logits, targets, mean_tokens)
            if not isinstance(loss, Tensor) or loss.shape != () or loss.dtype != torch.float32:
                raise PluginError(name, f"returns {described(loss)}, and has to return a float32 tensor []")
        return loss

    return loss_of


def objective_loss(
    head: nn.Module,
    hidden: Tensor,
    train: TrainSpec,
    *,
    targets: Tensor,
    positions: Tensor | None,
    divisor: Tensor | None,
) -> Tensor:
    """Return the loss [] of a microbatch, in float32. The arguments are those of a `Microbatch`."""
    if not train.learns_preferences:
        loss_of, is_whole = _loss_of(train.loss, train.loss_settings), train.loss_gradient == "whole"
        return microbatch_loss(
            head, hidden, targets, chunk=train.loss_chunk, is_whole=is_whole, mean_tokens=divisor, loss_of=loss_of
        )
    assert positions is not None, "pairs are documents of rows"
    assert divisor is not None, "pairs have flags"
    chunk, beta = train.loss_chunk, train.dpo_beta
    return preference_loss(head, hidden, targets, positions, beta=beta, chunk=chunk, mean_pairs=divisor)


def beside_frozen(layer: nn.Module, hidden: Tensor, documents: DocumentRows | None = None) -> Tensor:
    """Return a layer's output [2 · microbatch, sequence, hidden]: with adapters, and below it without.

    hidden: as the output; of the embedding, which has no adapters, the tokens [microbatch, sequence]. The frozen half
    has no graph, and so no backward.
    """
    if not hidden.is_floating_point():
        embedded = layer(hidden)
        return torch.cat((embedded, embedded))
    tuned, frozen = hidden.chunk(2)
    beside = () if documents is None else (documents,)
    with torch.no_grad(), without_adapters(layer):
        below = layer(frozen, *beside)
    return torch.cat((layer(tuned, *beside), below))


def preference_loss(
    head: nn.Module, hidden: Tensor, targets: Tensor, positions: Tensor, *, beta: float, chunk: int, mean_pairs: Tensor
) -> Tensor:
    """Return the sum of -log sigmoid(beta · margin) over a microbatch's pairs, over mean_pairs: fp32 [].

    margin: by how much more the preferred answer's log-probability has grown from the frozen model to the tuned one.
    hidden [2 · microbatch, sequence, hidden], targets int64 and positions int32 [microbatch, sequence]. chunk: rows
    whose logits exist at once; 0: all. Documents without a target, and their partners, count as no pair.
    Rafailov et al. 2023, equation 7.
    """
    tuned, frozen = hidden.chunk(2)
    with torch.no_grad():
        of_frozen = _token_losses(head, frozen, targets, chunk)
    gained = of_frozen - _token_losses(head, tuned, targets, chunk)
    rows, length = targets.shape
    width = length + length % 2  # documents of a row, at most: a whole number of pairs
    document = (positions == 0).cumsum(1) - 1 + width * torch.arange(rows, device=targets.device)[:, None]
    sums = gained.new_zeros(rows * width)
    is_trained = sums.index_add(0, document.flatten(), (targets >= 0).flatten().to(sums.dtype)) > 0
    of_pairs = sums.index_add(0, document.flatten(), gained).view(-1, 2)
    losses = -functional.logsigmoid(beta * (of_pairs[:, 0] - of_pairs[:, 1]))
    return (losses * is_trained.view(-1, 2).all(1)).sum() / mean_pairs


def _token_losses(head: nn.Module, hidden: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the cross entropy of each token, fp32 [tokens]; 0 where a target is not trained on."""
    rows, wanted = hidden.flatten(0, 1), targets.flatten()
    if chunk == 0:
        return _cross_entropies(head, rows, wanted)
    parts = zip(rows.split(chunk), wanted.split(chunk), strict=True)  # type: ignore[no-untyped-call]
    return torch.cat(
        [checkpoint(_cross_entropies, head, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    )


def _cross_entropies(head: nn.Module, rows: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(head(rows).float(), wanted, reduction="none")
