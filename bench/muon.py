"""Muon's update: against torch.optim.Muon at the sizes of real models, and what saves time at small ones.

--only torch, for a block of SmolLM2-360M and of Llama-3.2-1B, by dtype of our Newton-Schulz and number of threads:
vs_torch_muon: seconds of torch.optim.Muon over ours, which also has Error Feedback and a second set of weights. torch
iterates in bfloat16 alone, so `bfloat16` compares like with like, to the bit; `float32` is the default here on a CPU.
of_matmul_bound: seconds of the iteration's matrix products alone, each whole, at their shapes, over ours. Above 1, our
products have saved more than all the rest costs.
direction_ROWSxCOLS: cosine of the first update in float32 and torch's.
closeness_ROWSxCOLS: distance of torch's first update from the exact polar factor, over that of ours in float32.

--only gram:
gram_form_ROWSxCOLS_DTYPE: how many times as fast the iteration on the Gram matrix is as ours. It has other bits.

--only small, for a stage of eight blocks:
DTYPE_WIDTH: how many times as fast `step_together` is as each layer's own `step`.
update_batched_vs_single: the geometric mean of all of them.
shared_N_DTYPE_WIDTH: how many times as fast an update is on the busiest of N replicas that share Newton-Schulz, without
the way of the results. N is the most that it could be.

One thread, and processor time, which hardly depends on what else the machine does; wall time with two. Sides alternate.
All but `small` runs on a CUDA device instead where there is one.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from rigs.measure import Figure, alternate, progress, report
from rigs.muon_sides import (
    MODELS,
    Ours,
    Shape,
    Theirs,
    Timer,
    block_matrices,
    cosine,
    distance,
    gradient,
    gram_form,
    of_block,
    polar_factor,
    products,
)
from torch import Tensor

from headway.optim.layer_optimizer import TorchLayerOptimizer, optimizer_factory
from headway.optim.muon import NUM_STEPS, orthogonalize, shape_scale
from headway.optim.spec import GroupSpec, OptimSpec
from headway.optim.update_shares import matrix_owners
from headway.stages.model.decoder import parameter_shapes
from headway.stages.spec import ModelSpec

NUM_BLOCKS = 8
WIDTHS = (32, 64, 128, 256)
DTYPES = ("float32", "bfloat16")
BARS = (("vs_torch_muon", "bfloat16_1", 1.0), ("direction", "", 0.999), ("closeness", "", 0.999))
"""By the beginning and the end of a figure's name."""
GRAM_SHAPES = ((960, 960), (960, 2560), (512, 2048))


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


def measure_small(*, is_quick: bool) -> dict[str, Figure]:
    """What batches and shares bring."""
    torch.set_num_threads(1)
    num_pairs = 3 if is_quick else 11
    ratios = {f"{dtype}_{width}": compare(width, dtype, num_pairs=num_pairs) for dtype in DTYPES for width in WIDTHS}
    mean = Figure.of([statistics.geometric_mean(samples) for samples in zip(*ratios.values(), strict=True)])
    figures = {name: Figure.of(samples) for name, samples in ratios.items()}
    shared = {
        f"shared_{number}_{dtype}_{width}": Figure.of(compare_shared(width, dtype, number, num_pairs=num_pairs))
        for dtype in DTYPES
        for width in ((128,) if is_quick else (128, 512))
        for number in (2, 4)
    }
    return figures | {"update_batched_vs_single": mean} | shared


