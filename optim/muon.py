"""Muon: momentum, then orthogonalisation, for the matrices inside a block.

Source: Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/, with the decoupled weight decay of Liu et al.,
"Muon is Scalable for LLM Training", 2025, arXiv 2502.16982. Same rule as torch.optim.Muon, whose `adjust_lr_fn` is
`adjust_lr` here; by the quintic in bfloat16 the same operations, so the same bits.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from headway.optim.eager import EagerOptimizer, buffer, matrix_only
from headway.optim.spec import AdjustLr, Coefficients
from headway.optim.step_count import STEPS

# Orthogonalisation of a matrix by five steps of a quintic Newton–Schulz iteration.
#
# Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
# https://kellerjordan.github.io/posts/muon/ (coefficients, normalisation, transposition).

# X ← a·X + (b·G + c·G²)·X with G = X·Xᵀ. Chosen to be steep at 0, so that five steps lift small singular values;
# they end between about 0.7 and 1.2, not at 1.
A, B, C = 3.4445, -4.7750, 2.0315
NUM_STEPS = 5
NORM_FLOOR = 1e-7

# Or by other coefficients in each step: the best for what the steps before make of singular values from 0.001 to 1.
#
# Source: Amsel et al., "The Polar Express: Optimal Matrix Sign Methods and Their Application to the Muon Algorithm",
# 2025, arXiv 2505.16932, implementation 1. Rounding may lift a singular value above what a step expects, beyond which
# its polynomial diverges: so all but the last, which all further steps repeat, expect 1 % more.
SAFETY = 1.01
POLAR_EXPRESS: Final = (
    *(
        (a / SAFETY, b / SAFETY**3, c / SAFETY**5)
        for a, b, c in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        )
    ),
    (1.875, -1.25, 0.375),
)

Triple = tuple[float, float, float]


def step_coefficients(coefficients: Coefficients, steps: int) -> list[Triple]:
    """Return a, b and c of each step."""
    if coefficients == "quintic":
        return [(A, B, C)] * steps
    return [*POLAR_EXPRESS[:steps], *POLAR_EXPRESS[-1:] * (steps - len(POLAR_EXPRESS))]


def orthogonalize(
    matrices: Tensor,
    *,
    steps: int = NUM_STEPS,
    dtype: torch.dtype = torch.float32,
    coefficients: Coefficients = "quintic",
) -> Tensor:
    """Nearly the orthogonal factor U·Vᵀ of each matrix U·S·Vᵀ in `matrices` [..., rows, cols].

    Computed and returned in `dtype`, in a new tensor of the same shape. The bits depend on values alone, not on
    strides. Whether a batch has the bits of its matrices one by one is up to the device's batched product: see
    matrix_batches.py, beside which nothing may rely on it. Raises ValueError on less than two dimensions.
    """
    if matrices.ndim < 2:
        raise ValueError(f"orthogonalize takes [..., rows, cols], not {list(matrices.shape)}")
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.contiguous().to(dtype)
    if is_tall:  # the smaller Gram matrix costs less
        x = x.mT
    triples = step_coefficients(coefficients, steps)
    is_gram_halved, is_polynomial_halved = _halved(x, triples)
    # The Frobenius norm bounds the spectral norm: all singular values start in [0, 1].
    norm = torch.linalg.vector_norm(x) if x.ndim == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    if coefficients == "polar_express":
        norm.mul_(SAFETY)
    x = x / norm.clamp_(min=NORM_FLOOR)
    batch = x.shape[:-2]
    if x.ndim > 3:
        x = x.flatten(0, -3)
    product, product_sum = (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)
    for a, b, c in triples:
        # G = X·Xᵀ, then b·G + c·G²
        gram = _half_gram(x) if is_gram_halved else product(x, x.mT)
        if is_polynomial_halved:
            polynomial = _half_polynomial(gram, b, c)
        else:
            polynomial = product_sum(gram, gram, gram, beta=b, alpha=c)
        x = product_sum(x, polynomial, x, beta=a)  # a·X + (b·G + c·G²)·X
        STEPS.num_done += 1
    x = x.reshape(*batch, *x.shape[-2:])
    return x.mT if is_tall else x


# Both products of a step that have a Gram matrix's shape are symmetric, so half of a large one is computed, if that
# changes no bit: panels of rows, each from the diagonal on, and their mirror image below.
#
# The processor's kernels must give an element the bits in a panel that it has in the whole product, and on both sides
# of the diagonal. So each is compared with the whole one, bit by bit, at the first use of a shape in a process, with
# each b and c. Where they differ, the product stays whole, as b·G + c·G² does in float32 if a library multiplies c into
# one of its factors.

PANEL: Final = 256
"""Rows of a panel. It begins at a multiple of 64 bytes whatever the length of a row, as tensors of torch do."""
SMALLEST_HALVED: Final = 640
"""Rows of the smallest product that is halved: the mirror image of a small one costs what the other half would."""


def _half_gram(x: Tensor) -> Tensor:
    """Return X·Xᵀ of X [rows, cols]."""
    return _mirrored(x, lambda rows, rest, out: torch.mm(x[rows], x[rest].mT, out=out))


def _half_polynomial(gram: Tensor, b: float, c: float) -> Tensor:
    """Return b·G + c·G² of a symmetric G."""

    def panel(rows: slice, rest: slice, out: Tensor) -> None:
        torch.addmm(gram[rows, rest], gram[rows], gram[:, rest], beta=b, alpha=c, out=out)

    return _mirrored(gram, panel)


def _mirrored(x: Tensor, panel: Callable[[slice, slice, Tensor], object]) -> Tensor:
    """Return a symmetric matrix with as many rows as X, whose `panel` of some rows and all columns from them on fills
    the given tensor.
    """
    whole = x.new_empty(x.size(0), x.size(0))
    for start in range(0, x.size(0), PANEL):
        rows, rest, below = slice(start, start + PANEL), slice(start, None), slice(start + PANEL, None)
        panel(rows, rest, whole[rows, rest])
        whole[below, rows].copy_(whole[rows, below].mT)
    return whole


def _halved(x: Tensor, triples: Iterable[Triple]) -> tuple[bool, bool]:
    """Return whether G, and every step's b·G + c·G², are computed by halves: as always not on CUDA and with several
    threads.
    """
    is_large = x.ndim == 2 and x.size(0) >= SMALLEST_HALVED
    if not is_large or x.device.type != "cpu" or torch.get_num_threads() != 1:
        return False, False
    return _halves_have_same_bits(*x.shape, x.dtype, frozenset((b, c) for _, b, c in triples))


@lru_cache(maxsize=256)
def _halves_have_same_bits(
    rows: int, cols: int, dtype: torch.dtype, factors: frozenset[tuple[float, float]]
) -> tuple[bool, bool]:
    """Compare both halved products with whole ones, G of a matrix that lies row by row and of one that lies as a tall
    one does, transposed, and b·G + c·G² for all `factors` b and c. Takes no more memory than the iteration.
    """
    generator = torch.Generator().manual_seed(rows * cols)

    def is_same(x: Tensor) -> bool:
        return torch.equal(_half_gram(x), torch.mm(x, x.mT))

    is_gram_same = is_same(torch.randn(rows, cols, generator=generator, dtype=dtype))
    is_gram_same = is_same(torch.randn(cols, rows, generator=generator, dtype=dtype).mT) and is_gram_same
    # Near the identity, as Gram matrices of the iteration are: b·G and c·G² are of one size.
    gram = _half_gram(torch.randn(rows, rows, generator=generator, dtype=dtype).div_(rows**0.5))
    is_polynomial_same = all(
        torch.equal(_half_polynomial(gram, b, c), torch.addmm(gram, gram, gram, beta=b, alpha=c)) for b, c in factors
    )
    return is_gram_same, is_polynomial_same


# Orthogonalisation of several matrices of one shape at once, if that saves time and changes no bit.
#
# The cut of the model decides which matrices share a batch, so a batch must give the bits of each matrix alone.
# Products of many small matrices and of one may come from different kernels (seen on CPUs for a shorter side of 16 or
# less). A batch is therefore limited to shapes without that difference. Also, each size of batch is compared with
# single matrices, bit by bit, at its first use in a process; if they differ, matrices stay single.
#
# Batches save the cost per call, so they are for small matrices. Large stacks lose: they do not stay in the cache.

SHORTEST_SIDE: Final = 17
MOST_MATRICES: Final = 16
MOST_ELEMENTS: Final = {torch.float32: 1 << 15, torch.bfloat16: 1 << 19}
"""Maximum number of elements of a stack on a CPU, by the iteration's dtype: measured by bench/muon.py."""


