"""What the leads of two stages tell each other beside microbatches: the gradient's norm, and an early end of the job.

A layer's square is the left fold of its parameters' squares in name order. The total is the left fold of the layers'
squares from the last layer to the first. All sums are in float64, so no cut of the pipeline changes the norm. Squares
go upstream, and the total comes back downstream. A stage that has the MLP alone of its first block sends the squares of
its parameters last: the stage above folds them with its own. The judgement of an evaluation goes upstream from the last
stage. Each lead tells its siblings.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from headway.stages.device.device import StageDevice
from headway.stages.device.run_events import RunEvents, numbers_of
from headway.stages.early_stop import EvaluationTally
from headway.stages.errors import ProtocolError
from headway.stages.ids import Batch
from headway.stages.links.link import FrameKind
from headway.stages.model.decoder import trained_shapes
from headway.stages.schedule.schedule_state import ScheduleState
from headway.stages.spec import MLP_HALF, ROUTER_BIAS, TIED, ModelSpec, layer_names, whole_layer
from headway.stages.stage.context import StageContext, StageLinks
from headway.stages.stage.replicas import Siblings
from headway.stages.state.layer_state import LayerState, split_by_layer
from headway.stages.sums import fold

EPSILON = 1e-6
PIECE_ELEMENTS = 1 << 20
"""In float64 a piece stays in a core's cache: a tenth of the time of one of 2²⁴ elements."""


