"""A layer's optimizer on gradients that are late, without a model: what the theory of a delay is about."""

from collections.abc import Callable

import torch
from torch import Tensor

from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.spec import GroupSpec, OptimSpec


def trajectory(
    group: GroupSpec,
    start: Tensor,
    gradient: Callable[[Tensor, int], Tensor],
    *,
    batches: int,
    delay: int,
    alpha: float,
    lookahead: float = 0.0,
    gain: float = 0.0,
) -> list[Tensor]:
    """Return W_0 … W_B at a constant rate, by gradients of W_{max(0, b−d)}.

    lookahead: the gradient is that of a point ahead of W by so many last updates, less as many first ones. gain:
    Error Feedback's where its gradients have no delay.
    """
    spec = OptimSpec(matrices=group, error_feedback=alpha or gain, lr_schedule="constant", warmup_batches=0)
    sets = [{"weight": start.clone()} for _ in range(2)]
    optimizer = optimizer_factory(spec, num_batches=batches, delay=1 if gain else delay)("block.0", sets[0])
    found, ahead = [start.clone()], [start.clone()]
    for b in range(batches):
        stale = ahead[max(0, b - delay)]
        optimizer.step(b, current=sets[b % 2], target=sets[(b + 1) % 2], gradients={"weight": gradient(stale, b)})
        found.append(sets[(b + 1) % 2]["weight"].clone())
        ahead.append(found[-1] + lookahead * ((found[-1] - found[-2]) - (found[1] - found[0])))
    return [*ahead] if lookahead else found


def hamiltonian(*, delay: int, alpha: float, lr: float = 0.1, batches: int = 400) -> list[float]:
    """Fit a linear map by Muon without Nesterov, by full batches; return H_1 … H_B.

    H_b = f(W_b) + lr·μ/(1 − μ)·‖m_b‖_*, in the spirit of arXiv 2605.23871. By the convexity of the nuclear norm an
    update adds at most −lr·‖m‖_* + L·lr²·n/2 to it, for a curvature of at most L and n rows; at a delay of 1 it adds
    + 3·L·lr²·n/2, since the gradient is that of a point one update away. So H falls until m is small; f need not.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 16, generator=generator)
    y = x @ torch.randn(16, 16, generator=generator)
    momentum = 0.9

    def gradient(w: Tensor, _: int) -> Tensor:
        return 2 * (x @ w.T - y).T @ x / y.numel()

    group = GroupSpec(name="muon", lr=lr, momentum=momentum, nesterov=False, weight_decay=0.0)
    path = trajectory(group, torch.zeros(16, 16), gradient, batches=batches, delay=delay, alpha=alpha)
    m, energies = torch.zeros(16, 16), []
    for b in range(batches):
        m = momentum * m + (1 - momentum) * gradient(path[max(0, b - delay)], b)
        kinetic = lr * momentum / (1 - momentum) * torch.linalg.matrix_norm(m, "nuc")
        energies.append(((x @ path[b + 1].T - y).square().mean() + kinetic).item())
    return energies