def batch_limit(rows: int, cols: int, *, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many matrices of a shape are orthogonalised at once in `dtype`: 1 is one by one, as always on CUDA."""
    if device.type != "cpu" or torch.get_num_threads() != 1 or min(rows, cols) < SHORTEST_SIDE:
        return 1
    return max(1, min(MOST_MATRICES, MOST_ELEMENTS.get(dtype, 0) // (rows * cols)))


def orthogonalize_each(matrices: Sequence[Tensor], **of_iteration: Any) -> list[Tensor]:
    """Do `orthogonalize` of each matrix [rows, cols], all of one shape and device, at most `batch_limit` of them."""
    rows, cols = matrices[0].shape
    if len(matrices) > 1 and _has_same_bits(len(matrices), rows, cols, **of_iteration):
        return list(orthogonalize(torch.stack(list(matrices)), **of_iteration).unbind())
    return [orthogonalize(matrix, **of_iteration) for matrix in matrices]


@lru_cache(maxsize=256)
def _has_same_bits(number: int, rows: int, cols: int, **of_iteration: Any) -> bool:
    """Return whether a batch on a CPU has the bits of single matrices.

    Kernels are chosen by shape, and no sum in another order has all of a random matrix's bits.
    """
    stack = torch.randn(number, rows, cols, generator=torch.Generator().manual_seed(rows * cols))
    return all(
        torch.equal(of_batch, orthogonalize(matrix, **of_iteration))
        for of_batch, matrix in zip(orthogonalize(stack, **of_iteration), stack, strict=True)
    )


class Muon(EagerOptimizer):
    """Steps whole matrices [rows, cols] in place; state: `momentum_buffer` of each, in the gradient's dtype.

        m ← μ·m + (1−μ)·g
        u = (1−μ)·g + μ·m  (Nesterov) or m
        W ← (1 − lr·weight_decay)·W − lr·shape_scale(rows, cols)·orthogonalize(u)

    Raises ValueError when a gradient is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 3e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        newton_schulz_dtype: torch.dtype | str = torch.float32,
        newton_schulz_steps: int = NUM_STEPS,
        newton_schulz_coefficients: Coefficients = "quintic",
        adjust_lr: AdjustLr = "original",
    ) -> None:
        if isinstance(newton_schulz_dtype, str):
            newton_schulz_dtype = getattr(torch, newton_schulz_dtype)
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "newton_schulz_dtype": newton_schulz_dtype,
                "newton_schulz_steps": newton_schulz_steps,
                "newton_schulz_coefficients": newton_schulz_coefficients,
                "adjust_lr": adjust_lr,
            },
        )

    def _step_tensor(self, weight: Tensor, _gradient: Tensor, group: dict[str, Any]) -> None:
        direction = self._direction(weight, group)
        self._apply(weight, orthogonalize(direction, **iteration(group)), group)

    def matrices(self) -> Iterator["Matrix"]:
        """Yield the parameters, in order."""
        for group in self.param_groups:
            for parameter in group["params"]:
                yield self, parameter, group

    @staticmethod
    def batches(given: Iterable["Matrix"]) -> Iterator["Batch"]:
        """Yield parameters of several optimizers, each once: those of one shape together, from any optimizer.

        A batch has at most as many as are orthogonalised at once. A parameter may be in one optimizer only.
        """
        alike: dict[tuple[object, ...], Batch] = {}
        for muon, parameter, group in given:
            kind = (parameter.shape, parameter.device, *iteration(group).values())
            alike.setdefault(kind, []).append((muon, parameter, group))
        for matrices in alike.values():
            _, first, group = matrices[0]
            limit = _batch_limit(first, group)
            for start in range(0, len(matrices), limit):
                yield matrices[start : start + limit]

    @staticmethod
    @torch.no_grad()
    def step_batch(batch: "Batch", updates: Sequence[Tensor] | None = None) -> None:
        """One update of a batch's parameters that have a gradient: the bits of `step`.

        updates: what `orthogonalized` has returned for them, here or elsewhere, if all have one; None: it is computed.
        """
        batch = [(muon, parameter, group) for muon, parameter, group in batch if parameter.grad is not None]
        if not batch:
            return
        directions = [muon._direction(parameter, group) for muon, parameter, group in batch]
        if updates is None:
            updates = orthogonalize_each(directions, **iteration(batch[0][2]))
        for (muon, parameter, group), update in zip(batch, updates, strict=True):
            muon._apply(parameter, update, group)

    @staticmethod
    @torch.no_grad()
    def orthogonalized(batch: "Batch", gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the updates that `step_batch` would compute from these gradients. Changes nothing."""
        directions = [
            muon._coming_direction(parameter, gradient, group)
            for (muon, parameter, group), gradient in zip(batch, gradients, strict=True)
        ]
        return orthogonalize_each(directions, **iteration(batch[0][2]))

    def _coming_direction(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return what `_direction` would, and leave the momentum as it is, in whatever dtype it waits."""
        momentum: float = group["momentum"]
        # Not `self.state[parameter]`: that is a defaultdict, and reading must not leave entries behind.
        waiting: Tensor | None = self.state.get(parameter, {}).get("momentum_buffer")
        before = torch.zeros_like(gradient) if waiting is None else waiting.to(gradient.dtype)
        average = before.lerp(gradient, 1 - momentum)
        return gradient.lerp(average, momentum) if group["nesterov"] else average

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the matrix to orthogonalise; the momentum then contains the gradient."""
        gradient = parameter.grad
        assert gradient is not None
        matrix_only(gradient, type(self).__name__)
        momentum: float = group["momentum"]
        average = buffer(self.state[parameter], "momentum_buffer", gradient)
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum) if group["nesterov"] else average

    def _apply(self, weight: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        if update.dtype != weight.dtype:
            update = update.contiguous()  # a narrow tall one lies transposed, and is added three times as slowly
        weight.add_(update, alpha=-group["lr"] * shape_scale(*weight.shape, adjust_lr=group["adjust_lr"]))


Matrix = tuple[Muon, Parameter, dict[str, Any]]
"""Optimizer, parameter, and the parameter's group."""

Batch = list[Matrix]


def iteration(group: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of `orthogonalize` that a group has set."""
    return {name: group[f"newton_schulz_{name}"] for name in ("steps", "dtype", "coefficients")}


def _batch_limit(parameter: Tensor, group: dict[str, Any]) -> int:
    if parameter.ndim != 2:
        return 1
    return batch_limit(*parameter.shape, dtype=group["newton_schulz_dtype"], device=parameter.device)


def shape_scale(rows: int, cols: int, *, adjust_lr: AdjustLr = "original") -> float:
    """Return the factor of a matrix's rate: √max(1, rows/cols), which lifts that of tall ones, or 0.2·√max(rows, cols),
    which gives the update the root mean square of AdamW's.
    """
    return 0.2 * math.sqrt(max(rows, cols)) if adjust_lr == "match_rms_adamw" else math.sqrt(max(1, rows / cols))
