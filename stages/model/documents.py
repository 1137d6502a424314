"""Attention that ends with documents: which tokens of a row attend to which, and the angles of their positions.

Made from positions once for each microbatch, and shared by all blocks of a stage. The mask is the one that torch's
attention makes of a boolean one at every call, so a microbatch keeps it once and not once for each block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headway.stages.model.rotary import query_scales, rotary_table
from headway.stages.spec import ModelSpec, RopeSpec


class DocumentRows(NamedTuple):
    """What blocks read beside hidden states. A compiler takes its tensors for inputs."""

    cosine: Tensor
    """[size, length, 1, width that turns], in blocks of full attention."""
    sine: Tensor
    mask: Tensor
    """[size, 1, length, length]: 0 where a token attends to another one of its document, else minus infinity."""
    window_mask: Tensor | None
    """The same inside the sliding window; None: no block has one."""
    window_cosine: Tensor | None = None
    """In blocks with a window; None: that of all blocks."""
    window_sine: Tensor | None = None
    query_scales: Tensor | None = None
    """[size, length, 1, 1]; None: all are 1."""
    positions: Tensor | None = None
    """int32 [size, length]; None: no block has linear attention."""


def document_rows(positions: Tensor, model: ModelSpec, dtype: torch.dtype) -> DocumentRows:
    """Return it for positions int32 [size, length] in documents, on their device."""
    length = positions.shape[1]

    def angles(theta: float, scaling: RopeSpec, width: int) -> tuple[Tensor, Tensor]:
        cosine, sine = rotary_table(
            length,
            width,
            theta=theta,
            scaling=scaling,
            is_interleaved=model.rope_interleaved,
            device=positions.device,
            dtype=dtype,
        )
        return cosine[positions], sine[positions]

    of_all = model.rope_theta, model.rope_scaling
    of_windows = (model.window_rope_theta, RopeSpec()) if model.window_rope_theta else of_all
    in_windows = angles(*of_windows, model.rotary_width) if model.turns_by_type else None
    scales = query_scales(length, model.rope_scaling, device=positions.device, dtype=dtype)
    places = torch.arange(length, device=positions.device)
    distance = places[:, None] - places
    # A document's tokens follow each other: those that are no further away than its first one are its own.
    is_own = (distance >= 0) & (distance <= positions[:, :, None])
    has_window = 0 < model.sliding_window < length
    return DocumentRows(
        *angles(*of_all, int((model.global_head_dim or model.head_width) * model.partial_rotary_factor)),
        added_mask(is_own, dtype)[:, None],
        added_mask(is_own & (distance < model.sliding_window), dtype)[:, None] if has_window else None,
        window_cosine=in_windows and in_windows[0],
        window_sine=in_windows and in_windows[1],
        query_scales=None if scales is None else scales[positions],
        positions=positions if model.has_linear_attention else None,
    )


def added_mask(attends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores."""
    mask = torch.full(attends.shape, -torch.inf, dtype=dtype, device=attends.device)
    return mask.masked_fill_(attends, 0.0)
