"""Muon's update: equal shapes of a stage's layers as one batch, against one matrix after the other.

DTYPE_WIDTH: how many times as fast `step_together` is as each layer's own `step`, in processor time, for a stage of
eight blocks of that width and Newton-Schulz in that dtype.
update_batched_vs_single: the geometric mean of all of them.
shared_N_DTYPE_WIDTH: how many times as fast an update is on the busiest of N replicas that share Newton-Schulz, without
the way of the results. N is the most that it could be.

One thread. Processor time hardly depends on what else the machine does. Sides alternate.
"""

import argparse
import statistics
import sys
import time

import torch
from rigs.measure import Figure, alternate, progress, report
from torch import Tensor

from headway.optim.layer_optimizer import TorchLayerOptimizer, optimizer_factory
from headway.optim.spec import GroupSpec, OptimSpec
from headway.optim.update_shares import matrix_owners
from headway.stages.model.decoder import parameter_shapes
from headway.stages.spec import ModelSpec

NUM_BLOCKS = 8
WIDTHS = (32, 64, 128, 256)


class Stage:
    """Blocks of one width with an optimizer each, and two sets of their weights."""

    def __init__(self, width: int, newton_schulz_dtype: str, *, num_batches: int) -> None:
        model = ModelSpec(
            hidden_size=width,
            intermediate_size=width * 43 // 16,
            num_hidden_layers=NUM_BLOCKS,
            num_attention_heads=width // 16,
            num_key_value_heads=width // 32,
        )
        matrices = GroupSpec(name="muon", newton_schulz_dtype=newton_schulz_dtype)  # type: ignore[arg-type]
        make = optimizer_factory(OptimSpec(matrices=matrices), num_batches=num_batches, delay=1)
        names = [f"block.{index}" for index in range(NUM_BLOCKS)]
        self._gradients = [_random(name, model) for name in names]
        self._sets = [[_random(name, model) for name in names] for _ in range(2)]
        self._optimizers = [make(name, of_set) for name, of_set in zip(names, self._sets[0], strict=True)]
        self._batch = 0

    def seconds(self, *, is_together: bool) -> float:
        """One update."""
        batch = self._batch
        self._batch += 1
        current, target = self._sets[batch % 2], self._sets[(batch + 1) % 2]
        began = time.thread_time()
        if is_together:
            TorchLayerOptimizer.step_together(
                self._optimizers, batch, current=current, target=target, gradients=self._gradients
            )
        else:
            for optimizer, *maps in zip(self._optimizers, current, target, self._gradients, strict=True):
                optimizer.step(batch, current=maps[0], target=maps[1], gradients=maps[2])
        return time.thread_time() - began

    def shared_seconds(self, num_replicas: int) -> float:
        """One update on the first of replicas that share it; what the others send is there."""
        batch = self._batch
        self._batch += 1
        current, target = self._sets[batch % 2], self._sets[(batch + 1) % 2]
        owners = matrix_owners(TorchLayerOptimizer.matrix_shapes(self._optimizers), num_replicas)
        shares, taken = {}, 0.0
        for replica in range(num_replicas):
            matrices = [index for index, owner in enumerate(owners) if owner == replica]
            began = time.thread_time()
            shares[replica] = TorchLayerOptimizer.orthogonalize_share(
                self._optimizers, batch, gradients=self._gradients, matrices=matrices
            )
            taken = max(taken, time.thread_time() - began)
        began = time.thread_time()
        TorchLayerOptimizer.step_together(
            self._optimizers,
            batch,
            current=current,
            target=target,
            gradients=self._gradients,
            owners=owners,
            shares=shares,
        )
        return taken + time.thread_time() - began


def _random(name: str, model: ModelSpec) -> dict[str, Tensor]:
    return {parameter: torch.randn(shape) for parameter, shape in parameter_shapes(name, model).items()}


def compare(width: int, newton_schulz_dtype: str, *, num_pairs: int) -> list[float]:
    """Single over batched."""
    stage = Stage(width, newton_schulz_dtype, num_batches=2 * num_pairs + 2)
    for is_together in (False, True):
        stage.seconds(is_together=is_together)  # what is made once
    pairs = alternate(num_pairs, lambda: stage.seconds(is_together=True), lambda: stage.seconds(is_together=False))
    progress(f"{width} {newton_schulz_dtype}: {1e3 * statistics.median(batched for batched, _ in pairs):.2f} ms")
    return [single / batched for batched, single in pairs]


def compare_shared(width: int, newton_schulz_dtype: str, num_replicas: int, *, num_pairs: int) -> list[float]:
    """Whole over shared."""
    stage = Stage(width, newton_schulz_dtype, num_batches=2 * num_pairs + 2)
    stage.seconds(is_together=True)
    stage.shared_seconds(num_replicas)
    pairs = alternate(num_pairs, lambda: stage.shared_seconds(num_replicas), lambda: stage.seconds(is_together=True))
    progress(f"{width} {newton_schulz_dtype}, {num_replicas} replicas: {1e3 * min(s for s, _ in pairs):.2f} ms")
    return [whole / shared for shared, whole in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a first look")
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_pairs = 7 if options.quick else 31
    ratios = {
        f"{dtype}_{width}": compare(width, dtype, num_pairs=num_pairs)
        for dtype in ("float32", "bfloat16")
        for width in WIDTHS
    }
    mean = Figure.of([statistics.geometric_mean(samples) for samples in zip(*ratios.values(), strict=True)])
    figures = {name: Figure.of(samples) for name, samples in ratios.items()}
    shared = {
        f"shared_{number}_{dtype}_{width}": Figure.of(compare_shared(width, dtype, number, num_pairs=num_pairs))
        for dtype in ("float32", "bfloat16")
        for width in ((128,) if options.quick else (128, 512))
        for number in (2, 4)
    }
    return report(
        f"Update of {NUM_BLOCKS} blocks: batched over one by one, and shared by replicas",
        figures | {"update_batched_vs_single": mean} | shared,
    )


if __name__ == "__main__":
    sys.exit(main())
