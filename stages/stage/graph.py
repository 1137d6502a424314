"""Forward and backward of a stage's layers, and the autograd graphs of the microbatches in flight.

A stage that has both halves of a block computes them as the whole block. It is a row of *pieces*: runs of layers with
one graph each. A piece keeps its graph from its forward to its backward; with `recompute = "block"` each block is a
piece that keeps only its input and recomputes its graph. With `elementwise` and `attention` the graph stays one, and a
part is computed again inside it. The place of a graph's cut changes no bit: the gradient of a piece's input is that of
the output of the piece above it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.stages.data.microbatch import Microbatch
from headway.stages.model.adapters import set_draw
from headway.stages.model.compilation import compile_layer
from headway.stages.model.decoder import Block, build_layer, trained_shapes
from headway.stages.model.experts import set_router_losses
from headway.stages.model.objective import beside_frozen, objective_loss
from headway.stages.model.positions import DocumentRows, document_rows
from headway.stages.spec import ModelSpec, TrainSpec, computed_layers, layer_names, whole_layer
from headway.stages.state.layer_state import LayerState, share_of_update, split_by_layer, update_layers
from headway.stages.state.weight_versions import ParameterSet
from headway.stages.telemetry.layer_times import LayerTimes, Sample


@dataclass(frozen=True, slots=True)
class _Piece:
    """Modules first … end-1 of a stage, differentiated as one graph."""

    first: int
    end: int
    is_recomputed: bool
    has_trained_below: bool
    """Whether any layer of the model below it is trained, so that the gradient of its input is needed."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """One microbatch between its forward and its backward."""

    version: int
    targets: Tensor
    positions: Tensor | None
    divisor: Tensor | None
    documents: DocumentRows | None
    draw: str
    """Whose dropout it has; empty: it has none."""
    inputs: list[Tensor]
    """Input of each piece: leaves, or the tokens."""
    outputs: list[Tensor | None]
    """Output of each piece, with its graph; None if that is recomputed."""
    sample: Sample | None
    """Record for its times, if it is timed."""


class StageGraph:
    """The layers of a stage in a row, on an explicit weight version.

    There is one module per layer and tensor set, whose parameters are that set's tensors: a forward reads a version by
    calling its module. Two halves of a block have one together. The arithmetic is that of functional_call, without its
    cost per call.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        model: ModelSpec,
        train: TrainSpec,
        *,
        is_first: bool,
        is_last: bool,
        seed: int = 0,
        times: LayerTimes | None = None,
    ) -> None:
        self._layers = tuple(layers)
        self._names = computed_layers([layer.name for layer in layers])
        self._layers_of = [[each for each in layers if whole_layer(each.name) == whole_layer(n)] for n in self._names]
        """The layers of each module: one, or two halves."""
        self._is_last = is_last
        self._seed = seed
        self._drops = model.adapter.dropout > 0
        self._train = train
        self._model = model
        self._dtype: torch.dtype = getattr(torch, train.dtype)
        self._times = times
        self._modules = tuple(
            tuple(
                set_router_losses(
                    _bound(
                        build_layer(name, model, attention_backend=train.attention_backend),
                        {key: each for layer in held for key, each in (layer.versions.sets[k] | layer.frozen).items()},
                    ),
                    train,
                )
                for name, held in zip(self._names, self._layers_of, strict=True)
            )
            for k in (0, 1)
        )
        assert train.recompute != "auto", "the plan chooses what a stage computes again"
        self._recomputes = train.recompute != "none"
        for module in (*self._modules[0], *self._modules[1]):
            if isinstance(module, Block):
                module.compute_again(train.recompute)
        if train.compile:
            for module in (*self._modules[0], *self._modules[1]):
                compile_layer(module)
        self._pieces = _pieces([held[0].name for held in self._layers_of], model, train, is_first=is_first)
        # By tensor set and piece.
        self._parameters = tuple(
            tuple(
                [
                    tensor
                    for held in self._layers_of[piece.first : piece.end]
                    for layer in held
                    for tensor in layer.versions.sets[k].values()
                ]
                for piece in self._pieces
            )
            for k in (0, 1)
        )
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._num_readers = [0, 0]

    @property
    def is_empty(self) -> bool:
        """Return whether no graph is alive."""
        return not self._in_flight

    def forward(self, key: tuple[int, int], rows: Microbatch, *, version: int) -> Tensor:
        """Compute a microbatch on W_version and keep its graph.

        key: (batch, microbatch). Returns the hidden output, or the loss [] on the last stage, without a graph.
        """
        assert key not in self._in_flight, f"microbatch {key} is in flight already"
        self._check_live(version)
        sample = self._times.microbatch() if self._times is not None else None
        held = self._held(rows, version, sample, draw=f"{self._seed}/{key[0]}/{key[1]}")
        hidden = rows.inputs
        for piece in self._pieces:
            leaf = hidden.detach().requires_grad_() if piece.has_trained_below else hidden
            compute = self._compute if held.sample is None else self._compute_timed
            output: Tensor | None = compute(piece, leaf, held)
            assert output is not None
            hidden = output.detach()
            if piece.is_recomputed:
                output = None  # its graph is freed before that of the next piece is built
            held.inputs.append(leaf)
            held.outputs.append(output)
        self._in_flight[key] = held
        self._num_readers[version % 2] += 1
        return hidden

    @torch.no_grad()
    def evaluate(self, rows: Microbatch, *, version: int) -> Tensor:
        """Compute a held-out microbatch on W_version and keep nothing. Returns as `forward`."""
        self._check_live(version)
        held = self._held(rows, version, None, draw="")
        hidden = rows.inputs
        for layer in range(len(self._names)):
            hidden = self._layer_output(layer, hidden, held)
        return hidden

    def backward(self, key: tuple[int, int], gradient: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """Differentiate a microbatch by the weights that its forward read, and free its graph.

        gradient: that of the output; None on the last stage. Returns the parameters' gradients, in the order of the
        layers and their parameters, and that of the input; None if no layer below the stage is trained.
        """
        held = self._in_flight.pop(key)
        by_piece: list[list[Tensor]] = []
        for index in reversed(range(len(self._pieces))):
            piece, leaf, output = self._pieces[index], held.inputs.pop(), held.outputs.pop()
            if held.sample is not None:
                held.sample.begin()
            if self._recomputes:
                self._check_live(held.version)
            if output is None:
                output = self._compute(piece, leaf, held)
            elif self._drops and self._recomputes:
                for module in self._modules[held.version % 2][piece.first : piece.end]:
                    set_draw(module, held.draw)  # attention is computed again in the call below
            parameters = self._parameters[held.version % 2][index]
            by = [*parameters, leaf] if piece.has_trained_below else parameters
            # Only the embedding's piece may have nothing to differentiate by: its weights are frozen under an adapter.
            gradients = list(torch.autograd.grad(output, by, None if gradient is None else (gradient,))) if by else []
            if held.sample is not None:
                held.sample.ended("backward", piece.first)
            gradient = gradients.pop() if len(by) > len(parameters) else None
            by_piece.append(gradients)
        self._num_readers[held.version % 2] -= 1
        if self._times is not None and held.sample is not None:
            self._times.finished(held.sample)
        return [tensor for gradients in reversed(by_piece) for tensor in gradients], gradient

    def _compute(self, piece: _Piece, leaf: Tensor, held: _InFlight) -> Tensor:
        """Return a piece's output, or the loss, with its graph. A second call does identical operations."""
        output = leaf
        for layer in range(piece.first, piece.end):
            output = self._layer_output(layer, output, held)
        return output

    def _compute_timed(self, piece: _Piece, leaf: Tensor, held: _InFlight) -> Tensor:
        """Compute a piece with a mark after each layer, in the forward and in the coming backward."""
        sample = held.sample
        assert sample is not None
        output = leaf
        sample.begin()
        for layer in range(piece.first, piece.end):
            if layer > piece.first:
                sample.ends_backward(layer, output)
            output = self._layer_output(layer, output, held)
            sample.ended("forward", layer)
        return output

    def _layer_output(self, layer: int, hidden: Tensor, held: _InFlight) -> Tensor:
        """Return the hidden states that a module makes, or the loss if it has the model's last layer."""
        module = self._modules[held.version % 2][layer]
        if self._drops:
            set_draw(module, held.draw)
        if self._is_last and layer == len(self._names) - 1:
            targets, positions, divisor = held.targets, held.positions, held.divisor
            return objective_loss(module, hidden, self._train, targets=targets, positions=positions, divisor=divisor)
        is_block = held.documents is not None and self._names[layer].startswith("block.")
        if self._train.learns_preferences:
            return beside_frozen(module, hidden, held.documents if is_block else None)
        output: Tensor = module(hidden, held.documents) if is_block else module(hidden)
        return output

    def _held(self, rows: Microbatch, version: int, sample: Sample | None, *, draw: str) -> _InFlight:
        documents = self._documents(rows)
        return _InFlight(version, rows.targets, rows.positions, rows.mean_tokens, documents, draw, [], [], sample)

    def _documents(self, rows: Microbatch) -> DocumentRows | None:
        """Return what the stage's blocks read of the microbatch's positions."""
        has_blocks = any(name.startswith("block.") for name in self._names)
        if rows.positions is None or not has_blocks:
            return None
        return document_rows(rows.positions, self._model, self._dtype)

    def _check_live(self, version: int) -> None:
        assert all(layer.versions.holds(version) for layer in self._layers), f"W_{version} is not live"

    def _check_unread(self, batch: int) -> None:
        assert self._num_readers[(batch + 1) % 2] == 0, f"update {batch} would overwrite weights that are in use"

    def version_of(self, key: tuple[int, int]) -> int:
        """Return the version on which a microbatch in flight was computed."""
        return self._in_flight[key].version

    def share_of_update(self, batch: int, gradients: Sequence[Tensor], matrices: Sequence[int]) -> Tensor:
        """Return the share of update(b) that these matrices are, as one row; weights and state stay as they are."""
        return share_of_update(self._layers, batch, split_by_layer(self._layers, gradients), matrices)

    def update_from_shares(
        self, batch: int, gradients: Sequence[Tensor], *, owners: Sequence[int], shares: Mapping[int, Tensor]
    ) -> None:
        """Do `update` with what `share_of_update` has returned on each replica, for the matrices that it owns.

        It is not timed: the times of layers are those of whole updates.
        """
        self._check_unread(batch)
        by_layer = split_by_layer(self._layers, gradients)
        update_layers(self._layers, batch, by_layer, owners=owners, shares=shares)

    def update(self, batch: int, gradients: Sequence[Tensor]) -> None:
        """Do update(b) of every layer, with the finished gradients in backward's order."""
        self._check_unread(batch)
        by_layer = split_by_layer(self._layers, gradients)
        sample = self._times.update() if self._times is not None else None
        if self._times is None or sample is None:
            update_layers(self._layers, batch, by_layer)
            return
        of_layers = iter(by_layer)
        for index, held in enumerate(self._layers_of):
            for layer in held:
                layer.update(batch, next(of_layers))
            sample.ended("update", index)
        self._times.finished(sample)


def _pieces(names: Sequence[str], model: ModelSpec, train: TrainSpec, *, is_first: bool) -> tuple[_Piece, ...]:
    """Return a stage's modules as pieces: all in one, or each by itself, and the blocks computed twice.

    names: of the first layer of each.
    """
    every = layer_names(model, are_split=any(name != whole_layer(name) for name in names))
    lowest = next((number for number, name in enumerate(every) if trained_shapes(name, model)), len(every))
    if train.compile:
        lowest = 0  # layers are compiled ahead for inputs with a gradient, see compile_ahead
    are_above = [every.index(name) > lowest and not (is_first and k == 0) for k, name in enumerate(names)]
    if train.recompute != "block":
        return (_Piece(0, len(names), is_recomputed=False, has_trained_below=are_above[0]),)
    return tuple(
        _Piece(k, k + 1, is_recomputed=name.startswith("block."), has_trained_below=are_above[k])
        for k, name in enumerate(names)
    )


def _bound(module: nn.Module, parameters: ParameterSet) -> nn.Module:
    """Return a module with the given parameters. Raises KeyError when one is missing."""
    for path, part in module.named_modules():
        for name in [name for name, _ in part.named_parameters(recurse=False)]:
            part.register_parameter(name, parameters[f"{path}.{name}" if path else name])
    return module
