"""Muon's update: equal shapes of a stage's layers as one batch, against one matrix after the other.

DTYPE_WIDTH: how many times as fast `step_together` is as each layer's own `step`, in processor time, for a stage of
eight blocks of that width and Newton-Schulz in that dtype.
update_batched_vs_single: the geometric mean of all of them.

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
    return report(
        f"Update of {NUM_BLOCKS} blocks, batched over one by one", figures | {"update_batched_vs_single": mean}
    )


if __name__ == "__main__":
    sys.exit(main())
