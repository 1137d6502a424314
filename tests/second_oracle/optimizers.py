"""The named optimizers, each for one parameter (docs/numerics.md, section 5)."""

from abc import ABC, abstractmethod
from math import sqrt

import torch
from torch import Tensor

from tests.second_oracle.job import Group

QUINTIC = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
LATER = (1.875, -1.25, 0.375)


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
        factor = sqrt(max(1, rows / columns))
        if self.group.adjust_lr == "match_rms_adamw":
            factor = 0.2 * sqrt(max(rows, columns))
        decayed = (1 - lr * self.group.weight_decay) * weight
        update = self.scaled(self.orthogonal(direction))
        return torch.add(decayed, update, alpha=-lr * factor)

    def scaled(self, update: Tensor) -> Tensor:
        """What is done with the iteration's result."""
        return update

    def orthogonal(self, direction: Tensor) -> Tensor:
        """The iteration's result, in its dtype."""
        rows, columns = direction.shape
        x = direction.to(getattr(torch, self.group.newton_schulz_dtype))
        x = x.T if rows > columns else x
        is_polar_express = self.group.newton_schulz_coefficients == "polar_express"
        norm = torch.linalg.vector_norm(x)
        x = x / ((1.01 * norm) if is_polar_express else norm).clamp(min=1e-7)
        for step in range(self.group.newton_schulz_steps):
            a, b, c = QUINTIC
            if is_polar_express:
                a, b, c = LATER if step >= len(POLAR_EXPRESS) else POLAR_EXPRESS[step]
                if step < len(POLAR_EXPRESS):
                    a, b, c = a / 1.01, b / 1.01**3, c / 1.01**5
            gram = torch.mm(x, x.T)
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a)
        return x.T if rows > columns else x


class NorMuon(Muon):
    """Muon, with rows of one mean size."""

    def scaled(self, update: Tensor) -> Tensor:
        update = update.float()
        if self.num_updates == 0:
            self.second = torch.zeros(len(update), 1)
        self.num_updates += 1
        self.second = torch.lerp(self.second, update.square().mean(dim=1, keepdim=True), 1 - self.group.beta2)
        levelled = update / (self.second.sqrt() + self.group.eps)
        norms = torch.linalg.vector_norm(update), torch.linalg.vector_norm(levelled)
        levelled *= norms[0] / (norms[1] + self.group.eps)
        return levelled


class LionMuon(Muon):
    """Muon's step and Lion's in turn."""

    def updated(self, weight: Tensor, gradient: Tensor, *, lr: float) -> Tensor:
        beta1, beta2 = self.group.betas
        direction = torch.lerp(self.first, gradient, 1 - beta1)
        self.first = torch.lerp(self.first, gradient, 1 - beta2)
        self.num_updates += 1
        if self.num_updates % 2 == 1:
            decayed = (1 - lr * self.group.weight_decay) * weight
            return torch.add(decayed, self.orthogonal(direction), alpha=-lr * (0.2 * sqrt(max(weight.shape))))
        lr *= self.group.sign_share
        return torch.add((1 - lr * self.group.weight_decay) * weight, direction.sign(), alpha=-lr)


class Soap(Optimizer):
    """Adam between two bases."""

    def __init__(self, group: Group, weight: Tensor) -> None:
        super().__init__(group, weight)
        self.grams = [torch.zeros(side, side) for side in weight.shape]
        self.bases: list[Tensor | None] = [None, None]

    def updated(self, weight: Tensor, gradient: Tensor, *, lr: float) -> Tensor:
        (beta1, beta2), b = self.group.betas, self.num_updates
        if b > 0:
            rotated = self._rotated(gradient)
            self.first = torch.lerp(self.first, gradient, 1 - beta1)
            self.second = torch.addcmul(beta2 * self.second, rotated, rotated, value=1 - beta2)
            update = self._back(self._rotated(self.first) / (self.second.sqrt() + self.group.eps))
            decayed = (1 - lr * self.group.weight_decay) * weight
            weight = torch.add(decayed, update, alpha=-lr * sqrt(1 - beta2**b) / (1 - beta1**b))
        for side, of_side in enumerate((gradient, gradient.T)):
            if weight.shape[side] > self.group.max_precondition_dim:
                continue
            self.grams[side] = torch.lerp(self.grams[side], torch.mm(of_side, of_side.T), 1 - beta2)
            if b == 0:
                self.bases[side] = torch.linalg.eigh(self.grams[side])[1].flip(1).contiguous()
            elif b % self.group.precondition_frequency == 0:
                self._turn(side)
        self.num_updates += 1
        return weight

    def _turn(self, side: int) -> None:
        basis = self.bases[side]
        assert basis is not None
        product = torch.mm(self.grams[side], basis)
        order = torch.argsort((basis * product).sum(0), descending=True, stable=True)
        self.second = self.second[order] if side == 0 else self.second[:, order]
        self.bases[side] = torch.linalg.qr(product[:, order])[0].contiguous()

    def _rotated(self, matrix: Tensor) -> Tensor:
        left, right = self.bases
        matrix = matrix if left is None else torch.mm(left.T, matrix)
        return matrix if right is None else torch.mm(matrix, right)

    def _back(self, matrix: Tensor) -> Tensor:
        left, right = self.bases
        matrix = matrix if left is None else torch.mm(left, matrix)
        return matrix if right is None else torch.mm(matrix, right.T)


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


class Mars(AdamW):
    """AdamW of a corrected gradient."""

    def __init__(self, group: Group, weight: Tensor) -> None:
        super().__init__(group, weight)
        self.last = torch.zeros_like(weight)

    def updated(self, weight: Tensor, gradient: Tensor, *, lr: float) -> Tensor:
        beta1, _ = self.group.betas
        corrected = (gradient - self.last) * (self.group.gamma * beta1 / (1 - beta1)) + gradient
        self.last = gradient.clone()
        return super().updated(weight, corrected / torch.linalg.vector_norm(corrected).clamp(min=1), lr=lr)


class Adan(Optimizer):
    """Means of the gradient and of its changes, over the root of a third."""

    def updated(self, weight: Tensor, gradient: Tensor, *, lr: float) -> Tensor:
        (beta1, beta2), beta3 = self.group.betas, self.group.beta3
        if self.num_updates == 0:
            self.changes, self.last = torch.zeros_like(weight), gradient.clone()
        self.num_updates += 1
        change, self.last = gradient - self.last, gradient.clone()
        self.first = torch.lerp(self.first, gradient, 1 - beta1)
        self.changes = torch.lerp(self.changes, change, 1 - beta2)
        ahead = change * beta2 + gradient
        self.second = torch.addcmul(beta3 * self.second, ahead, ahead, value=1 - beta3)
        denominator = self.second.sqrt() / sqrt(1 - beta3**self.num_updates) + self.group.eps
        decayed = (1 - lr * self.group.weight_decay) * weight
        half = torch.addcdiv(decayed, self.first, denominator, value=-lr / (1 - beta1**self.num_updates))
        return torch.addcdiv(half, self.changes, denominator, value=-lr * beta2 / (1 - beta2**self.num_updates))


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


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "muon": Muon,
    "normuon": NorMuon,
    "lionmuon": LionMuon,
    "soap": Soap,
    "adamw": AdamW,
    "adan": Adan,
    "mars": Mars,
    "lion": Lion,
    "sgd": Sgd,
}
