"""What theory says of a delay of one, in closed form, and what the optimizers here do.

Quadratics are ½·a·w², with SGD at rate 1: the gradient is a·w, so `a` is rate times curvature.
"""

import math
import statistics
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from headway.optim.spec import GroupSpec
from tests.rigs.delayed_steps import hamiltonian, trajectory

SGD = GroupSpec(name="sgd", lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0)


def growth(a: float, *, delay: int, alpha: float, batches: int = 1200) -> float:
    """Return the factor a step by which |w| changes in the end, of a quadratic of curvature `a`."""
    start = torch.ones(1, 1)
    path = torch.cat(trajectory(SGD, start, lambda w, _: a * w, batches=batches, delay=delay, alpha=alpha)).abs()
    # The two halves' largest values: an oscillation has the same phase in none of them.
    half = batches // 2
    return math.exp(math.log(path[half:].max() / path[:half].max()) / half)


def limit_with_error_feedback(alpha: float) -> float:
    """Return the largest stable `a` at a delay of one.

    W_{b+1} = W_b − a·((1 + α)·W_{b−1} − α·W_{b−2}) has the polynomial z³ − z² + a(1 + α)·z − aα, whose roots are in the
    unit circle, by Jury's criterion, if 1 − (aα)² > a. At α → 0 that is a < 1, the limit without Error Feedback.
    """
    return (math.sqrt(1 + 4 * alpha**2) - 1) / (2 * alpha**2)


@pytest.mark.parametrize(
    ("delay", "alpha", "limit"),
    [
        (0, 0.0, 2.0),
        (1, 0.0, 1.0),
        (1, 0.5, limit_with_error_feedback(0.5)),
        (1, 1.0, limit_with_error_feedback(1.0)),
        (1, 1.5, limit_with_error_feedback(1.5)),
    ],
)
def test_the_largest_stable_rate(delay: int, alpha: float, limit: float) -> None:
    """2 % below the limit a quadratic shrinks, 2 % above it grows. A delay halves it, Error Feedback lowers it more."""
    assert growth(0.98 * limit, delay=delay, alpha=alpha) < 1
    assert growth(1.02 * limit, delay=delay, alpha=alpha) > 1


