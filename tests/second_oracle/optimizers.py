"""Four optimizers, each for one parameter (docs/numerics.md, section 5)."""

from abc import ABC, abstractmethod
from math import sqrt

import torch
from torch import Tensor

from tests.second_oracle.job import Group

A, B, C = 3.4445, -4.7750, 2.0315


class Optimizer(ABC):
    """The settings and the state of one parameter. All state is zero before update 0."""

    def __init__(self, group: Group, weight: Tensor) -> None:
        self.group = group
        self.first = torch.zeros_like(weight)
        self.second = torch.zeros_like(weight)
        self.num_updates = 0

    def remembered(self) -> None:
        """Round the first buffer to the dtype in which it waits for the next update."""
        self.first = self.first.to(getattr(torch, self.group.momentum_dtype)).float()

    @abstractmethod
    def updated(self, weight: Tensor, gradient: Tensor, *, lr: float) -> Tensor:
        """The weight after the next update, in a new tensor. `lr` is the rate of this update."""


class Muon(Optimizer):
    """Orthogonalised momentum, for matrices."""

    def updated(self, weight: Tensor, gradient: Tensor, *, lr: float) -> Tensor:
        momentum = self.group.momentum
        self.first = torch.lerp(self.first, gradient, 1 - momentum)
        direction = torch.lerp(gradient, self.first, momentum) if self.group.nesterov else self.first
        rows, columns = weight.shape
        decayed = (1 - lr * self.group.weight_decay) * weight
        return torch.add(decayed, self._orthogonal(direction), alpha=-lr * sqrt(max(1, rows / columns)))

    def _orthogonal(self, direction: Tensor) -> Tensor:
        rows, columns = direction.shape
        x = direction.to(getattr(torch, self.group.newton_schulz_dtype))
        x = x.T if rows > columns else x
        x = x / torch.linalg.vector_norm(x).clamp(min=1e-7)
        for _ in range(self.group.newton_schulz_steps):
            gram = torch.mm(x, x.T)
            polynomial = torch.addmm(gram, gram, gram, beta=B, alpha=C)
            x = torch.addmm(x, polynomial, x, beta=A)
        return x.T if rows > columns else x


class AdamW(Optimizer):
    """Two moments of the gradient, each corrected for its start at zero."""

    def updated(self, weight: Tensor, gradient: Tensor, *, lr: float) -> Tensor:
        beta1, beta2 = self.group.betas
        self.num_updates += 1
        self.first = torch.lerp(self.first, gradient, 1 - beta1)
        self.second = torch.addcmul(beta2 * self.second, gradient, gradient, value=1 - beta2)
        decayed = (1 - lr * self.group.weight_decay) * weight
        denominator = self.second.sqrt() / sqrt(1 - beta2**self.num_updates) + self.group.eps
        return torch.addcdiv(decayed, self.first, denominator, value=-lr / (1 - beta1**self.num_updates))


class Lion(Optimizer):
    """The sign of a momentum that has seen this gradient."""

    def updated(self, weight: Tensor, gradient: Tensor, *, lr: float) -> Tensor:
        beta1, beta2 = self.group.betas
        direction = torch.lerp(self.first, gradient, 1 - beta1).sign()
        self.first = torch.lerp(self.first, gradient, 1 - beta2)
        return torch.add((1 - lr * self.group.weight_decay) * weight, direction, alpha=-lr)


class Sgd(Optimizer):
    """Momentum over the gradient with its weight decay."""

    def updated(self, weight: Tensor, gradient: Tensor, *, lr: float) -> Tensor:
        momentum = self.group.momentum
        decayed = torch.add(gradient, weight, alpha=self.group.weight_decay)
        if momentum == 0:
            return torch.add(weight, decayed, alpha=-lr)
        self.first = momentum * self.first + decayed
        direction = torch.add(decayed, self.first, alpha=momentum) if self.group.nesterov else self.first
        return torch.add(weight, direction, alpha=-lr)


OPTIMIZERS: dict[str, type[Optimizer]] = {"muon": Muon, "adamw": AdamW, "lion": Lion, "sgd": Sgd}
