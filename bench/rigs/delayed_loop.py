"""The plain loop under other delays than a job has: which version of its weights each stage of a pipeline meets.

Stage s of P works on a batch as `microbatches` parts, j = 0, 1, … of the whole run. When it begins the forward of j,
the backwards of the last δ_s parts are still missing, so it has made ⌊(j − δ_s) / microbatches⌋ updates. The backward
of j comes after all earlier ones, so it could read the newest version, W_b for batch b.

- `uniform(d)`: one delay on all stages. d = 1 is 2BW, at any depth; d = 0 is 1F1B and GPipe.
- `pipedream(P)`: δ_s = P − 1 − s, an update after each batch, with weight stashing: a batch meets one version of a
  stage, forward and backward, and an older one the nearer the stage is to the first. Narayanan et al., "PipeDream:
  Generalized Pipeline Parallelism for DNN Training", SOSP 2019.
- `part(name)`: a delay of one for one kind of parameters, and none for the others.
- `unstashed(P, a)`: PACI, Elam et al. 2026, arXiv 2606.07881. A stage has at most P − s parts in flight and updates by
  itself after every a backwards: the same δ_s, no stashing. Activations are those of the forward, but every weight
  that the backward reads is W_b, because updates are made in place (`perf` in the authors' code,
  https://github.com/ItayElam/PACI; their `mem` computes the forward again, on W_b). So a part crosses ⌈δ_s / a⌉
  updates at most. a = 1 is a pipeline without stashing, and without PACI's bound.

All else is docs/numerics.md: rates, optimizers, and clipping by the norm of all stages, for which the last two would
have to wait. Error Feedback of a stage has c = α·δ_s, and corrects what is late.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.func import functional_call

from headway.daemon.jobs.job import JobSpec
from headway.daemon.local.reference_loop import Weights, norm_of
from headway.optim.layer_optimizer import ErrorFeedback, TorchLayerOptimizer, optimizer_factory
from headway.stages.errors import NonFiniteLossError
from headway.stages.model.decoder import build_layer, token_loss
from headway.stages.model.determinism import configure
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.stage.content import MicrobatchSource

PARTS = ("embedding", "attention", "feed-forward", "norms", "head")


def part_of(layer: str, name: str) -> str:
    """Return which of PARTS a parameter of a decoder belongs to."""
    if "norm" in name:
        return "norms"
    if layer in ("embed", "head"):
        return "embedding" if layer == "embed" else "head"
    return "attention" if name.startswith("self_attn.") else "feed-forward"


@dataclass(frozen=True, slots=True)
class Delays:
    """A pipeline, as the weights see it."""

    of_stages: tuple[int, ...]
    """δ_s."""
    microbatches: int = 1
    """Parts of a batch; one update each batch."""
    is_stashed: bool = True
    """Whether the backward reads the forward's weights, not the newest."""
    part: str = ""
    """The only one of PARTS that is late; empty: all are."""

    def is_late(self, layer: str, name: str) -> bool:
        """Return whether a parameter meets old versions."""
        return self.part in ("", part_of(layer, name))

    def met(self, batch: int, microbatch: int, stage: int) -> int:
        """Return the version that a forward meets on a stage."""
        return max(0, (batch * self.microbatches + microbatch - self.of_stages[stage]) // self.microbatches)

    def stage(self, layer: int, num_layers: int) -> int:
        """Return the stage of a layer: slices as equal as can be, later ones the longer."""
        return (len(self.of_stages) * (layer + 1) - 1) // num_layers


def uniform(delay: int, num_stages: int = 1) -> Delays:
    """Return the same delay for all stages."""
    return Delays((delay,) * num_stages)


def part(name: str) -> Delays:
    """Return a delay of one for one of PARTS."""
    return Delays((1,), part=name)


def pipedream(num_stages: int) -> Delays:
    """Return the delay that grows towards the first stage, with weight stashing."""
    return Delays(tuple(reversed(range(num_stages))))


def unstashed(num_stages: int, microbatches: int = 1) -> Delays:
    """Return the same without stashing; with microbatches, PACI."""
    return Delays(tuple(reversed(range(num_stages))), microbatches, is_stashed=False)


@dataclass
class Layer:
    """A layer and its last versions."""

    name: str
    module: torch.nn.Module
    versions: deque[dict[str, Tensor]]
    """By parameter, the newest last: all that its stage may meet."""
    stage: int
    delays: Delays
    leaves: list[dict[str, Tensor]] = field(default_factory=list)
    """What autograd sees of a batch: one set of weights for each version that was met."""

    def forward(self, hidden: Tensor, batch: int) -> Tensor:
        """Return the output for a batch [rows, …], each part by the version that it meets."""
        parts = self.delays.microbatches
        met = Counter(self.delays.met(batch, part, self.stage) for part in range(parts))
        self.leaves = [self._leaf(self.versions[version - batch - 1]) for version in met]
        pieces = torch.split(hidden, [count * len(hidden) // parts for count in met.values()])
        outputs = [functional_call(self.module, *each) for each in zip(self.leaves, pieces, strict=True)]
        return torch.cat(outputs)

    def met(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what a forward meets of a version: the newest one of what is not late."""
        newest = self.versions[-1]
        return {name: w if self.delays.is_late(self.name, name) else newest[name] for name, w in weights.items()}

    def _leaf(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        of_its_own = {name: w if self.delays.is_stashed else w.clone() for name, w in self.met(weights).items()}
        return {name: tensor.detach().requires_grad_() for name, tensor in of_its_own.items()}

    def update_under_graph(self) -> None:
        """Without stashing, put the newest weights where the graph has the forward's, unseen by autograd."""
        for leaf in [] if self.delays.is_stashed else self.leaves:
            for name, tensor in leaf.items():
                tensor.data.copy_(self.versions[-1][name])

    def gradients(self, numbered: Iterator[Tensor]) -> dict[str, Tensor]:
        """Return the sums over the versions; `numbered` are the gradients of all leaves, in their order."""
        of_leaves = [dict(zip(leaf, numbered, strict=False)) for leaf in self.leaves]
        return {name: reduce(add, (each[name] for each in of_leaves)).contiguous() for name in of_leaves[0]}


@dataclass(frozen=True, slots=True)
class Stepped:
    """Parameters of a layer that have an optimizer together: all that are late, or all that are not."""

    layer: Layer
    names: tuple[str, ...]
    optimizer: TorchLayerOptimizer


def train(
    job: JobSpec,
    tokens: MicrobatchSource,
    delays: Delays,
    *,
    on_batch: Callable[[float], None],
    correction: Callable[[str], ErrorFeedback] | None = None,
) -> Weights:
    """Train a float32 job of one microbatch a batch, and return W_B. `on_batch` is called with each batch's loss.

    `uniform(d)` gives the bits of `reference` for a job whose schedule has the delay d; the job's own is not read.
    correction: by layer, what corrects the updates of late parameters; None: Error Feedback, as the job has it.
    Raises NonFiniteLossError. Sets the process's threads and determinism.
    """
    configure(job.train, torch.device("cpu"))
    layers, stepped = [], list[Stepped]()
    for index, name in enumerate(job.layers):
        stage = delays.stage(index, len(job.layers))
        delay, weights = delays.of_stages[stage], initial_parameters(name, job.model, seed=job.job.seed)
        module = build_layer(name, job.model, attention_backend=job.train.attention_backend)
        layers.append(Layer(name, module, deque([weights], maxlen=delay + 1), stage, delays))
        for is_late in (True, False):
            if names := tuple(each for each in weights if delays.is_late(name, each) is is_late):
                make = optimizer_factory(job.optim, num_batches=job.train.batches, delay=delay if is_late else 0)
                optimizer = make(name, {each: weights[each] for each in names})
                if correction and is_late:
                    optimizer.error_feedback = correction(name)
                stepped.append(Stepped(layers[-1], names, optimizer))
    for batch in range(job.train.batches):
        rows = tokens.microbatch(job.train, seed=job.job.seed, batch=batch, microbatch=0)
        logits = reduce(lambda hidden, layer: layer.forward(hidden, batch), layers, rows.inputs)
        loss = token_loss(logits, rows.targets)
        if not math.isfinite(loss.item()):
            raise NonFiniteLossError(batch, 0, loss.item())
        update(batch, stepped, clipped(_gradient(loss, layers), job.train.clip_norm))
        on_batch(loss.item())
    return {layer.name: layer.versions[-1] for layer in layers}


def update(batch: int, stepped: list[Stepped], gradient: Weights) -> None:
    """Add a version of every layer."""
    current = {each.layer.name: each.layer.versions[-1] for each in stepped}
    target = {layer: {name: torch.empty_like(tensor) for name, tensor in of.items()} for layer, of in current.items()}
    maps = (
        [{name: of[each.layer.name][name] for name in each.names} for each in stepped]
        for of in (current, target, gradient)
    )
    weights, updated, gradients = maps
    optimizers = [each.optimizer for each in stepped]
    TorchLayerOptimizer.step_together(optimizers, batch, current=weights, target=updated, gradients=gradients)
    for layer in {each.layer.name: each.layer for each in stepped}.values():
        layer.versions.append(target[layer.name])


def _gradient(loss: Tensor, layers: list[Layer]) -> Weights:
    for layer in layers:
        layer.update_under_graph()
    leaves = [tensor for layer in layers for leaf in layer.leaves for tensor in leaf.values()]
    numbered = iter(torch.autograd.grad(loss, leaves))
    return {layer.name: layer.gradients(numbered) for layer in layers}


def clipped(gradient: Weights, clip_norm: float) -> Weights:
    """Return the gradient by docs/numerics.md, section 3, changed in place."""
    coefficient = min(1.0, clip_norm / (norm_of(gradient, is_tied=False) + 1e-6)) if clip_norm > 0 else 1.0
    for tensor in (each for of_layer in gradient.values() for each in of_layer.values()):
        tensor.mul_(coefficient)
    return gradient
