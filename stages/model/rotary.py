"""Rotary positions: the angle by which each pair of a head turns per token, and the tables of their cosines and sines.

RoFormer, Su et al. 2021. The scaled types are Hugging Face's (`modeling_rope_utils.py`): `linear` of kaiokendev,
`dynamic` of bloc97 and emozilla, `llama3` of Llama 3.1, `yarn` of Peng et al. 2023, arXiv 2309.00071, `longrope` of
Ding et al. 2024, arXiv 2402.13753, `proportional` of Gemma 4. All numbers are in docs/numerics.md, section 9.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from headway.stages.spec import RopeSpec


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