def against_torch(name: str, threads: int, device: torch.device, *, num_rounds: int) -> dict[str, Figure]:
    """Both ratios of a block of a model, in both dtypes."""
    timer = Timer(device, threads)
    counts = block_matrices(MODELS[name])
    seconds = {}
    for shape in counts:
        of = gradient(shape, device)
        ours = [Ours(of, dtype, num_updates=num_rounds) for dtype in DTYPES]
        steps: list[Callable[[], object]] = [side.step for side in ours]
        steps.append(Theirs(of, ours[0].optim.matrices).step)
        steps += [products(of, getattr(torch, dtype)) for dtype in DTYPES]
        for dtype in DTYPES:
            orthogonalize(of, steps=1, dtype=getattr(torch, dtype))  # what a process compares once
        progress(f"{name}, {shape}, {threads} threads: ours in float32, in bfloat16, torch's, and products of a step")
        seconds[shape] = alternate(num_rounds, *(partial(timer.seconds, step) for step in steps))
    rounds = of_block(counts, seconds)
    found = {}
    for index, dtype in enumerate(DTYPES):
        kind = f"{name}_{dtype}_{threads}"
        found[f"vs_torch_muon_{kind}"] = Figure.of([each[2] / each[index] for each in rounds])
        found[f"of_matmul_bound_{kind}"] = Figure.of([NUM_STEPS * each[3 + index] / each[index] for each in rounds])
    return found


def compare_directions(device: torch.device) -> dict[str, Figure]:
    """The first update from weights of 0, for each matrix of the smaller model."""
    found = {}
    for shape in block_matrices(MODELS["360m"]):
        of = gradient(shape, device)
        ours = {dtype: Ours(of, dtype, num_updates=1) for dtype in DTYPES}
        group = ours["float32"].optim.matrices
        updates = {dtype: side.step() for dtype, side in ours.items()} | {"torch": Theirs(of, group).step()}
        factor, rate = polar_factor(of), -group.lr * shape_scale(*shape)
        distances = {name: distance(update / rate, factor) for name, update in updates.items()}
        own = distance(orthogonalize(of, dtype=torch.float64), factor)
        is_equal = torch.equal(updates["bfloat16"], updates["torch"])
        progress(f"{shape}: distances {distances}, of the iteration itself {own:.6f}; bfloat16 is torch's: {is_equal}")
        found[f"direction_{_of(shape)}"] = Figure.of([cosine(updates["float32"], updates["torch"])])
        found[f"closeness_{_of(shape)}"] = Figure.of([distances["torch"] / distances["float32"]])
    return found


def compare_gram_form(shapes: Sequence[Shape], device: torch.device, *, num_rounds: int) -> dict[str, Figure]:
    """The iteration alone, on matrices of one to four times as many columns as rows."""
    timer = Timer(device, 1)
    found = {}
    for shape in shapes:
        of = gradient(shape, device)
        exact = orthogonalize(of, dtype=torch.float64)
        for dtype in (torch.float32, torch.bfloat16):
            plain, gram = partial(orthogonalize, of, dtype=dtype), partial(gram_form, of, dtype)
            errors = ", ".join(f"{distance(form(), exact):.2g}" for form in (plain, gram))
            progress(f"{shape}, {dtype}: errors {errors}")
            pairs = alternate(num_rounds, *(partial(timer.seconds, form) for form in (plain, gram)))
            name = f"gram_form_{_of(shape)}_{str(dtype).removeprefix('torch.')}"
            found[name] = Figure.of([ours / theirs for ours, theirs in pairs])
    return found


def _of(shape: Shape) -> str:
    return "x".join(map(str, shape))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smaller model and few rounds, for a first look")
    parser.add_argument("--only", choices=("torch", "gram", "small"), help="one part")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=None, help="of the part torch")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of a CPU, of the part torch")
    options = parser.parse_args()
    quick, only = options.quick, options.only
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures: dict[str, Figure] = {}
    if only in (None, "torch"):
        figures |= compare_directions(device)
        for name in options.models or (["360m"] if quick else MODELS):
            for threads in options.threads if device.type == "cpu" else [1]:
                figures |= against_torch(name, threads, device, num_rounds=2 if name == "1b" else 3 if quick else 5)
    if only in (None, "gram"):
        figures |= compare_gram_form(GRAM_SHAPES[1:2] if quick else GRAM_SHAPES, device, num_rounds=3)
    if only in (None, "small"):
        figures |= measure_small(is_quick=quick)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "no CUDA device was here"
    held = {name: bar for name in figures for start, end, bar in BARS if name.startswith(start) and name.endswith(end)}
    return report("Muon's update", figures, bars=held, extra={"device": where})


if __name__ == "__main__":
    sys.exit(main())
