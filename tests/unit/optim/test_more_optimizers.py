"""SOAP, Adan, MARS and NorMuon against the library `pytorch_optimizer`, LionMuon against its formula in numpy.

The library decays no weight here: what decay does, each comparison does by hand before the library's step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from headway.optim.adan import Adan
from headway.optim.layer_optimizer import inner_optimizer, optimizer_factory, state_tensors
from headway.optim.lion_muon import LionMuon
from headway.optim.mars import Mars
from headway.optim.normuon import NorMuon
from headway.optim.soap import Soap
from headway.optim.spec import OPTIMIZERS, Coefficients, GroupSpec, OptimSpec
from tests.rigs.muon_reference import orthogonalize_by_singular_values

LIBRARY: Any = pytorch_optimizer
NUM_UPDATES = 14
DECAY = 0.2
NEW = ("soap", "adan", "mars", "normuon", "lionmuon")
MATRICES = [(18, 13), (13, 18), (14, 14)]
OF_ADAN: dict[str, Any] = {"betas": (0.9, 0.85), "eps": 1e-7}
OF_MARS: dict[str, Any] = {"betas": (0.9, 0.97), "gamma": 0.05}
OF_SOAP: dict[str, Any] = {"betas": (0.9, 0.93), "precondition_frequency": 3}
OF_NORMUON: dict[str, Any] = {"momentum": 0.9, "beta2": 0.8, "eps": 1e-8, "nesterov": True}


def rate(update: int) -> float:
    """The rate of an update: another each time."""
    return 0.01 * (1 + update % 5)


def gradient(shape: tuple[int, ...], update: int, *, size: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The gradient of an update."""
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(update), dtype=dtype)


def compare(
    make: Callable[[list[Parameter]], Optimizer],
    make_theirs: Callable[[list[Parameter]], Any],
    shape: tuple[int, ...],
    *,
    size: float = 1.0,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-6,
    after_first: Callable[[dict[str, Any], dict[str, Any]], None] = lambda _ours, _theirs: None,
) -> None:
    """After every update both have the same weights. after_first: is given both states after update 0."""
    start = torch.randn(shape, dtype=dtype)
    ours, theirs = Parameter(start.clone()), Parameter(start.clone())
    our_optimizer, their_optimizer = make([ours]), make_theirs([theirs])
    for update in range(NUM_UPDATES):
        for weight, optimizer in ((ours, our_optimizer), (theirs, their_optimizer)):
            optimizer.param_groups[0]["lr"] = rate(update)
            weight.grad = gradient(shape, update, size=size, dtype=dtype)
        with torch.no_grad():
            if not isinstance(our_optimizer, Soap) or update > 0:  # SOAP's first update moves nothing
                theirs.mul_(1 - rate(update) * DECAY)
        before = ours.detach().clone()
        our_optimizer.step()
        their_optimizer.step()
        if update == 0:
            after_first(our_optimizer.state[ours], their_optimizer.state[theirs])
        moved = (ours - before).abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=rtol * max(moved, 1e-3))


@pytest.mark.parametrize("shape", [*MATRICES, (7,), (2, 3, 4)])
def test_adan_is_the_librarys(shape: tuple[int, ...]) -> None:
    """Matrices, a vector and a tensor of three dimensions → the library's weights after each update."""
    betas = (*OF_ADAN["betas"], 0.95)
    theirs = partial(LIBRARY.Adan, betas=betas, eps=OF_ADAN["eps"], foreach=False)
    compare(partial(Adan, beta3=0.95, weight_decay=DECAY, **OF_ADAN), theirs, shape)


