"""Layers of a job on one device in this process, as a worker has them, for probes that time the model alone."""

from dataclasses import replace

import torch
from torch import Tensor

from headway.daemon.jobs.job import JobSpec
from headway.optim.layer_optimizer import optimizer_factory
from headway.stages.data.microbatch import Microbatch
from headway.stages.ids import LayerName
from headway.stages.model.compilation import compile_ahead
from headway.stages.model.determinism import configure
from headway.stages.spec import TrainSpec
from headway.stages.stage.graph import StageGraph
from headway.stages.state.layer_state import LayerState


def settled(train: TrainSpec) -> TrainSpec:
    """Return the settings of a stage that keeps its activations where the plan would have to choose."""
    return replace(train, recompute="none") if train.recompute == "auto" else train


class OneStage:
    """Layers of a job, each microbatch with the same random tokens, or hidden states where there is no `embed`."""

    def __init__(self, job: JobSpec, device: str, names: tuple[str, ...] = ()) -> None:
        """names: its layers; none: all of the job."""
        names, model, train = names or job.layers, job.model, settled(job.train)
        is_first, is_last = names[0] == "embed", names[-1] == "head"
        configure(train, torch.device(device))
        if train.compile:
            compile_ahead(names, model, train, torch.device(device))
        make = optimizer_factory(job.optim, **train.of_optimizers)
        layers = [
            LayerState.initial(LayerName(name), model, train, seed=1, device=device, optimizer_factory=make)
            for name in names
        ]
        self._graph = StageGraph(layers, model, train, is_first=is_first, is_last=is_last)
        numbers, shape = torch.Generator(device).manual_seed(1), (train.microbatch_size, train.sequence_length)
        tokens = torch.randint(model.vocab_size, shape, device=device, generator=numbers)
        hidden = torch.randn((*shape, model.hidden_size), device=device, generator=numbers)
        hidden = hidden.to(getattr(torch, train.dtype))
        self._rows = Microbatch(tokens if is_first else hidden, tokens)
        self._output_gradient = None if is_last else hidden
        self._batch, self._sums = 0, list[Tensor]()

    def microbatch(self) -> list[Tensor]:
        """Do a microbatch's forward and backward, and add its gradients to those of its batch; return them."""
        self._graph.forward((self._batch, 0), self._rows, version=self._batch)
        gradients, _ = self._graph.backward((self._batch, 0), self._output_gradient)
        self._sums = self._sums or [torch.zeros_like(gradient, dtype=torch.float32) for gradient in gradients]
        torch._foreach_add_(self._sums, gradients)
        return list(gradients)

    def update(self) -> None:
        """End the batch: update all layers by its gradients."""
        self._graph.update(self._batch, self._sums)
        self._batch, self._sums = self._batch + 1, []
