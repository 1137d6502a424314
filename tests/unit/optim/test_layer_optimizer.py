"""The adapter between torch optimizers and two tensor sets, against plain single-buffer loops."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from headway.optim.layer_optimizer import TorchLayerOptimizer, UpdateOrderError, inner_optimizer, optimizer_factory
from headway.optim.routing import route_layer
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.state.optimizer import OptimizerFactory

NUM_BATCHES = 8
SHAPES = {"up.weight": (12, 8), "down.weight": (8, 12), "norm.weight": (8,), "up.bias": (12,)}
INNER = {
    "muon": GroupSpec(name="muon", lr=0.02),
    "adamw": GroupSpec(name="adamw", lr=0.01),
    "lion": GroupSpec(name="lion", lr=0.01),
    "sgd": GroupSpec(name="sgd", lr=0.05),
    "plain sgd": GroupSpec(name="sgd", lr=0.05, momentum=0.0),
    "soap": GroupSpec(name="soap", lr=0.01, precondition_frequency=1),
    "adan": GroupSpec(name="adan", lr=0.01),
    "mars": GroupSpec(name="mars", lr=0.01),
    "normuon": GroupSpec(name="normuon", lr=0.02),
    "lionmuon": GroupSpec(name="lionmuon", lr=0.02),
    "narrow-muon": GroupSpec(name="muon", lr=0.02, momentum_dtype="bfloat16"),
    "narrow-lion": GroupSpec(name="lion", lr=0.01, momentum_dtype="bfloat16"),
    "narrow-sgd": GroupSpec(name="sgd", lr=0.05, momentum_dtype="bfloat16"),
    "narrow-soap": GroupSpec(name="soap", lr=0.01, precondition_frequency=1, momentum_dtype="bfloat16"),
    "narrow-adan": GroupSpec(name="adan", lr=0.01, momentum_dtype="bfloat16"),
    "narrow-mars": GroupSpec(name="mars", lr=0.01, momentum_dtype="bfloat16"),
    "narrow-normuon": GroupSpec(name="normuon", lr=0.02, momentum_dtype="bfloat16"),
    "narrow-lionmuon": GroupSpec(name="lionmuon", lr=0.02, momentum_dtype="bfloat16"),
}
MOMENTUM = ("momentum_buffer", "exp_avg")
Parameters = dict[str, Tensor]


def spec_of(name: str, *, alpha: float = 1.0) -> OptimSpec:
    """A job's [optim] with this optimizer for the matrices and, if it takes others, the rest; narrow: in bfloat16."""
    group = INNER[name]
    rest = replace(INNER["adamw"], momentum_dtype=group.momentum_dtype) if group.kind.takes_matrices_only else group
    return OptimSpec(
        matrices=group,
        rest=rest,
        error_feedback=alpha,
        error_feedback_dtype=INNER[name].momentum_dtype,
        lr_schedule="cosine",
        warmup_batches=3,
    )


def make(spec: OptimSpec, parameters: Mapping[str, Tensor], *, delay: int = 1) -> TorchLayerOptimizer:
    """The optimizer of a block."""
    return optimizer_factory(spec, num_batches=NUM_BATCHES, delay=delay)("block.0", parameters)


