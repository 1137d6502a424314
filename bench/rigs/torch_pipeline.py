"""torch.distributed.pipelining over gloo, on the layers, weights, tokens and optimizers of our stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.spec import OptimSpec
from headway.stages.model.decoder import build_layer, token_loss
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.spec import ModelSpec, TrainSpec, layer_names
from headway.stages.stage.relays import clip_coefficient
from rigs.pipeline_processes import Host, RandomTokens, cut

TIMEOUT = timedelta(seconds=60)
SCHEDULES: dict[str, tuple[int, bool]] = {
    "ScheduleGPipe": (1, False),
    "Schedule1F1B": (1, False),
    "ScheduleLoopedBFS": (2, False),
    "ScheduleInterleaved1F1B": (2, False),
    "ScheduleInterleavedZeroBubble": (2, False),
    "ScheduleZBVZeroBubble": (2, True),
    "ScheduleDualPipeV": (2, True),
}
"""Stages that a process has, and whether it has the second from the far end."""


@dataclass(frozen=True, slots=True)
class TorchReport:
    """The result of one process of a run."""

    batch_ends: list[float]
    """Times at which the optimizers had stepped."""
    losses: list[float]
    """Losses per batch, on the last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRun:
    """One run in one process: all batches, each a step of the schedule, the clipping, and the optimizers."""

    schedule: str
    model: ModelSpec
    train: TrainSpec
    optim: OptimSpec
    num_processes: int
    rendezvous: str
    seed: int = 1

    def run(self, host: Host) -> TorchReport:
        """Joins the process group with its first run; it stays."""
        host.close_links()
        torch.use_deterministic_algorithms(False)
        if not distributed.is_initialized():
            distributed.init_process_group(
                "gloo",
                init_method=f"file://{self.rendezvous}",
                rank=host.rank,
                world_size=self.num_processes,
                timeout=TIMEOUT,
            )
        train, rank = self.train, host.rank
        num_own, is_v = SCHEDULES[self.schedule]
        num_stages = num_own * self.num_processes
        own = [rank, (num_stages - 1 - rank if is_v else rank + self.num_processes)][:num_own]
        cuts = cut(layer_names(self.model), num_stages)
        layers = {index: [_Layer(name, self) for name in cuts[index]] for index in own}
        stages = [
            PipelineStage(
                nn.Sequential(*(layer.module for layer in layers[index])), index, num_stages, torch.device("cpu")
            )
            for index in own
        ]
        kind: Any = getattr(pipelining, self.schedule)
        schedule = kind(stages if num_own > 1 else stages[0], n_microbatches=train.microbatches, loss_fn=token_loss)
        tokens = RandomTokens(self.model.vocab_size)
        has_first, has_last = 0 in own, num_stages - 1 in own
        in_backward_order = [layer for index in sorted(own, reverse=True) for layer in reversed(layers[index])]
        ends, losses = [], []
        for batch in range(train.batches):
            inputs, targets = self._batch(tokens, batch)
            of_batch: list[Tensor] = []
            schedule.step(
                *([inputs] if has_first else []), **({"target": targets, "losses": of_batch} if has_last else {})
            )
            with torch.no_grad():
                coefficient = self._clip_coefficient(in_backward_order)
                for layer in in_backward_order:
                    layer.update(batch, coefficient)
            ends.append(perf_counter())
            losses.append(torch.stack(of_batch).mean().item() if of_batch else 0.0)
        return TorchReport(ends, losses)

    def _batch(self, tokens: RandomTokens, batch: int) -> tuple[Tensor, Tensor]:
        train = self.train
        microbatches = [
            tokens.microbatch(train, seed=self.seed, batch=batch, microbatch=i) for i in range(train.microbatches)
        ]
        return torch.cat([rows.inputs for rows in microbatches]), torch.cat([rows.targets for rows in microbatches])

    def _clip_coefficient(self, layers: Sequence["_Layer"]) -> float:
        """From the norm of the whole model's gradient."""
        if not self.train.clip_norm:
            return 1.0
        gradients = [gradient for layer in layers for gradient in layer.gradients.values()]
        total = torch.stack([norm.double().square() for norm in torch._foreach_norm(gradients)]).sum()
        distributed.all_reduce(total)
        return clip_coefficient(total.item(), self.train.clip_norm)


class _Layer:
    """A layer with weights of its own, and its optimizer."""

    def __init__(self, name: str, run: TorchRun) -> None:
        weights = initial_parameters(name, run.model, seed=run.seed)
        self.module = build_layer(name, run.model)
        self.module.to_empty(device="cpu")
        self.module.load_state_dict(weights)
        self._weights = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        make = optimizer_factory(run.optim, num_batches=run.train.batches, delay=0)
        self._optimizer = make(name, self._weights)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Of the batch."""
        return {
            name: parameter.grad for name, parameter in self.module.named_parameters() if parameter.grad is not None
        }

    def update(self, batch: int, coefficient: float) -> None:
        """Clip, step in place, and forget the gradients."""
        gradients = self.gradients
        torch._foreach_mul_(list(gradients.values()), coefficient)
        self._optimizer.step(batch, current=self._weights, target=self._weights, gradients=gradients)
        self.module.zero_grad(set_to_none=True)
