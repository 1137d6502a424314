"""What a layer has beside its adapters: its plain weights, quantized if the job wants it, in the job's dtype."""

from collections.abc import Mapping

import torch
from torch import Tensor

from headway.stages.model.decoder import frozen_shapes
from headway.stages.model.quantized import is_plain, quantized
from headway.stages.spec import ModelSpec, TrainSpec


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