def draw(seed: int) -> Parameters:
    """A tensor for each parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def copies(parameters: Mapping[str, Tensor]) -> Parameters:
    """Return copies of the values in other memory."""
    return {name: tensor.clone() for name, tensor in parameters.items()}


def train(
    optimizer: TorchLayerOptimizer, start: Parameters, *, first: int = 0, last: int = NUM_BATCHES
) -> list[Parameters]:
    """Updates first … last−1 over two alternating sets, beginning at `start` = W_first: all versions that were made."""
    sets = [copies(start), copies(start)]
    versions = []
    for b in range(first, last):
        optimizer.step(b, current=sets[b % 2], target=sets[(b + 1) % 2], gradients=draw(1000 + b))
        versions.append(copies(sets[(b + 1) % 2]))
    return versions


def rounded(tensor: Tensor, dtype: str) -> Tensor:
    """Values as a buffer of a dtype remembers them, in fp32."""
    return tensor.to(getattr(torch, dtype)).float()


def plain_loop(spec: OptimSpec, start: Parameters, *, delay: int) -> list[Parameters]:
    """One set of Parameters, one torch optimizer a group, the schedule written out, Error Feedback in numpy."""
    parameters = {name: Parameter(tensor.clone()) for name, tensor in start.items()}
    by_group = route_layer("block.0", start)
    groups = [
        (group_spec, inner_optimizer(group_spec, [parameters[name] for name in names]))
        for group_spec, names in ((getattr(spec, group.value), names) for group, names in by_group.items())
    ]
    deltas: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}
    versions = []
    c = np.float32(spec.error_feedback * delay)
    for b in range(NUM_BATCHES):
        w, progress = spec.warmup_batches, (b - spec.warmup_batches) / (NUM_BATCHES - spec.warmup_batches)
        factor = (b + 1) / w if b < w else 0.5 * (1 + np.cos(np.pi * progress))
        before = {name: parameter.detach().numpy().copy() for name, parameter in parameters.items()}
        for name, gradient in draw(1000 + b).items():
            parameters[name].grad = gradient
        for group_spec, optimizer in groups:
            optimizer.param_groups[0]["lr"] = group_spec.lr * float(factor)
            optimizer.step()
            for state in optimizer.state.values():
                for slot in set(MOMENTUM) & set(state):
                    state[slot] = rounded(state[slot], group_spec.momentum_dtype)
        for name, parameter in parameters.items():
            delta = before[name] - parameter.detach().numpy()
            if c != 0 and b > 0:
                corrected = parameter.detach().numpy() - c * (delta - deltas[name])
                parameter.data.copy_(torch.from_numpy(corrected))
            deltas[name] = rounded(torch.from_numpy(delta), spec.error_feedback_dtype).numpy()
        versions.append({name: parameter.detach().clone() for name, parameter in parameters.items()})
    return versions


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Every bit of every parameter."""
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def assert_same_versions(left: list[Parameters], right: list[Parameters]) -> None:
    """Every bit of every version."""
    for one, other in zip(left, right, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(("alpha", "delay"), [(1.0, 1), (0.5, 1), (0.0, 1), (1.0, 0)])
@pytest.mark.parametrize("name", INNER)
def test_two_sets_give_the_bits_of_one_buffer(name: str, alpha: float, delay: int) -> None:
    """Eight updates over alternating sets → every version of a plain loop: rate by b, bias correction by b+1."""
    spec, start = spec_of(name, alpha=alpha), draw(0)
    assert_same_versions(train(make(spec, start, delay=delay), start), plain_loop(spec, start, delay=delay))


@pytest.mark.parametrize("boundary", range(NUM_BATCHES + 1))
@pytest.mark.parametrize("name", INNER)
def test_a_moved_state_changes_no_bit(name: str, boundary: int) -> None:
    """State carried at any boundary into a fresh optimizer, its mapping permuted → the bits of never having moved."""
    spec, start = spec_of(name), draw(0)
    undisturbed = train(make(spec, start), start)
    first = make(spec, start)
    versions = train(first, start, last=boundary)
    carried = copies(first.state())
    second = make(spec, dict(reversed(copies(start).items())))
    second.load_state(dict(reversed(carried.items())))
    assert_same(second.state(), carried)
    versions += train(second, versions[-1] if versions else start, first=boundary)
    assert_same_versions(versions, undisturbed)
    for (
        key,
        tensor,
    ) in carried.items():  # load_state copied: what the new optimizer did is not seen in what it was given
        assert boundary == NUM_BATCHES or not torch.equal(second.state()[key], tensor)


@pytest.mark.parametrize("name", INNER)
def test_a_rollback_replays_the_same_bits(name: str) -> None:
    """The same instance goes back to boundary 3, then to boundary 0 → the versions it had made before."""
    spec, start = spec_of(name), draw(0)
    optimizer = make(spec, start)
    versions = train(optimizer, start, last=3)
    saved = copies(optimizer.state())
    versions += train(optimizer, versions[-1], first=3)
    optimizer.load_state(saved)
    assert_same_versions(train(optimizer, versions[2], first=3), versions[3:])
    optimizer.load_state({})
    assert_same_versions(train(optimizer, start), versions)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("name", INNER)
def test_a_master_updated_in_place_gets_the_same_bits(name: str, alpha: float) -> None:
    """`target` is `current`, as in a bf16 job, whose parameters the optimizer was made from → the bits of two sets."""
    spec, start = spec_of(name, alpha=alpha), draw(0)
    expected = train(make(spec, start), start)
    optimizer = make(spec, {parameter: tensor.bfloat16() for parameter, tensor in start.items()})
    master = copies(start)
    for b in range(NUM_BATCHES):
        optimizer.step(b, current=master, target=master, gradients=draw(1000 + b))
        assert_same(master, expected[b])


@pytest.mark.parametrize("name", INNER)
def test_current_and_gradients_are_left_alone(name: str) -> None:
    """An update writes its target only: W_b, which a snapshot may be reading, and the gradient keep every bit."""
    start = draw(0)
    optimizer = make(spec_of(name), start)
    sets = [copies(start), {parameter: torch.full(shape, torch.nan) for parameter, shape in SHAPES.items()}]
    for b in range(3):
        current, gradients = sets[b % 2], draw(1000 + b)
        before, counters = copies(current), {parameter: tensor._version for parameter, tensor in current.items()}
        optimizer.step(b, current=current, target=sets[(b + 1) % 2], gradients=gradients)
        assert_same(current, before)
        assert_same(gradients, draw(1000 + b))
        assert {parameter: tensor._version for parameter, tensor in current.items()} == counters


@pytest.mark.parametrize("is_in_place", [False, True])
def test_autograd_notices_that_a_live_set_was_overwritten(is_in_place: bool) -> None:
    """A graph holds the target when the update comes → backward raises instead of using the wrong version."""
    start = draw(0)
    current = {parameter: tensor.requires_grad_() for parameter, tensor in copies(start).items()}
    target = current if is_in_place else {parameter: tensor.requires_grad_() for parameter, tensor in draw(1).items()}
    hidden = torch.ones(8, requires_grad=True)
    loss = (target["up.weight"] @ hidden).sum()
    make(spec_of("muon"), start).step(0, current=current, target=target, gradients=draw(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, hidden)


def test_state_is_live_and_flat() -> None:
    """Empty at boundary 0; then `<slot>/<parameter>`, the same tensors at each call, changed by the next update."""
    start = draw(0)
    optimizer = make(spec_of("muon"), start)
    assert optimizer.state() == {}
    versions = train(optimizer, start, last=1)
    state = optimizer.state()
    assert sorted(state) == [
        "error_feedback/down.weight",
        "error_feedback/norm.weight",
        "error_feedback/up.bias",
        "error_feedback/up.weight",
        "exp_avg/norm.weight",
        "exp_avg/up.bias",
        "exp_avg_sq/norm.weight",
        "exp_avg_sq/up.bias",
        "momentum_buffer/down.weight",
        "momentum_buffer/up.weight",
    ]
    before = copies(state)
    train(optimizer, versions[0], first=1, last=2)
    for key, tensor in optimizer.state().items():
        assert tensor is state[key]
        assert not torch.equal(tensor, before[key])


def test_state_with_gaps_or_extras_is_refused() -> None:
    """One tensor missing, unknown or of another shape → an error that names it, and the old state stays in force."""
    spec, start = spec_of("muon"), draw(0)
    donor, optimizer = make(spec, start), make(spec, start)
    train(donor, start, last=2)
    versions = train(optimizer, start, last=1)
    held, state = copies(optimizer.state()), donor.state()
    for key in state:
        with pytest.raises(KeyError, match=f"{key} is missing"):
            optimizer.load_state({other: tensor for other, tensor in state.items() if other != key})
    with pytest.raises(KeyError, match=r"exp_avg/up\.weight is unknown"):
        optimizer.load_state(state | {"exp_avg/up.weight": torch.zeros(12, 8)})
    with pytest.raises(ValueError, match=r"error_feedback/norm\.weight"):
        optimizer.load_state(state | {"error_feedback/norm.weight": torch.zeros(9)})
    assert_same(optimizer.state(), held)
    train(optimizer, versions[0], first=1, last=2)


def test_error_feedback_of_another_job_is_refused() -> None:
    """State with buffers into an optimizer without Error Feedback, and the other way round → KeyError."""
    start = draw(0)
    with_buffers, without = make(spec_of("adamw"), start), make(spec_of("adamw", alpha=0.0), start)
    train(with_buffers, start, last=1)
    train(without, start, last=1)
    with pytest.raises(KeyError, match=r"error_feedback/down\.weight is unknown"):
        without.load_state(with_buffers.state())
    with pytest.raises(KeyError, match=r"error_feedback/down\.weight is missing"):
        with_buffers.load_state(without.state())


@pytest.mark.parametrize("index", [0, 2, 3])
def test_updates_out_of_order_are_refused(index: int) -> None:
    """After update 0 only update 1 is taken; nothing was written."""
    start = draw(0)
    optimizer = make(spec_of("muon"), start)
    [version] = train(optimizer, start, last=1)
    target = copies(start)
    with pytest.raises(UpdateOrderError, match=f"block.0: update {index} cannot be applied, update 1 is next"):
        optimizer.step(index, current=version, target=target, gradients=draw(5))
    assert_same(target, start)


def test_a_dropped_state_is_an_error() -> None:
    """A fresh optimizer at boundary 3, its state lost on the way → refused instead of a silent restart."""
    start = draw(0)
    optimizer = make(spec_of("muon"), start)
    with pytest.raises(UpdateOrderError):
        train(optimizer, start, first=3)
    optimizer.load_state({})
    with pytest.raises(UpdateOrderError):
        train(optimizer, start, first=3)


@pytest.mark.parametrize("which", ["current", "target", "gradients"])
def test_incomplete_maps_are_refused(which: str) -> None:
    """A parameter too few or too many in any of the three maps → KeyError with its name, and no update counted."""
    start = draw(0)
    optimizer = make(spec_of("sgd"), start)
    maps = {"current": copies(start), "target": copies(start), "gradients": draw(5)}
    removed = maps[which].pop("up.bias")
    with pytest.raises(KeyError, match=r"up\.bias is missing"):
        optimizer.step(0, **maps)
    maps[which] |= {"up.bias": removed, "extra": removed}
    with pytest.raises(KeyError, match="extra is unknown"):
        optimizer.step(0, **maps)
    del maps[which]["extra"]
    optimizer.step(0, **maps)


def test_updates_beyond_the_job_are_refused() -> None:
    """Update B → ValueError."""
    start = draw(0)
    optimizer = make(spec_of("sgd"), start)
    versions = train(optimizer, start)
    with pytest.raises(ValueError, match=f"update {NUM_BATCHES}"):
        train(optimizer, versions[-1], first=NUM_BATCHES, last=NUM_BATCHES + 1)


def test_a_layer_may_have_one_group_or_no_parameters() -> None:
    """`embed` has no block matrices, and a user's layer may have no parameters at all → both can be stepped."""
    factory: OptimizerFactory = optimizer_factory(spec_of("muon"), num_batches=NUM_BATCHES, delay=1)
    embed = factory("embed", {"weight": torch.ones(4, 2)})  # type: ignore[arg-type]
    target = {"weight": torch.zeros(4, 2)}
    embed.step(0, current={"weight": torch.ones(4, 2)}, target=target, gradients={"weight": torch.ones(4, 2)})
    assert set(embed.state()) == {"exp_avg/weight", "exp_avg_sq/weight", "error_feedback/weight"}
    assert not torch.equal(target["weight"], torch.ones(4, 2))
    factory("block.1", {}).step(0, current={}, target={}, gradients={})  # type: ignore[arg-type]


def test_rates_of_the_groups_are_their_own() -> None:
    """The rest at rate 0 → only the matrices move."""
    start = draw(0)
    spec = replace(spec_of("muon"), rest=GroupSpec(name="adamw", lr=0.0))
    [version] = train(make(spec, start), start, last=1)
    moved = {parameter for parameter in SHAPES if not torch.equal(version[parameter], start[parameter])}
    assert moved == {"up.weight", "down.weight"}


@pytest.mark.parametrize("name", [name for name in INNER if name.startswith("narrow")])
def test_a_narrow_state_takes_half_the_bytes(name: str) -> None:
    """Momentum and Error Feedback in bfloat16, all else in fp32; buffers stay where they are."""
    start = draw(0)
    optimizer = make(spec_of(name), start)
    versions = train(optimizer, start, last=2)
    state = optimizer.state()
    for key, tensor in state.items():
        is_narrow = key.split("/")[0] in (*MOMENTUM, "error_feedback")
        assert tensor.dtype == (torch.bfloat16 if is_narrow else torch.float32), key
    places = {key: tensor.data_ptr() for key, tensor in state.items()}
    train(optimizer, versions[-1], first=2, last=4)
    assert {key: tensor.data_ptr() for key, tensor in optimizer.state().items()} == places


@pytest.mark.parametrize("slot", ["momentum_buffer/up.weight", "error_feedback/up.weight", "exp_avg/norm.weight"])
def test_state_of_another_dtype_is_refused(slot: str) -> None:
    """A float32 buffer for a job whose state is bfloat16, and the other way round → ValueError, and nothing is lost."""
    start = draw(0)
    for name, other in (("muon", torch.bfloat16), ("narrow-muon", torch.float32)):
        optimizer = make(spec_of(name), start)
        train(optimizer, start, last=1)
        held = copies(optimizer.state())
        with pytest.raises(ValueError, match=f"{slot} is {other}"):
            optimizer.load_state(held | {slot: held[slot].to(other)})
        assert_same(optimizer.state(), held)
