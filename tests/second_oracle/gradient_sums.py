"""The order in which the gradients of a batch are added (docs/numerics.md, section 2)."""

from functools import reduce
from operator import add

import torch
from torch import Tensor

from tests.second_oracle.initial_weights import Weights


def mean_gradient(of_microbatches: list[Weights], *, num_groups: int) -> Weights:
    """(1/m) · Σ_i: microbatch i belongs to group i mod G; every sum goes from left to right, in float32."""
    one_over_m = torch.tensor(1 / len(of_microbatches), dtype=torch.float32)
    return {
        layer: {
            name: _sum_of_groups([gradient[layer][name].float() for gradient in of_microbatches], num_groups)
            * one_over_m
            for name in parameters
        }
        for layer, parameters in of_microbatches[0].items()
    }


def mean_tied_gradient(of_microbatches: list[Weights], *, num_groups: int) -> Tensor:
    """Of the matrix that embed and head share: in each group the embedding's sum and the head's are added."""
    of_embed = [gradient["embed"]["weight"].float() for gradient in of_microbatches]
    of_head = [gradient["head"]["lm_head.weight"].float() for gradient in of_microbatches]
    groups = range(num_groups)
    tied = [reduce(add, of_embed[k::num_groups]) + reduce(add, of_head[k::num_groups]) for k in groups]
    return reduce(add, tied) * torch.tensor(1 / len(of_microbatches), dtype=torch.float32)


def _sum_of_groups(terms: list[Tensor], num_groups: int) -> Tensor:
    return reduce(add, [reduce(add, terms[group::num_groups]) for group in range(num_groups)])