@torch.no_grad()
def parameter_squares(gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of squares of each of a layer's gradients, float64 [parameters], in name order."""
    return torch.stack([_square(gradients[name]) for name in sorted(gradients)])


def _square(gradient: Tensor) -> Tensor:
    """Return the left fold of the squares of a gradient's pieces: a whole embedding in float64 would be gigabytes."""
    pieces = torch.split(gradient.reshape(-1), PIECE_ELEMENTS)
    return reduce(torch.add, [piece.to(torch.float64, copy=True).square_().sum() for piece in pieces])


def counted_once(layer: str, gradients: Mapping[str, Any], model: ModelSpec) -> Mapping[str, Any]:
    """Return the gradients of a layer that count: a tied matrix counts at the embedding, a router's bias has none."""
    if layer == "head" and model.trains_tie:
        return {name: gradient for name, gradient in gradients.items() if name != TIED["head"]}
    if model.router_bias:
        return {name: gradient for name, gradient in gradients.items() if not name.endswith(ROUTER_BIAS)}
    return gradients


def layer_squares(
    downstream: Sequence[float], own: Mapping[str, Mapping[str, float]], *, awaited: Sequence[str] = ()
) -> list[float]:
    """Return the squares of all layers down to a stage's first one, the last layer first.

    downstream: those of the stages below. own: by layer of the stage, the last one first, those of its parameters.
    awaited: names of the parameters whose squares are the last ones from downstream, because the stage ends inside
    their block. If the stage begins inside a block, the squares of that one's parameters are last, in name order.
    """
    of_layers, number = {}, len(downstream) - len(awaited)
    if awaited:
        of_layers[whole_layer(next(iter(own)))] = dict(zip(awaited, downstream[number:], strict=True))
    for layer, of_parameters in own.items():
        of_layers.setdefault(whole_layer(layer), {}).update(of_parameters)
    squares = list(downstream[:number])
    *_, first = own
    for layer, of_parameters in of_layers.items():
        in_order = [of_parameters[name] for name in sorted(of_parameters)]
        is_open = first == f"{layer}.{MLP_HALF}"
        squares += in_order if is_open else [fold(in_order) if in_order else 0.0]
    return squares


def clip_coefficient(total_square: float, clip_norm: float) -> float:
    """Return the factor for every gradient: min(1, clip / (norm + 1e-6))."""
    return min(1.0, clip_norm / (math.sqrt(total_square) + EPSILON))


@dataclass(frozen=True, slots=True)
class StageRun:
    """What all parts of an executor share."""

    context: StageContext
    state: ScheduleState
    links: StageLinks
    siblings: Siblings | None
    """The other replicas; None: it is alone on its stage."""
    device: StageDevice
    events: RunEvents


class NormRelay:
    """Tells the schedule's state when a batch's total is known. Without clipping, only the journal waits for it."""

    def __init__(self, run: StageRun, layers: Sequence[LayerState], on_norm: Callable[[int, float], None]) -> None:
        """on_norm: is told of each batch's norm, in order."""
        self._on_norm = on_norm
        self._events = run.events
        self._context = run.context
        self._layers = layers
        self._state = run.state
        self._schedule = run.state.schedule
        self._links = run.links
        self._siblings = run.siblings
        cut = run.context.cut_below
        below = counted_once(cut, trained_shapes(cut, run.context.model), run.context.model) if cut else {}
        self._awaited = sorted(below)
        self._own: dict[int, dict[str, dict[str, float]]] = {}
        """Batch to the squares of this stage's layers by parameter, last layer first, until those from downstream are
        there too.
        """
        self._downstream: dict[int, list[float]] = {}
        """Batch to those of all stages downstream, until the own ones are there too."""
        self._totals: dict[int, float] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether no batch is half known, and every known total was used."""
        return not (self._own or self._downstream or self._totals)

    def expects_squares(self, batch: int) -> bool:
        """Return whether squares from downstream would be the first for their batch, and this worker adds to them."""
        is_next = batch >= self._state.totals_below and batch not in self._downstream
        return self._schedule.is_lead and not self._schedule.is_last and is_next

    def expects_total(self, batch: int) -> bool:
        """Return whether a total would be the next one, and another worker adds it up."""
        has_sender = not (self._schedule.is_first and self._schedule.is_lead)
        return has_sender and self._state.expects_clip_total(batch)

    def reduced(self, batch: int, gradients: Sequence[Tensor]) -> None:
        """The stage's gradient of a batch is known. Its squares come to the host once, for all layers."""
        if not self._schedule.is_lead:
            return
        split = split_by_layer(self._layers, gradients)
        by_layer = {
            layer.name: counted_once(layer.name, of_layer, self._context.model)
            for layer, of_layer in zip(self._layers[::-1], split[::-1], strict=True)
        }

        def known(copied: tuple[Tensor, ...]) -> None:
            numbers = iter(numbers_of(copied[0]))
            self._own[batch] = {
                layer: {name: next(numbers) for name in sorted(of_layer)} for layer, of_layer in by_layer.items()
            }
            self._pass_squares(batch)

        squares = [parameter_squares(of_layer) for of_layer in by_layer.values() if of_layer]
        # A stage of frozen layers has no squares.
        self._events.when_copied((torch.cat(squares) if squares else torch.zeros(0, dtype=torch.float64),), known)

    def squares_arrived(self, batch: int, squares: list[float]) -> None:
        """The squares of all stages downstream, last layer first."""
        self._downstream[batch] = squares
        self._pass_squares(batch)

    def total_arrived(self, batch: int, total: float) -> None:
        """The whole model's. A lead passes it on."""
        if self._schedule.has_clip:
            self._totals[batch] = total
        self._state.clip_total_known(batch)
        self._on_norm(batch, math.sqrt(total))
        if not self._schedule.is_lead:
            return
        frame = self._context.frame(FrameKind.NORM_TOTAL, batch, 0, torch.tensor(total, dtype=torch.float64))
        if self._links.downstream_lead is not None:
            self._links.downstream_lead.send(frame)
        if self._siblings is not None:
            self._siblings.send_to_all(frame)

    def clip(self, batch: int, gradients: list[Tensor]) -> None:
        """Scale a batch's gradient in place, by the total that has arrived."""
        if self._schedule.has_clip:
            coefficient = clip_coefficient(self._totals.pop(batch), self._context.train.clip_norm)
            if gradients:
                torch._foreach_mul_(gradients, coefficient)

    def _pass_squares(self, batch: int) -> None:
        """All squares of this stage and of those downstream, once they are there: upstream, or into the total."""
        if batch not in self._own or (batch not in self._downstream and not self._schedule.is_last):
            return
        downstream = self._downstream.pop(batch, [])
        if len(downstream) < len(self._awaited):
            peer = self._links.downstream_lead.peer if self._links.downstream_lead is not None else "this stage"
            raise ProtocolError(peer, f"{len(downstream)} squares arrived, {self._awaited[-1]}'s is not among them")
        squares = layer_squares(downstream, self._own.pop(batch), awaited=self._awaited)
        if self._links.upstream_lead is not None:
            tensor = torch.tensor(squares, dtype=torch.float64)
            self._links.upstream_lead.send(self._context.frame(FrameKind.NORM_SQUARES, batch, 0, tensor))
            return
        num_layers = len(layer_names(self._context.model))
        if len(squares) != num_layers:
            peer = self._links.downstream_lead.peer if self._links.downstream_lead is not None else "this stage"
            raise ProtocolError(peer, f"squares of {len(squares)} layers arrived, the model has {num_layers}")
        self.total_arrived(batch, fold(squares))


class EndRelay:
    """Tells the schedule's state the job's last boundary. Does nothing in a job that no evaluation can end."""

    def __init__(self, run: StageRun) -> None:
        self._context = run.context
        self._state = run.state
        self._links = run.links
        self._siblings = run.siblings
        self._best_batch: int | None = None

    @property
    def best_batch(self) -> Batch | None:
        """Return the best evaluation's batch if the job ends here, before its last batch; None: it does not."""
        is_early = self._state.version == self._state.end < self._context.train.batches
        return Batch(self._best_batch) if is_early and self._best_batch is not None else None

    def expects(self, batch: int) -> bool:
        """Return whether a judgement would be the next one, and another worker makes it."""
        has_sender = not (self._context.is_last and self._context.is_lead)
        return has_sender and self._state.expects_judgement(batch)

    def began(self, tally: EvaluationTally) -> None:
        """Tell what the journal has said before the run; the lead of the last stage does. What the run begins beyond
        needs no words.
        """
        every = self._state.schedule.judged_every
        newest = (self._context.boundary - 1) // every * every if every else -1
        if newest >= self._state.first_unjudged:
            self.judged(newest, tally)

    def judged(self, batch: int, tally: EvaluationTally) -> None:
        """An evaluation is in the journal, and decides with all before it."""
        self.arrived(batch, end=tally.end or self._context.train.batches, best_batch=tally.best_batch)

    def arrived(self, batch: int, *, end: int, best_batch: int) -> None:
        """A judgement is known. A lead passes it on. Raises ValueError for an end that this stage is past."""
        self._state.judged(batch, end)
        self._best_batch = best_batch
        if not self._context.is_lead:
            return
        frame = self._context.frame(FrameKind.JOB_END, batch, 0, torch.tensor([end, best_batch]))
        if self._links.upstream_lead is not None:
            self._links.upstream_lead.send(frame)
        if self._siblings is not None:
            self._siblings.send_to_all(frame)
