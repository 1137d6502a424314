"""`python -m headway.daemon.jobs.plugin_trial OUT`: the process that tries a job's plug-ins before it is submitted.

It reads the job from stdin, and writes a `Trial` to OUT. What the plug-ins need is counted on tensors without content,
and that they keep the rules of docs/plugins.md is tried on small ones.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.plugins import Trial, import_plugins
from headway.optim.layer_optimizer import inner_optimizer, optimizer_factory, state_tensors
from headway.optim.routing import ROUTER_BIAS, Group, route_layer
from headway.optim.spec import GroupSpec, KeptState, OptimSpec, StateTensor
from headway.stages.data.shard_index import INDEX_NAME
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.errors import DataError
from headway.stages.model.decoder import build_layer, trained_shapes
from headway.stages.model.initial_weights import initial_parameters
from headway.stages.model.objective import objective_loss
from headway.stages.plugin_names import PluginError, imported, is_import_path, told_by

NUM_UPDATES: Final = 3
MOST_TRIED: Final = 1 << 27
"""Parameters of a block that is computed with content."""
MOST_TOKENS: Final = 1 << 30
"""Of a source: some gigabytes."""
NO_TOKENIZER: Final = "none"
BYTES: Final = "bytes"
NUM_BYTES: Final = 256
_SMALL: Final[dict[Group, tuple[str, dict[str, tuple[int, ...]]]]] = {
    Group.MATRICES: ("block.0", {"a.weight": (6, 4), "b.weight": (4, 6), "c.weight": (4, 4)}),
    Group.REST: ("embed", {"norm.weight": (5,), "weight": (6, 4), "z.bias": (3,)}),
}


def main() -> None:
    """Run the process."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=JobSpec)
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(tried(spec, Path(sys.argv[2]))))


def tried(spec: JobSpec, source_folder: Path) -> Trial:
    """Return what a job's plug-ins need, or what is wrong with one. source_folder: gets the tokens of its source."""
    try:
        import_plugins(spec, Path(spec.plugins.data.source))
        _try_loss(spec)
        try:
            _write_source(spec, source_folder)
        except OSError as error:
            return Trial(fault=f"the tokens of {spec.data.source} cannot be written: {error.strerror}")
        block = block_trial(spec)
        spec = spec.with_values({"model.block_shapes": block.block_shapes})
        matrices = optimizer_trial(spec, Group.MATRICES, spec.optim.matrices)
        rest = optimizer_trial(spec, Group.REST, spec.optim.rest)
        return msgspec.structs.replace(block, matrices=matrices, rest=rest)
    except (PluginError, DataError) as error:
        return Trial(fault=str(error))


def _try_loss(spec: JobSpec) -> None:
    """Compute a job's own loss of a few logits, and its gradient. Raises PluginError when it breaks a rule."""
    if not spec.train.has_own_loss:
        return
    model, train = replace(spec.model, hidden_size=4, vocab_size=8), replace(spec.train, loss_chunk=0)
    head, hidden = build_layer("head", model), _drawn((2, 3, 4), 0).requires_grad_()
    head.load_state_dict({name: _drawn(tuple(each.shape), 1) for name, each in head.named_parameters()}, assign=True)
    targets, divisor = torch.tensor([[0, 7, 2], [3, 3, -100 if train.has_mask else 1]]), None
    if train.has_mask:
        divisor = torch.tensor(2.5)

    def computed() -> tuple[Tensor, ...]:
        loss = objective_loss(head, hidden, train, targets=targets, positions=None, divisor=divisor)
        return (loss.detach(), *torch.autograd.grad(loss, hidden))

    if not all(tensor.isfinite().all() for tensor in _same_twice(train.loss, computed)):
        raise PluginError(train.loss, "makes a loss or a gradient that is not finite, of logits near 0")


