"""First operations: what a fresh process pays once, and its share of the time that the daemon gives a worker.

Each is done once, in the order in which a worker meets it: the context and the first allocation, the first products in
both dtypes (cuBLAS), forward and backward of a block, its update (Newton–Schulz, first at the job's shapes), and the
same block compiled. On a card the block is one of an 8B model.

share_of_limit: the largest of: all operations but the compilation over the time of a first operation; the compilation
over the time to prepare.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch

from gpu.sizes import block_model, first_device, stage_train, wait_for
from headway.daemon.jobs.job import preparation_s
from headway.daemon.worker.liveness import FIRST_OPERATION_S
from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.spec import OptimSpec
from headway.stages.data.microbatch import Microbatch
from headway.stages.errors import CompilationError
from headway.stages.ids import LayerName
from headway.stages.model.compilation import compile_ahead
from headway.stages.model.determinism import configure
from headway.stages.stage.graph import StageGraph
from headway.stages.state.layer_state import LayerState

BLOCK = LayerName("block.0")


def seconds(device: str, work: Callable[[], object]) -> float:
    """Return the seconds of one piece of work, until the device has done it."""
    began = perf_counter()
    work()
    wait_for(device)
    return perf_counter() - began


def measure(device: str) -> dict[str, object]:
    """Do everything once."""
    model = block_model(device)
    train = replace(stage_train(device, batches=1), microbatch_size=1, microbatches=1)
    if device != "cpu":
        train = replace(train, sequence_length=2048)
    configure(train, torch.device(device))
    side = 64 if device == "cpu" else 4096
    figures: dict[str, object] = {"context_s": seconds(device, lambda: torch.zeros(1 << 20, device=device))}

    def products() -> None:
        for dtype in (torch.float32, torch.bfloat16):
            one = torch.zeros((side, side), device=device, dtype=dtype)
            torch.mm(one, one)

    figures["products_s"] = seconds(device, products)
    make = optimizer_factory(OptimSpec(), num_batches=1, delay=train.delay)
    layer = LayerState.initial(BLOCK, model, train, seed=1, device=device, optimizer_factory=make)
    wait_for(device)
    graph = StageGraph([layer], model, train, is_first=False, is_last=False)
    shape = (train.microbatch_size, train.sequence_length)
    hidden = torch.zeros((*shape, model.hidden_size), device=device, dtype=getattr(torch, train.dtype))
    targets = torch.zeros(shape, device=device, dtype=torch.int64)
    gradients: list[torch.Tensor] = []

    def both_ways() -> None:
        graph.forward((0, 0), Microbatch(hidden, targets), version=0)
        gradients.extend(graph.backward((0, 0), hidden)[0])

    figures["block_s"] = seconds(device, both_ways)
    figures["newton_schulz_s"] = seconds(device, lambda: graph.update(0, [g.float() for g in gradients]))
    operations_s = sum(float(str(figures[key])) for key in ("context_s", "products_s", "block_s", "newton_schulz_s"))
    share = operations_s / FIRST_OPERATION_S
    compiled = replace(train, compile=True)
    try:
        compile_s = seconds(device, lambda: compile_ahead([BLOCK], model, compiled, torch.device(device)))
        figures["compile_s"] = compile_s
        share = max(share, compile_s / preparation_s(compiled))
    except CompilationError as error:
        figures |= {"compile_s": None, "compile_s_reason": str(error)}
    return {**figures, "share_of_limit": share}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    print(json.dumps(measure(first_device(options.device))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