@pytest.mark.parametrize("size", [0.01, 1.0])
@pytest.mark.parametrize("shape", [*MATRICES, (7,), (2, 3, 4)])
def test_mars_is_the_librarys(shape: tuple[int, ...], size: float) -> None:
    """Gradients whose correction is clipped, and such that are not → the library's weights after each update."""
    theirs = partial(LIBRARY.MARS, optimize_1d=True, foreach=False, eps=1e-20, **OF_MARS)
    # The library has another 1e-15 below the root.
    compare(partial(Mars, weight_decay=DECAY, eps=1e-20, **OF_MARS), theirs, shape, size=size, rtol=5e-6)


@pytest.mark.parametrize("shape", MATRICES)
def test_normuon_is_the_librarys(shape: tuple[int, ...]) -> None:
    """Newton–Schulz in bfloat16, as the library has it → its weights, within a rounding of bfloat16."""
    ours = partial(NorMuon, weight_decay=DECAY, newton_schulz_dtype="bfloat16", **OF_NORMUON)

    def theirs(weights: list[Parameter]) -> Optimizer:
        found: Optimizer = LIBRARY.NorMuon([{"params": weights, "use_muon": True}], foreach=False, **OF_NORMUON)
        return found

    compare(ours, theirs, shape, dtype=torch.float32, rtol=5e-3)


def one_eigenbasis(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Check that both have eigenvectors of their sums, by falling eigenvalue, and give the library ours: the long side
    of one gradient has a null space, in which any basis is one.
    """
    for number, side in enumerate(("rows", "cols")):
        if f"gram_{side}" not in ours:
            assert len(theirs["GG"][number]) == 0
            continue
        gram, basis = ours[f"gram_{side}"], ours[f"basis_{side}"]
        torch.testing.assert_close(gram, theirs["GG"][number], rtol=0, atol=1e-12)
        torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis), dtype=basis.dtype))
        values = basis.mT @ gram @ basis
        torch.testing.assert_close(values, values.diag().diag(), rtol=0, atol=1e-12)
        assert (values.diag().diff() <= 1e-12).all()
        theirs["Q"][number] = basis.clone()


@pytest.mark.parametrize("longest", [100, 15, 1])
@pytest.mark.parametrize("shape", MATRICES)
def test_soap_is_the_librarys(shape: tuple[int, ...], longest: int) -> None:
    """Both sides rotated, the shorter one alone, none → the library's weights, over four turns of the bases."""
    shared = {**OF_SOAP, "max_precondition_dim": longest}
    ours = partial(Soap, weight_decay=DECAY, **shared)
    theirs = partial(LIBRARY.SOAP, weight_decay=0, **shared)
    compare(ours, theirs, shape, rtol=3e-5, after_first=one_eigenbasis)  # the library turns in float32


@pytest.mark.parametrize("coefficients", ["quintic", "polar_express"])
@pytest.mark.parametrize("shape", MATRICES)
def test_lionmuon_follows_its_formula(shape: tuple[int, int], coefficients: Coefficients) -> None:
    """Muon's step by singular values in even updates, Lion's in odd ones, from one mean; each decays by its rate."""
    weight = Parameter(torch.randn(shape))
    settings: dict[str, Any] = {"betas": (0.9, 0.8), "weight_decay": DECAY, "sign_share": 0.05}
    optimizer = LionMuon([weight], newton_schulz_coefficients=coefficients, **settings)
    w, m = weight.detach().double().numpy(), np.zeros(shape)
    for update in range(NUM_UPDATES):
        weight.grad = gradient(shape, update, dtype=torch.float32)
        optimizer.param_groups[0]["lr"] = lr = rate(update)
        g = weight.grad.double().numpy()
        direction = 0.9 * m + 0.1 * g
        if update % 2 == 0:
            orthogonal = orthogonalize_by_singular_values(
                torch.from_numpy(direction), coefficients=coefficients
            ).numpy()
            w = (1 - lr * DECAY) * w - lr * 0.2 * np.sqrt(max(shape)) * orthogonal
        else:
            w = (1 - 0.05 * lr * DECAY) * w - 0.05 * lr * np.sign(direction)
        m = 0.8 * m + 0.2 * g
        optimizer.step()
        np.testing.assert_allclose(weight.detach().numpy(), w, atol=1e-4 * lr * np.sqrt(max(shape)))
    np.testing.assert_allclose(optimizer.state[weight]["exp_avg"].numpy(), m, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in NEW if OPTIMIZERS[name].takes_matrices_only])
