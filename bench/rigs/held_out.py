"""The loss of final weights on text that no batch has drawn."""

import statistics

import torch
from torch import Tensor
from torch.func import functional_call

from headway.daemon.jobs.job import JobSpec
from headway.daemon.local.reference_loop import Weights
from headway.stages.data.tokens import TokenShards
from headway.stages.model.decoder import build_layer, token_loss

NUM_HELD_OUT = 32  # microbatches


def held_out_loss(job: JobSpec, weights: Weights, tokens: TokenShards) -> float:
    """Mean loss of the weights, nats per token, on windows drawn with another seed than training's."""
    layers = {name: build_layer(name, job.model) for name in job.layers}
    losses = []
    with torch.no_grad():
        for index in range(NUM_HELD_OUT):
            rows = tokens.microbatch(job.train, seed=job.job.seed + 1, batch=index, microbatch=0)
            hidden: Tensor = rows.inputs
            for name, layer in layers.items():
                hidden = functional_call(layer, weights[name], (hidden,))
            losses.append(token_loss(hidden, rows.targets).item())
    return statistics.fmean(losses)
