"""Layers of a job on one device in this process, as a worker has them, for probes that time the model alone."""

from dataclasses import replace

import torch
from torch import Tensor

from headway.daemon.jobs.job import JobSpec
from headway.optim.layer_optimizer import optimizer_factory
from headway.stages.data.microbatch import Microbatch
from headway.stages.ids import LayerName
from headway.stages.model.determinism import configure
from headway.stages.spec import TrainSpec
from headway.stages.stage.graph import StageGraph
from headway.stages.state.layer_state import LayerState


def settled(train: TrainSpec) -> TrainSpec:
    """Return the settings of a stage that keeps its activations where the plan would have to choose."""
    return replace(train, recompute="none") if train.recompute == "auto" else train


class OneStage:
    """Layers of a job, each microbatch with other random tokens, or hidden states where there is no `embed`."""

    def __init__(self, job: JobSpec, device: str, names: tuple[str, ...] = ()) -> None:
        """names: its layers; none: all of the job."""
        names, train = names or job.layers, settled(job.train)
        self._job, self._device, self._train = job, device, train
        self._is_first, self._is_last = names[0] == "embed", names[-1] == "head"
        configure(train, torch.device(device))
        make = optimizer_factory(job.optim, **train.of_optimizers)
        layers = [
            LayerState.initial(LayerName(name), job.model, train, seed=1, device=device, optimizer_factory=make)
            for name in names
        ]
        self._graph = StageGraph(layers, job.model, train, is_first=self._is_first, is_last=self._is_last)
        self._generator = torch.Generator(device).manual_seed(1)
        self._batch, self._sums = 0, list[Tensor]()

    def microbatch(self) -> list[Tensor]:
        """Do a microbatch's forward and backward, and add its gradients to those of its batch; return them."""
        model, train = self._job.model, self._train
        shape = (train.microbatch_size, train.sequence_length)
        tokens = torch.randint(model.vocab_size, shape, device=self._device, generator=self._generator)
        states = (*shape, model.hidden_size)
        hidden = torch.randn(states, device=self._device, generator=self._generator).to(getattr(torch, train.dtype))
        rows = Microbatch(tokens if self._is_first else hidden, tokens)
        self._graph.forward((self._batch, 0), rows, version=self._batch)
        gradients, _ = self._graph.backward((self._batch, 0), None if self._is_last else hidden)
        self._sums = self._sums or [torch.zeros_like(gradient, dtype=torch.float32) for gradient in gradients]
        torch._foreach_add_(self._sums, gradients)
        return list(gradients)

    def update(self) -> None:
        """End the batch: update all layers by its gradients."""
        self._graph.update(self._batch, self._sums)
        self._batch, self._sums = self._batch + 1, []