@pytest.mark.parametrize("a", [0.01, 0.03, 0.1])
def test_error_feedback_is_right_to_one_more_order(a: float) -> None:
    """At a small rate the synchronous factor is 1 − a. A delay's lies a² below it, with Error Feedback a³ at most."""
    batches = round(8 / a)

    def factor(delay: int, alpha: float) -> float:
        path = trajectory(SGD, torch.ones(1, 1), lambda w, _: a * w, batches=batches, delay=delay, alpha=alpha)
        return math.exp(math.log(path[-1] / path[-1 - batches // 2]) / (batches // 2))

    assert factor(1, 0.0) == pytest.approx(1 - a - a**2, abs=3 * a**3)
    assert factor(1, 1.0) == pytest.approx(1 - a, abs=2 * a**3)


def pulled(target: Tensor) -> Callable[[Tensor, int], Tensor]:
    """Return gradients towards a target, with noise that depends on the batch alone."""
    noise = torch.randn(200, *target.shape, generator=torch.Generator().manual_seed(1))
    return lambda weight, b: weight - target + 0.3 * noise[b]


@pytest.mark.parametrize("name", ["muon", "adamw", "lion", "sgd"])
def test_at_alpha_1_it_is_weight_prediction_with_the_last_update(name: str) -> None:
    """The bare optimizer steps Y, and its gradients are those of Y less one more last update, as SpecTrain predicts
    (Chen et al., arXiv 1809.02839): what Error Feedback calls W, but for the first update, and without decay.
    """
    group = GroupSpec(name=name, lr=0.02, weight_decay=0.0)
    start, gradient = torch.zeros(4, 4), pulled(torch.linspace(-1, 1, 16).reshape(4, 4))
    path = {"batches": 200, "delay": 1}
    fed_back = trajectory(group, start, gradient, alpha=1.0, **path)
    predicted = trajectory(group, start, gradient, alpha=0.0, lookahead=1.0, **path)
    torch.testing.assert_close(torch.stack(fed_back), torch.stack(predicted), rtol=1e-3, atol=2e-4)
    assert (fed_back[-1] - trajectory(group, start, gradient, alpha=0.0, **path)[-1]).abs().max() > 1e-2


def test_without_a_delay_and_at_alpha_momentum_it_is_nesterovs_look_ahead() -> None:
    """Heavy ball whose gradients are those of the point to which the momentum alone would go, but for the first update:
    the same rule, of one update's β instead of a whole one, and against no delay at all.
    """
    group = GroupSpec(name="sgd", lr=0.02, momentum=0.9, nesterov=False, weight_decay=0.0)
    start, gradient = torch.zeros(4, 4), pulled(torch.linspace(-1, 1, 16).reshape(4, 4))
    fed_back = trajectory(group, start, gradient, batches=200, delay=0, alpha=0.0, gain=0.9)
    ahead = trajectory(group, start, gradient, batches=200, delay=0, alpha=0.0, lookahead=0.9)
    torch.testing.assert_close(torch.stack(fed_back), torch.stack(ahead), rtol=1e-3, atol=2e-4)
    plain = trajectory(group, start, gradient, batches=200, delay=0, alpha=0.0)
    assert (fed_back[-1] - plain[-1]).abs().max() > 1e-2


def test_one_huge_gradient_stays_in_adamws_denominator() -> None:
    """All gradients are 1, but one coordinate's once is G. With v ≈ 1 + (1 − β₂)·G²·β₂^k the step after k more batches
    is 1/√v of the usual one: less than half of it until k = ln((1 − β₂)·G²/3) / −ln β₂, of 190 batches here.

    Muon divides by nothing that it remembers: its step is always the usual one, but for the iteration's own error.
    """
    huge, at, beta = 1e3, 100, 0.95

    def gradient(_: Tensor, b: int) -> Tensor:
        return torch.diag(torch.tensor([huge if b == at else 1.0, 1.0]))

    def steps(group: GroupSpec) -> Tensor:
        path = trajectory(group, torch.zeros(2, 2), gradient, batches=at + 300, delay=0, alpha=0.0)
        return torch.stack([after[0, 0] - before[0, 0] for before, after in pairwise(path)]).abs()

    adamw = steps(GroupSpec(name="adamw", lr=1.0, betas=(0.9, beta), weight_decay=0.0))
    usual = adamw[at - 1]
    is_small = (adamw[at + 1 :] < usual / 2).tolist()
    last = max(k for k, small in enumerate(is_small, start=1) if small)
    assert last == pytest.approx(math.log((1 - beta) * huge**2 / 3) / -math.log(beta), abs=2)

    muon = steps(GroupSpec(name="muon", lr=1.0, weight_decay=0.0))
    assert muon[at + 1 :].min() > 0.6 * muon[at - 1]
    assert muon[at + 1 :].max() < 1.7 * muon[at - 1]


SETTLED = 100
"""Batches after which each run is near the level at which it stays."""


def test_muons_hamiltonian_falls_until_the_level_of_its_rate() -> None:
    """Without a delay each update lowers it, once the first two have filled the momentum."""
    energies = hamiltonian(delay=0, alpha=0.0)[2:SETTLED]
    assert all(after < before for before, after in pairwise(energies))


def test_a_delay_lifts_that_level_and_error_feedback_takes_most_of_it_back() -> None:
    """Above the level the three runs are alike: so a delay costs little where the rate falls in the end."""

    def level(delay: int, alpha: float) -> float:
        return statistics.fmean(hamiltonian(delay=delay, alpha=alpha)[-150:])

    sync, delayed, corrected = level(0, 0.0), level(1, 0.0), level(1, 1.0)
    assert delayed > 5 * sync
    assert (delayed - corrected) / (delayed - sync) == pytest.approx(0.6, abs=0.1)
    begins = [hamiltonian(delay=d, alpha=alpha)[40] for d, alpha in ((0, 0.0), (1, 0.0), (1, 1.0))]
    assert max(begins) < 1.05 * min(begins)
