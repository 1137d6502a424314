"""Initial weights: each parameter is a function of the seed and its own name, so boundary 0 needs no holder.

Beside adapters a layer has its plain weights, quantized if the job wants it, in the job's dtype.
"""

from collections.abc import Mapping
from hashlib import blake2b
from math import sqrt

import numpy as np
import torch
from torch import Tensor, nn

from headway.stages.model.adapters import DOWN
from headway.stages.model.decoder import ZeroCenteredNorm, build_layer, frozen_shapes, trained_shapes
from headway.stages.model.quantized import is_plain, quantized
from headway.stages.spec import TIED, ModelSpec, TrainSpec, whole_layer


def initial_parameters(layer: str, spec: ModelSpec, *, seed: int) -> dict[str, Tensor]:
    """Return W_0 of a layer: parameter name to fp32 CPU tensor, equal in every process and in any order of calls. A
    half has that of its whole layer.

    Adapters are left out. Weights are normal with standard deviation `initializer_range`; norms' gains are ones and
    biases zeros, as in Hugging Face. So are the vectors of a plug-in's block. Raises ValueError for a layer that the
    model does not have.
    """
    module = build_layer(layer, spec.base)
    norms = {path: part for path, part in module.named_modules() if isinstance(part, nn.RMSNorm)}

    def initial(name: str, shape: torch.Size) -> Tensor:
        norm = norms.get(name.removesuffix(".weight"))
        if isinstance(norm, ZeroCenteredNorm):
            return torch.zeros(shape)
        is_own = spec.has_own_block and layer.startswith("block.")
        if is_own and len(shape) < 2:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        if norm is not None or name.endswith((".dt_bias", "layer_scalar")):
            return torch.ones(shape)
        if name.endswith(".A_log"):  # of decays between those of transformers
            drawn = _generator(f"{seed}/{whole_layer(layer)}/{name}").random(tuple(shape), dtype=np.float32)
            return torch.from_numpy(drawn).mul_(15.99).add_(0.01).log_()
        if name.endswith((".bias", ".e_score_correction_bias")):
            return torch.zeros(shape)
        # Both copies of a tied matrix are drawn as the embedding's.
        is_tied = spec.tie_word_embeddings and TIED.get(layer) == name
        key = f"{seed}/embed/{TIED['embed']}" if is_tied else f"{seed}/{whole_layer(layer)}/{name}"
        return _normal(shape, deviation=spec.initializer_range, key=key)

    return {name: initial(name, parameter.shape) for name, parameter in module.named_parameters()}


def initial_adapters(layer: str, spec: ModelSpec, *, seed: int) -> dict[str, Tensor]:
    """Return the adapters of a layer at boundary 0, as `initial_parameters`: A is uniform as in PEFT, B is zeros."""

    def initial(name: str, shape: torch.Size) -> Tensor:
        return _uniform(shape, key=f"{seed}/{whole_layer(layer)}/{name}") if f".{DOWN}." in name else torch.zeros(shape)

    return {name: initial(name, shape) for name, shape in trained_shapes(layer, spec).items()}


def _uniform(shape: torch.Size, *, key: str) -> Tensor:
    """Return a matrix, uniform between -1/√inputs and 1/√inputs: kaiming_uniform_ with a = √5."""
    values = _generator(key).random(tuple(shape), dtype=np.float32)
    return torch.from_numpy(values).mul_(2).sub_(1).mul_(1 / sqrt(shape[1]))


def _normal(shape: torch.Size, *, deviation: float, key: str) -> Tensor:
    values = _generator(key).standard_normal(tuple(shape), dtype=np.float32)
    return torch.from_numpy(values).mul_(deviation)


def _generator(key: str) -> np.random.Generator:
    # A counter-based generator with a 128-bit key: torch's CPU generator keeps 32 bits of its seed, few enough for two
    # of a large model's parameters to start equal.
    digest = blake2b(key.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def frozen_beside(
    weights: Mapping[str, Tensor], name: str, model: ModelSpec, train: TrainSpec, *, device: torch.device | str
) -> dict[str, Tensor]:
    """Return what a layer has beside its adapters, from its plain weights. Raises MissingPackageError."""
    return in_dtype(quantized(weights, frozen_shapes(name, model), model.adapter.quantize), train, device)


def in_dtype(weights: Mapping[str, Tensor], train: TrainSpec, device: torch.device | str) -> dict[str, Tensor]:
    """Return frozen weights in the job's dtype, except those that are quantized."""
    dtype: torch.dtype = getattr(torch, train.dtype)
    return {
        key: tensor.to(device=device, dtype=dtype if is_plain(key, tensor.dtype) else None)
        for key, tensor in weights.items()
    }