def _same_twice(name: str, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return what a plug-in computes. Raises PluginError when it computes other bits with other random numbers."""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        with told_by(name):
            found.append(compute())
    if not all(torch.equal(*pair) for pair in zip(*found, strict=True) if not pair[0].isnan().any()):
        raise PluginError(name, "is not deterministic: it gives other bits a second time, perhaps by dropout")
    return found[0]


def _write_source(spec: JobSpec, folder: Path) -> None:
    """Write what a job's own source yields as token shards, unless they are there. Raises PluginError, DataError."""
    name = spec.data.source
    if not is_import_path(name) or (folder / INDEX_NAME).exists():
        return
    form = DataForm(vocab_size=spec.model.vocab_size)
    tokenizer = BYTES if form.vocab_size == NUM_BYTES else NO_TOKENIZER
    provenance = f"{name} {dict(spec.data.settings)} of {spec.plugins.wheel} {spec.plugins.sha256}"
    with writing_shards(folder, form, tokenizer=tokenizer, provenance=provenance) as writer:
        for tokens in _documents(spec):
            if writer.num_tokens + tokens.size > MOST_TOKENS:
                raise PluginError(name, f"yields more than {MOST_TOKENS} tokens; `headway data prepare` takes more")
            writer.append(tokens)


def _documents(spec: JobSpec) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """Yield the tokens of each document of a job's own source. Raises PluginError."""
    name, size = spec.data.source, spec.model.vocab_size
    with told_by(name):
        for document in imported(name)(**dict(spec.data.settings)):
            tokens = np.frombuffer(document, np.uint8) if isinstance(document, bytes) else np.asarray(document)
            if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
                what = f"{tokens.dtype} {list(tokens.shape)}" if tokens.ndim else f"a {type(document).__name__}"
                raise PluginError(name, f"yields {what}, and a document is bytes or a sequence of token numbers")
            if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
                raise PluginError(name, f"yields a token outside the vocabulary of {size}")
            yield tokens


def block_trial(spec: JobSpec) -> Trial:
    """Return what a job's own block computes and keeps of a microbatch, counted on tensors without content.

    Raises PluginError when it breaks a rule.
    """
    if not spec.model.has_own_block:
        return Trial()
    block = build_layer("block.0", spec.model)
    parameters, kept = dict(block.named_parameters()), dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes() // tensor.element_size()
        return tensor

    shape = (spec.train.microbatch_size, spec.train.sequence_length, spec.model.hidden_size)
    hidden = torch.empty(shape, device="meta", requires_grad=True)
    counter = FlopCounterMode(display=False)
    with told_by(spec.model.block):
        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = block(hidden)
        by = torch.autograd.grad(output, [*parameters.values(), hidden], torch.empty_like(output), allow_unused=True)
    unused = [name for name, gradient in zip((*parameters, "its input"), by, strict=True) if gradient is None]
    if unused:
        raise PluginError(spec.model.block, f"does not use {unused[0]}, which would have no gradient")
    _try_block(spec.with_values({"model.block_shapes": ()}))
    return Trial(
        block_shapes=tuple((name, tuple(each.shape)) for name, each in parameters.items()),
        block_flops=float(counter.get_total_flops()),
        block_values=sum(kept.values())
        - sum(kept.get(each.untyped_storage()._cdata, 0) for each in block.parameters()),
    )


def _try_block(spec: JobSpec) -> None:
    """Compute a job's own block of a few tokens, made anew each time, unless it is too large for any machine.

    Raises PluginError when it breaks a rule.
    """
    name, length = spec.model.block, min(spec.train.sequence_length, 8)
    if sum(shape.numel() for shape in trained_shapes("block.0", spec.model).values()) > MOST_TRIED:
        return
    weights = initial_parameters("block.0", spec.model, seed=spec.job.seed)
    hidden = _drawn((2, length, spec.model.hidden_size), 0)
    later = hidden.clone()
    later[:, length // 2 :] = _drawn((2, length - length // 2, spec.model.hidden_size), 1)

    def computed(rows: Tensor) -> tuple[Tensor, ...]:
        block, leaf = build_layer("block.0", spec.model), rows.clone().requires_grad_()
        block.load_state_dict({key: tensor.clone() for key, tensor in weights.items()}, assign=True)
        output = block(leaf)
        return (output.detach(), *torch.autograd.grad(output.square().sum(), (*block.parameters(), leaf)))

    first, third = (_same_twice(name, partial(computed, rows))[0][:, : length // 2] for rows in (hidden, later))
    if not first.isfinite().all():
        raise PluginError(name, "makes numbers that are not finite, of random hidden states")
    if not torch.allclose(first, third, rtol=1e-4, atol=1e-5):
        raise PluginError(name, "lets a token see those after it, which it is to predict")


def optimizer_trial(spec: JobSpec, group: Group, optimizer: GroupSpec) -> tuple[KeptState, ...]:
    """Return what a plug-in keeps for each shape of its group's parameters; of another optimizer, nothing.

    Raises PluginError when it breaks a rule.
    """
    if not optimizer.is_plugin:
        return ()
    with told_by(optimizer.name):
        _check_rules(group, optimizer)
        return tuple(_kept(optimizer, shape) for shape in sorted(set(_shapes(spec, group))))


def _shapes(spec: JobSpec, group: Group) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of the parameters in a group."""
    num_kinds = min(len(spec.model.layer_types) or 1, spec.model.num_hidden_layers)
    for layer in ("embed", *(f"block.{index}" for index in range(num_kinds)), "head"):
        parameters = {
            name: torch.empty(shape, device="meta") for name, shape in trained_shapes(layer, spec.model).items()
        }
        for name in route_layer(layer, parameters).get(group, ()):
            if name != ROUTER_BIAS:
                yield tuple(parameters[name].shape)


def _kept(optimizer: GroupSpec, shape: tuple[int, ...]) -> KeptState:
    """Return what is kept for a parameter. Steps that read values are done with content."""
    try:
        return KeptState(shape, _stepped(optimizer, torch.empty(shape, device="meta")))
    except (RuntimeError, NotImplementedError):
        return KeptState(shape, _stepped(optimizer, torch.zeros(shape)))


def _stepped(optimizer: GroupSpec, weight: Tensor) -> tuple[StateTensor, ...]:
    slot = torch.nn.Parameter(weight, requires_grad=False)
    made = inner_optimizer(optimizer, [slot])
    if made.state:
        raise PluginError(optimizer.name, "keeps state before its first step; make it in `step`")
    before = [{key: value for key, value in of.items() if key != "params"} for of in made.param_groups]
    slot.grad = torch.ones_like(slot)
    with torch.no_grad():
        made.step()
    if before != [{key: value for key, value in of.items() if key != "params"} for of in made.param_groups]:
        raise PluginError(optimizer.name, "changes its param_groups in a step; only self.state[parameter] is saved")
    return state_tensors(made.state.get(slot, {}))


def _check_rules(group: Group, optimizer: GroupSpec) -> None:
    """Try that a step has no other memory than its state, and no parameter another's result. Raises PluginError."""
    layer, shapes = _SMALL[group]
    small = replace(optimizer, kept=tuple(_kept(optimizer, shape) for shape in sorted(set(shapes.values()))))
    optim = replace(OptimSpec(), matrices=small, rest=small, error_feedback=0.0, warmup_batches=0)

    def updated(names: tuple[str, ...], *, is_restored: bool) -> dict[str, Tensor]:
        make = optimizer_factory(optim, num_batches=NUM_UPDATES, delay=0)
        weights = {name: _drawn(shapes[name], 0) for name in names}
        stepping = make(layer, weights)
        for update in range(NUM_UPDATES):
            if is_restored and update:
                kept, stepping = stepping.state(), make(layer, weights)
                stepping.load_state(kept)
            gradients = {name: _drawn(shapes[name], update + 1) for name in names}
            stepping.step(update, current=weights, target=weights, gradients=gradients)
        return weights

    plain = updated(tuple(shapes), is_restored=False)
    alone = {name: updated((name,), is_restored=False)[name] for name in shapes}
    again = updated(tuple(shapes), is_restored=False)
    restored = updated(tuple(shapes), is_restored=True)
    rules: dict[str, Mapping[str, Tensor]] = {
        "is not deterministic: it gives other bits a second time": again,
        "steps a parameter otherwise when it is alone; nothing may depend on the other parameters": alone,
        "steps otherwise when it is made anew; only self.state[parameter] is saved, keep nothing elsewhere": restored,
    }
    for what, other in rules.items():
        if any(not torch.equal(plain[name], other[name]) for name in shapes):
            raise PluginError(optimizer.name, what)


def _drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


if __name__ == "__main__":
    main()
