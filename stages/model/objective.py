"""What a job learns: the next token, or which of two answers is better (direct preference optimization).

For preferences, the documents of a row are pairs, the preferred answer first. Hidden states are then those of two
models, one below the other: the model with adapters, and the frozen one without. Both go through every stage together,
so the frozen model's log-probabilities take no second model and no second pass. docs/numerics.md, section 9.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headway.stages.model.adapters import without_adapters
from headway.stages.model.chunked_loss import microbatch_loss
from headway.stages.model.documents import DocumentRows
from headway.stages.spec import TrainSpec


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
        return microbatch_loss(head, hidden, targets, chunk=train.loss_chunk, mean_tokens=divisor)
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