def test_what_is_no_matrix_is_refused(name: str) -> None:
    """A bias that was routed to one by mistake → ValueError that names its shape."""
    bias = Parameter(torch.zeros(3))
    bias.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"steps matrices, not a parameter of shape \[3\]"):
        inner_optimizer(GroupSpec(name=name), [bias]).step()


@pytest.mark.parametrize("longest", [10_000, 15, 1])
@pytest.mark.parametrize("shape", MATRICES)
@pytest.mark.parametrize("name", NEW)
def test_the_state_is_the_one_that_is_planned(name: str, shape: tuple[int, ...], longest: int) -> None:
    """What a step keeps, tensor by tensor → what the spec says of the shape, which plans and files go by."""
    spec = GroupSpec(name=name, max_precondition_dim=longest)
    weight = Parameter(torch.zeros(shape))
    weight.grad = torch.ones(shape)
    optimizer = inner_optimizer(spec, [weight])
    optimizer.step()
    assert set(state_tensors(optimizer.state[weight])) == set(spec.state_of(shape))


@pytest.mark.parametrize("name", NEW)
def test_a_neighbour_changes_no_bit(name: str) -> None:
    """A parameter beside others, of which one has no gradient → the bits that it has alone."""
    alone, beside, other, idle = (
        Parameter(torch.randn(24, 20, generator=torch.Generator().manual_seed(k))) for k in (1, 1, 2, 3)
    )
    still = idle.detach().clone()
    optimizers = (
        inner_optimizer(GroupSpec(name=name), [alone]),
        inner_optimizer(GroupSpec(name=name), [other, beside, idle]),
    )
    for update in range(12):
        for weight, seed in ((alone, update), (beside, update), (other, 100 + update)):
            weight.grad = gradient((24, 20), seed, dtype=torch.float32)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(alone, beside)
    assert not torch.equal(beside, other)
    assert torch.equal(idle, still)


@pytest.mark.parametrize("boundary", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("name", NEW)
def test_state_of_a_boundary_goes_on_bit_for_bit(name: str, boundary: int) -> None:
    """State after some updates into a fresh optimizer, between two turns of SOAP's bases too → the same bits."""
    spec = OptimSpec(matrices=GroupSpec(name=name, precondition_frequency=3), warmup_batches=3)

    def optimizer() -> Any:
        return optimizer_factory(spec, num_batches=NUM_UPDATES, delay=1)("block.0", {"up.weight": torch.zeros(18, 13)})

    def trained(current: Any, weight: Tensor, updates: range) -> Tensor:
        for update in updates:
            grad = {"up.weight": gradient((18, 13), update, dtype=torch.float32)}
            current.step(update, current={"up.weight": weight}, target={"up.weight": weight}, gradients=grad)
        return weight

    start = torch.randn(18, 13)
    undisturbed = trained(optimizer(), start.clone(), range(NUM_UPDATES))
    first, second = optimizer(), optimizer()
    weight = trained(first, start.clone(), range(boundary))
    second.load_state(first.state())
    assert torch.equal(trained(second, weight, range(boundary, NUM_UPDATES)), undisturbed)


def test_a_gradient_that_is_not_finite_raises_nothing() -> None:
    """SOAP's eigenvectors of NaN → weights of NaN, which the loss tells of, as under any optimizer."""
    weight = Parameter(torch.zeros(4, 3))
    optimizer = inner_optimizer(GroupSpec(name="soap"), [weight])
    for _ in range(2):
        weight.grad = torch.full((4, 3), torch.nan)
        optimizer.step()
    assert weight.isnan().all()
