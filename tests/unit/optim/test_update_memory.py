"""The temporary memory of an update, counted tensor by tensor."""

import torch

from headway.optim.layer_optimizer import TorchLayerOptimizer, optimizer_factory
from headway.optim.muon import MOST_MATRICES
from headway.optim.spec import GroupSpec, OptimSpec
from tests.rigs.update_memory import NewMemory

WIDTH, WIDE = 32, 80
BLOCK = {
    **{f"{name}.weight": (WIDTH, WIDTH) for name in "qkvo"},
    "gate.weight": (WIDE, WIDTH),
    "up.weight": (WIDE, WIDTH),
    "down.weight": (WIDTH, WIDE),
    "norm.weight": (WIDTH,),
}
BLOCK_BYTES = 4 * (4 * WIDTH * WIDTH + 3 * WIDTH * WIDE + WIDTH)
LARGEST_BYTES = 4 * WIDTH * WIDE


def peak_bytes(num_blocks: int, *, error_feedback: float, is_in_place: bool = True) -> int:
    """Of the second update of so many blocks together."""
    torch.manual_seed(0)
    blocks = range(num_blocks)
    sets = [[{name: torch.randn(shape) for name, shape in BLOCK.items()} for _ in blocks] for _ in range(3)]
    optim = OptimSpec(matrices=GroupSpec(name="muon"), error_feedback=error_feedback)
    make = optimizer_factory(optim, num_batches=10, delay=1)
    optimizers = [make(f"block.{block}", sets[0][block]) for block in blocks]
    about = {"current": sets[0], "target": sets[0 if is_in_place else 1], "gradients": sets[2]}
    TorchLayerOptimizer.step_together(optimizers, 0, owners=(), shares=None, **about)
    states = [optimizer.state() for optimizer in optimizers]
    known = [tensor for of_block in (*sets[0], *sets[1], *sets[2], *states) for tensor in of_block.values()]
    with NewMemory(known) as memory:
        TorchLayerOptimizer.step_together(optimizers, 1, owners=(), shares=None, **about)
    return int(memory.peak)


def test_an_update_takes_no_more_memory_for_more_layers() -> None:
    """Eight blocks fill a batch of matrices; sixteen take as much, and Error Feedback a batch's weights beside it.

    It needs W_b where the master is stepped in place, and has it in the other set where there are two.
    """
    plain, corrected = (peak_bytes(8, error_feedback=alpha) for alpha in (0.0, 1.0))
    assert plain > MOST_MATRICES * LARGEST_BYTES, "a stack of matrices, at the least"
    assert 0 < corrected - plain <= MOST_MATRICES * LARGEST_BYTES
    assert corrected - plain < 8 * BLOCK_BYTES / 2
    step_counts = 16 * 4  # AdamW's, which an update fills
    assert abs(peak_bytes(16, error_feedback=1.0) - corrected) <= step_counts
    assert abs(peak_bytes(16, error_feedback=1.0, is_in_place=False) - plain) <= step_counts
