"""Muon's update of one matrix, here and in torch, the products that it is made of, and what it should be.

A block's time is the sum over its matrices, so each shape is measured once. Tall and wide matrices of the same sides
count as one shape: both iterate on the wide one.
"""

import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from headway.optim.layer_optimizer import TorchLayerOptimizer, optimizer_factory
from headway.optim.muon import NUM_STEPS, A, B, C
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.model.decoder import parameter_shapes
from headway.stages.spec import ModelSpec

Shape = tuple[int, int]
NAME = "matrix.weight"

MODELS = {
    "360m": ModelSpec(
        hidden_size=960,
        intermediate_size=2560,
        num_hidden_layers=32,
        num_attention_heads=15,
        num_key_value_heads=5,
    ),
    "1b": ModelSpec(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
}
"""SmolLM2-360M and Llama-3.2-1B."""


def block_matrices(model: ModelSpec) -> Counter[Shape]:
    """How many matrices of each shape a block has; the first of equal sides says which one is the longer."""
    found: Counter[Shape] = Counter()
    for shape in parameter_shapes("block.0", model).values():
        if len(shape) == 2:
            rows, cols = shape
            found[(cols, rows) if (cols, rows) in found else (rows, cols)] += 1
    return found


def of_block(counts: Mapping[Shape, int], seconds: Mapping[Shape, Sequence[Sequence[float]]]) -> list[list[float]]:
    """Seconds of a block by round and side, from those of one matrix of each shape by round and side."""
    by_round = zip(*(seconds[shape] for shape in counts), strict=True)
    return [
        [sum(map(operator.mul, counts.values(), of_side)) for of_side in zip(*of_round, strict=True)]
        for of_round in by_round
    ]


def gradient(shape: Shape, device: torch.device) -> Tensor:
    """A random matrix whose singular values spread over two decades, as those of gradients do."""
    rows, cols = shape
    generator = torch.Generator().manual_seed(rows * cols)
    scale = torch.logspace(0, -2, rows).unsqueeze(1)
    return (torch.randn(shape, generator=generator) * scale).to(device)


class Timer:
    """Seconds of a piece of work on a device: the thread's own where one thread of a CPU does all of it."""

    def __init__(self, device: torch.device, threads: int) -> None:
        torch.set_num_threads(threads)
        self._is_card = device.type == "cuda"
        self._now = time.thread_time if threads == 1 and not self._is_card else time.perf_counter

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one call."""
        self._wait()
        began = self._now()
        work()
        self._wait()
        return self._now() - began

    def _wait(self) -> None:
        if self._is_card:
            torch.cuda.synchronize()


class Ours:
    """A layer of one matrix, stepped as a worker does: two sets of weights, delay 1, Error Feedback."""

    def __init__(self, of: Tensor, newton_schulz_dtype: str, *, num_updates: int) -> None:
        self.optim = OptimSpec(
            matrices=GroupSpec(name="muon", newton_schulz_dtype=newton_schulz_dtype),  # type: ignore[arg-type]
            lr_schedule="constant",
            warmup_batches=0,
        )
        self._sets = [{NAME: torch.zeros_like(of)} for _ in range(2)]
        self._gradients = [{NAME: of}]
        make = optimizer_factory(self.optim, num_batches=num_updates, delay=1)
        self._optimizers = [make("block.0", self._sets[0])]
        self._batch = 0

    def step(self) -> Tensor:
        """One update. Returns the new weight."""
        current, target = (self._sets[(self._batch + later) % 2] for later in range(2))
        TorchLayerOptimizer.step_together(
            self._optimizers, self._batch, current=[current], target=[target], gradients=self._gradients
        )
        self._batch += 1
        return target[NAME]


class Theirs:
    """torch.optim.Muon with the same settings; it iterates in bfloat16 alone."""

    def __init__(self, of: Tensor, group: GroupSpec) -> None:
        self._weight = torch.nn.Parameter(torch.zeros_like(of))
        self._weight.grad = of
        self._optimizer = torch.optim.Muon([self._weight], lr=group.lr, weight_decay=group.weight_decay)

    def step(self) -> Tensor:
        """One update in place. Returns the weight."""
        self._optimizer.step()  # type: ignore[no-untyped-call]
        return self._weight.detach()


def products(of: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """Return the matrix products of one step of the iteration, each whole, on the wide matrix, and nothing else."""
    x = _start(of.to(dtype))
    gram = torch.mm(x, x.mT)

    def work() -> None:
        torch.mm(x, x.mT)
        torch.addmm(gram, gram, gram, beta=B, alpha=C)
        torch.addmm(x, gram, x, beta=A)

    return work


def gram_form(of: Tensor, dtype: torch.dtype, *, steps: int = NUM_STEPS) -> Tensor:
    """The same iteration on the Gram matrix R = X·Xᵀ alone: Xₖ = Qₖ·X. Equal in exact arithmetic, with other bits.

    A step is Z = b·R + c·R², Q ← (a + Z)·Q, R ← (a + Z)·R·(a + Z): all are polynomials of the first R.
    """
    x = _start(of.to(dtype))
    r = torch.mm(x, x.mT)
    q = torch.eye(len(x), dtype=dtype, device=x.device)
    for step in range(steps):
        z = torch.addmm(r, r, r, beta=B, alpha=C)
        q = torch.addmm(q, z, q, beta=A) if step else z + A * q
        if step < steps - 1:
            r = torch.addmm(r, z, r, beta=A)
            r = torch.addmm(r, r, z, beta=A)
    x = torch.mm(q, x)
    return x.mT if of.size(0) > of.size(1) else x


def polar_factor(of: Tensor) -> Tensor:
    """U·Vᵀ of a matrix U·S·Vᵀ of full rank, in float64: (X·Xᵀ)^(−1/2)·X of the wide one, by eigenvalues."""
    x = of.double()
    x = x.mT if of.size(0) > of.size(1) else x
    values, vectors = torch.linalg.eigh(x @ x.mT)
    factor: Tensor = (vectors / values.sqrt()) @ (vectors.mT @ x)
    return factor.mT if of.size(0) > of.size(1) else factor


def cosine(one: Tensor, other: Tensor) -> float:
    """Between two updates of a matrix."""
    one, other = one.double().flatten(), other.double().flatten()
    return float(one @ other / (one.norm() * other.norm()))


def distance(update: Tensor, factor: Tensor) -> float:
    """‖update − factor‖ / ‖factor‖."""
    return float((update.double() - factor).norm() / factor.norm())


def _start(x: Tensor) -> Tensor:
    """The wide one of a matrix and its transpose, of norm 1."""
    x = x.mT.contiguous() if x.size(0) > x.size(1) else x
    return torch.div(x, torch.linalg.vector_norm(x))
