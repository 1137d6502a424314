"""The loss of final weights on rows that the training has not drawn, or hardly any of them."""

import statistics

import torch
from torch import Tensor
from torch.func import functional_call

from headway.daemon.jobs.job import JobSpec
from headway.daemon.local.reference_loop import Weights
from headway.stages.data.tokens import TokenShards
from headway.stages.model.decoder import build_layer, token_loss

NUM_HELD_OUT = 32  # microbatches


def held_out_loss(job: JobSpec, weights: Weights, tokens: TokenShards, *, beyond: int | None = None) -> float:
    """Mean loss of the weights, nats per token.

    beyond: with `data_order = "epochs"`, on microbatches of batches from this one on, which the training does not
    reach: within an epoch no row is drawn twice. None: on windows drawn with another seed than training's.
    """
    layers = {name: build_layer(name, job.model) for name in job.layers}
    losses = []
    with torch.no_grad():
        for index in range(NUM_HELD_OUT):
            seed, batch = (job.job.seed + 1, index) if beyond is None else (job.job.seed, beyond + index)
            rows = tokens.microbatch(job.train, seed=seed, batch=batch, microbatch=0)
            hidden: Tensor = rows.inputs
            for name, layer in layers.items():
                hidden = functional_call(layer, weights[name], (hidden,))
            losses.append(token_loss(hidden, rows.targets).item())
    return statistics.fmean(losses)
