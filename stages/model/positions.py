"""Rotary positions, and attention that ends with documents: angles, and which tokens attend to which.

RoFormer, Su et al. 2021. The scaled types are Hugging Face's (`modeling_rope_utils.py`): `linear` of kaiokendev,
`dynamic` of bloc97 and emozilla, `llama3` of Llama 3.1, `yarn` of Peng et al. 2023, arXiv 2309.00071, `longrope` of
Ding et al. 2024, arXiv 2402.13753, `proportional` of Gemma 4. All numbers are in docs/numerics.md, section 9.

What documents need is made from positions once for each microbatch, and shared by all blocks of a stage. The mask is
the one that torch's attention makes of a boolean one at every call, so a microbatch keeps it once.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from headway.stages.spec import ModelSpec, RopeSpec


@lru_cache(maxsize=32)
def rotary_table(
    length: int,
    head_dim: int,
    *,
    theta: float,
    scaling: RopeSpec,
    is_interleaved: bool = False,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine of positions 0 … length-1, both [length, 1, head_dim].

    head_dim: the values of a head that turn. is_interleaved: the two of a pair are neighbours.

    Computed in fp32 on the CPU, so that every device starts from equal bits. The first half of the sine is negative:
    x·cos + (x rolled by half a head)·sine is then Hugging Face's x·cos + rotate_half(x)·sin.
    """
    with torch.inference_mode(False), torch.no_grad():
        turns = frequencies(length, head_dim, theta=theta, scaling=scaling)
        angles = torch.arange(length, dtype=torch.float32, device="cpu")[:, None] * turns  # [length, head_dim/2]
        cosine = _by_pairs(angles.cos(), angles.cos(), is_interleaved=is_interleaved)
        sine = _by_pairs(-angles.sin(), angles.sin(), is_interleaved=is_interleaved)
        if scaling.rope_type in ("yarn", "longrope"):
            cosine, sine = cosine * scaling.attention_factor, sine * scaling.attention_factor
        return cosine[:, None].to(device, dtype), sine[:, None].to(device, dtype)


def _by_pairs(first: Tensor, second: Tensor, *, is_interleaved: bool) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2) if is_interleaved else torch.cat((first, second), -1)


@lru_cache(maxsize=8)
def query_scales(length: int, scaling: RopeSpec, *, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """Return the factors of the queries at positions 0 … length-1, [length, 1, 1]; None: all are 1.

    Queries beyond the first training grow, as in Llama 4 and Ministral 3. Computed as `rotary_table`.
    """
    first = scaling.original_max_position_embeddings
    if not scaling.llama_4_scaling_beta or length <= first:
        return None
    with torch.inference_mode(False), torch.no_grad():
        times = torch.floor(torch.arange(length, device="cpu") / first)
        return (1 + scaling.llama_4_scaling_beta * torch.log(1 + times))[:, None, None].to(device, dtype)


def frequencies(length: int, head_dim: int, *, theta: float, scaling: RopeSpec) -> Tensor:
    """Return the angle per token of each pair of a head: fp32 [head_dim/2], for sequences of `length` tokens."""
    if scaling.rope_type == "dynamic":
        theta = _dynamic_theta(length, head_dim, theta, scaling)
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    match scaling.rope_type:
        case "linear":
            return 1.0 / powers / scaling.factor
        case "llama3":
            return _llama3(1.0 / powers, scaling)
        case "yarn":
            return _yarn(powers, head_dim, theta, scaling)
        case "longrope":
            is_long = length > scaling.original_max_position_embeddings
            return 1.0 / (torch.tensor(scaling.long_factor if is_long else scaling.short_factor, device="cpu") * powers)
        case "proportional":
            turns = 1.0 / powers
            turns[int(scaling.partial_rotary_factor * head_dim // 2) :] = 0.0
            return turns / scaling.factor
        case _:
            return 1.0 / powers


def _dynamic_theta(length: int, head_dim: int, theta: float, scaling: RopeSpec) -> float:
    """Return the base for a length: larger, the further it goes beyond the first training."""
    stretch = max(length, scaling.original_max_position_embeddings) / scaling.original_max_position_embeddings
    grown: float = scaling.factor * stretch - (scaling.factor - 1)
    return float(theta * grown ** (head_dim / (head_dim - 2)))


def _llama3(turns: Tensor, scaling: RopeSpec) -> Tensor:
    """Slow pairs turn slower by the factor, fast ones as before, and those between by something between."""
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / turns
    scaled = torch.where(wavelength > length / low, turns / scaling.factor, turns)
    share = (length / wavelength - low) / (high - low)
    between = (1 - share) * scaled / scaling.factor + share * scaled
    is_between = (wavelength >= length / high) & (wavelength <= length / low)
    return torch.where(is_between, between, scaled)


def _yarn(powers: Tensor, head_dim: int, theta: float, scaling: RopeSpec) -> Tensor:
    """Pairs that turn often in the first training's length keep their angle, others are interpolated."""

    def pair_of(num_turns: float) -> float:
        """The pair, as a fraction, that turns so often in the first training's length."""
        length = scaling.original_max_position_embeddings
        return (head_dim * math.log(length / (num_turns * 2 * math.pi))) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width, 0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


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
