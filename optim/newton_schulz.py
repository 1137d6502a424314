"""Orthogonalisation of a matrix by five steps of a quintic Newton–Schulz iteration.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
https://kellerjordan.github.io/posts/muon/ (coefficients, normalisation, transposition).
"""

import torch
from torch import Tensor

# X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ: steepest at 0, so that five steps lift small singular values;
# they end between about 0.7 and 1.2, not at 1.
A, B, C = 3.4445, -4.7750, 2.0315
NUM_STEPS = 5
NORM_FLOOR = 1e-7


def orthogonalize(matrices: Tensor, *, steps: int = NUM_STEPS, dtype: torch.dtype = torch.float32) -> Tensor:
    """Nearly the orthogonal factor U·Vᵀ of each matrix U·S·Vᵀ in `matrices` [..., rows, cols].

    Computed and returned in `dtype`, in a new tensor of the same shape. The bits depend on the values alone, not on
    strides. A batch [n, rows, cols] gives the bits of its matrices one by one where the device's batched product
    does: tested on CPU with one thread, so nothing that crosses a layer may rely on it. Raises ValueError on less than two dimensions.
    """
    if matrices.ndim < 2:
        raise ValueError(f"orthogonalize takes [..., rows, cols], not {list(matrices.shape)}")
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.contiguous().to(dtype)
    if is_tall:  # the smaller Gram matrix costs less
        x = x.mT
    # The Frobenius norm bounds the spectral norm: all singular values start in [0, 1].
    norm = torch.linalg.vector_norm(x) if x.ndim == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp_(min=NORM_FLOOR)
    batch = x.shape[:-2]
    if x.ndim > 3:
        x = x.flatten(0, -3)
    product, product_sum = (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)
    for _ in range(steps):
        gram = product(x, x.mT)  # A = X·Xᵀ
        polynomial = product_sum(gram, gram, gram, beta=B, alpha=C)  # b·A + c·A²
        x = product_sum(x, polynomial, x, beta=A)  # a·X + (b·A + c·A²)·X
    x = x.unflatten(0, batch) if len(batch) > 1 else x
    return x.mT if is_tall else x
