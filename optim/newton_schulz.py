"""Orthogonalisation of a matrix by five steps of a quintic Newton–Schulz iteration.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
https://kellerjordan.github.io/posts/muon/ (coefficients, normalisation, transposition).
"""

import torch
from torch import Tensor

from headway.optim.step_count import STEPS

# X ← a·X + (b·G + c·G²)·X with G = X·Xᵀ. Chosen to be steep at 0, so that five steps lift small singular values;
# they end between about 0.7 and 1.2, not at 1.
A, B, C = 3.4445, -4.7750, 2.0315
NUM_STEPS = 5
NORM_FLOOR = 1e-7


def orthogonalize(matrices: Tensor, *, steps: int = NUM_STEPS, dtype: torch.dtype = torch.float32) -> Tensor:
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
    # The Frobenius norm bounds the spectral norm: all singular values start in [0, 1].
    norm = torch.linalg.vector_norm(x) if x.ndim == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp_(min=NORM_FLOOR)
    batch = x.shape[:-2]
    if x.ndim > 3:
        x = x.flatten(0, -3)
    product, product_sum = (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)
    for _ in range(steps):
        gram = product(x, x.mT)  # G = X·Xᵀ
        polynomial = product_sum(gram, gram, gram, beta=B, alpha=C)  # b·G + c·G²
        x = product_sum(x, polynomial, x, beta=A)  # a·X + (b·G + c·G²)·X
        STEPS.num_done += 1
    x = x.reshape(*batch, *x.shape[-2:])
    return x.mT if is_tall else x
