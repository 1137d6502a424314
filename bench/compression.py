"""What wire compression costs in loss and processor time, and what it saves on the line.

Loss: a byte-level decoder cut into four stages learns the sources of the Python standard library with every cut coded:
none, bf16, int8 with the gradients' error fed back, int8 without. It runs in the plain loop with the codec at the cuts
(`headway reference --coded-cuts`), which has the bits of a cluster with these cuts (tests/integration/exactness). Each
row is the mean over seeds; what it costs is the mean of the differences to `none` with the same seed and data. The loss
is that of the final weights on windows drawn with another seed. The plot goes to docs/compression.png.

Line: two stages of 40 ms a microbatch over an emulated line (wan.py) whose Mbit/s plain frames exceed, and int8 does
not, with the depth that the planner advises for each: tokens/s over those of the same job on one site.

cpu_s_per_gb: of one thread, per 10⁹ bytes that are not coded.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lines.wan_line import Line
from lines.wan_plan import advice
from lines.wan_sites import WanRun, sites
from rigs.held_out import held_out_loss
from rigs.measure import machine, progress, versions
from rigs.pipeline_processes import Processes, cut, seconds_per_batch
from wan import MICROBATCH_SIZE, MODEL, NUM_SETTLING, SLEEPS

from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.local.reference_loop import reference
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.data.stdlib_corpus import builtin_corpus
from headway.stages.data.tokens import TokenShards
from headway.stages.links.codec import Codec, codec_between, coded_bytes
from headway.stages.links.compression import Feedback, decode, encode
from headway.stages.spec import ModelSpec, TrainSpec, layer_names

PLOT = Path(__file__).parent.parent / "docs" / "compression.png"
WIRES: dict[str, dict[str, Any]] = {
    "none": {"wire": "none"},
    "bf16": {"wire": "bf16"},
    "int8": {"wire": "int8", "wire_feedback": False},
    "int8 + feedback": {"wire": "int8", "wire_feedback": True},
}
NUM_STAGES = 4
FULL = JobSpec(
    job=JobSection(name="compression"),
    model=ModelSpec(
        num_hidden_layers=4, hidden_size=128, intermediate_size=344, num_attention_heads=4, num_key_value_heads=4
    ),
    train=TrainSpec(batches=300, microbatches=4, microbatch_size=4, sequence_length=128, wire_between="stages"),
    optim=OptimSpec(matrices=GroupSpec(name="muon", lr=1e-2), rest=GroupSpec(name="adamw", lr=3e-3)),
)
QUICK = replace(
    FULL,
    model=replace(FULL.model, hidden_size=64, intermediate_size=172),
    train=replace(FULL.train, batches=40, sequence_length=64),
)
SMOOTHED = 20
"""Batches that a point of the plot is the mean of."""
FRAME_SHAPES = ((4, 128, 256), (4, 512, 1024))
"""0.5 and 8 MiB."""
MOST_COST = 0.02
"""Nats that no codec may cost."""

LINE = Line(round_trip_ms=50, mbit_s=25)
NUM_MICROBATCHES = 8
SEQUENCE_LENGTH = 80
"""Frames of 320 KiB: 65 Mbit/s each way."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One training run."""

    losses: tuple[float, ...]
    held_out: float


def trained(job: JobSpec, tokens: TokenShards) -> Curve:
    """The job in the plain loop, every cut between its stages coded as it says."""
    losses: list[float] = []
    is_coded = codec_between(job.train, is_between_sites=True) is not Codec.NONE
    cuts = [stage[0] for stage in cut(job.layers, NUM_STAGES)[1:]] if is_coded else []
    weights = reference(job, tokens, on_batch=lambda row: losses.append(row.loss), coded_cuts=cuts)
    return Curve(tuple(losses), held_out_loss(job, weights, tokens))


def all_curves(base: JobSpec, seeds: Sequence[int]) -> dict[str, list[Curve]]:
    """Return the losses by codec, one run per seed."""
    curves: dict[str, list[Curve]] = {name: [] for name in WIRES}
    with tempfile.TemporaryDirectory() as cache:
        tokens = TokenShards.open(builtin_corpus(Path(cache)))
        for seed in seeds:
            for name, fields in WIRES.items():
                job = replace(base, job=replace(base.job, seed=seed), train=replace(base.train, **fields))
                curves[name].append(trained(job, tokens))
                progress(f"seed {seed}, {name}: {curves[name][-1].held_out:.4f}")
    return curves


def loss_rows(curves: dict[str, list[Curve]]) -> dict[str, dict[str, float]]:
    """Means over the seeds, and the differences to `none` seed by seed."""
    plain = [curve.held_out for curve in curves["none"]]
    rows = {}
    for name, of_seeds in curves.items():
        costs = [curve.held_out - before for curve, before in zip(of_seeds, plain, strict=True)]
        rows[name] = {
            "held_out": round(statistics.fmean(curve.held_out for curve in of_seeds), 4),
            "cost": round(statistics.fmean(costs), 5),
            "least": round(min(costs), 5),
            "most": round(max(costs), 5),
        }
    rows["none"]["between_seeds"] = round(max(plain) - min(plain), 4)
    return rows


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Training loss of the first seed, and below it what each codec adds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2))
    plain = _smooth(curves["none"][0].losses)
    for index, (name, of_seeds) in enumerate(curves.items()):
        losses, colour = _smooth(of_seeds[0].losses), f"C{index}"
        batches = range(SMOOTHED, SMOOTHED + len(losses))
        above.plot(batches, losses, label=name, color=colour)
        if name != "none":
            below.plot(
                batches, [one - other for one, other in zip(losses, plain, strict=True)], label=name, color=colour
            )
    below.axhline(0, color="grey", linewidth=0.8)
    above.set(ylabel="loss, nats per token", title=f"every cut of four stages coded, mean of {SMOOTHED} batches")
    below.set(xlabel="batch", ylabel="over none")
    above.legend()
    below.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def _smooth(losses: Sequence[float]) -> list[float]:
    return [statistics.fmean(losses[end - SMOOTHED : end]) for end in range(SMOOTHED, len(losses) + 1)]


def cpu_s_per_gb(shape: tuple[int, ...], *, num_rounds: int) -> dict[str, dict[str, float]]:
    """Return the seconds of one thread per 10⁹ bytes of float32, the median of rounds in which all codecs
    take turns.
    """
    torch.set_num_threads(1)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    coded = {codec: encode(values, codec) for codec in (Codec.BF16, Codec.INT8)}
    feedback = Feedback(Codec.INT8, num_groups=1)
    what: dict[tuple[str, str], Callable[[], object]] = {
        ("copy", "encode"): values.clone,
        ("bf16", "encode"): lambda: encode(values, Codec.BF16),
        ("bf16", "decode"): lambda: decode(coded[Codec.BF16], Codec.BF16, torch.float32),
        ("int8", "encode"): lambda: encode(values, Codec.INT8),
        ("int8", "decode"): lambda: decode(coded[Codec.INT8], Codec.INT8, torch.float32),
        ("int8 + feedback", "encode"): lambda: feedback.encode(values, 0),
    }
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in what}
    for number in range(num_rounds + 1):
        for key, work in what.items():
            started = time.thread_time()
            work()
            if number:  # the first one finds cold memory
                samples[key].append((time.thread_time() - started) / values.nbytes * 1e9)
    rows: dict[str, dict[str, float]] = {}
    for (name, side), seconds in samples.items():
        rows.setdefault(name, {})[side] = round(statistics.median(seconds), 3)
    return rows


def over_the_line(*, num_batches: int, num_rounds: int) -> dict[str, float]:
    """Tokens/s of each codec over the line, over those of the job on one site without a codec; rounds in turns."""
    ratios: dict[str, list[float]] = {name: [] for name in WIRES}

    def seconds(processes: Processes, wire: dict[str, Any], line: Line | None = None) -> float:
        train = TrainSpec(
            schedule="2bw",
            batches=num_batches,
            microbatches=NUM_MICROBATCHES,
            microbatch_size=MICROBATCH_SIZE,
            sequence_length=SEQUENCE_LENGTH,
            wire_between="stages",
            **wire,
        )
        task = WanRun(
            job=near.new_name(),
            model=MODEL,
            train=train,
            optim=OptimSpec(),
            cuts=cut(layer_names(MODEL), 2),
            sleeps=SLEEPS,
            depths=advice(MODEL, train, SLEEPS, line).depths,
        )
        ends = processes.run(task, number=2)[0].stage.batch_ends()
        return seconds_per_batch(ends, num_settling=NUM_SETTLING)

    with Processes(2) as near, sites() as far:
        far.wan.set(LINE)
        for number in range(num_rounds):
            on_one_site = seconds(near, WIRES["none"])
            for name in WIRES if number % 2 == 0 else reversed(WIRES):
                ratios[name].append(on_one_site / seconds(far.processes, WIRES[name], LINE))
                progress(f"{LINE.round_trip_ms:g} ms, {LINE.mbit_s:g} Mbit/s, {name}: {ratios[name][-1]:.3f}")
    return {name: round(statistics.median(found), 3) for name, found in ratios.items()}


def main() -> int:
    """Print the table and the JSON line; 1 if a codec costs more than MOST_COST."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, few batches, one seed; within a minute")
    parser.add_argument("--part", choices=("all", "loss", "line", "cpu"), default="all")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    quick, parts = options.quick, ("loss", "line", "cpu") if options.part == "all" else (options.part,)
    base = QUICK if quick else FULL
    num_values = base.train.microbatch_size * base.train.sequence_length * base.model.hidden_size
    body: dict[str, Any] = {
        "bytes_per_value": {
            name: round(coded_bytes(codec_between(replace(base.train, **fields), is_between_sites=True), num_values, 4))
            / num_values
            for name, fields in WIRES.items()
        }
    }
    print("\nbytes on the wire for each float32 value")
    print("\n".join(f"{name:16} {size:.4f}" for name, size in body["bytes_per_value"].items()))
    if "cpu" in parts:
        body["cpu_s_per_gb"] = {}
        for shape in FRAME_SHAPES:
            rows = cpu_s_per_gb(shape, num_rounds=15 if quick else 101)
            size = f"{torch.Size(shape).numel() * 4 / 2**20:g} MiB"
            body["cpu_s_per_gb"][size] = rows
            print(f"\nprocessor seconds per GB of float32, frames of {size}\n{'':16} {'encode':>8} {'decode':>8}")
            for name, row in rows.items():
                print(f"{name:16} {row['encode']:8.3f} {row.get('decode', float('nan')):8.3f}")
    if "line" in parts:
        body["line"] = over_the_line(num_batches=8 if quick else 12, num_rounds=1 if quick else 3)
        print(f"\ntokens/s over one site's: {LINE.round_trip_ms:g} ms, {LINE.mbit_s:g} Mbit/s, plain frames need 65")
        print("\n".join(f"{name:16} {ratio:.3f}" for name, ratio in body["line"].items()))
    status = 0
    if "loss" in parts:
        curves = all_curves(base, range(1, 2 if quick else options.seeds + 1))
        rows = loss_rows(curves)
        body["loss"] = rows
        if not quick:
            draw(curves, PLOT)
        print(f"\nheld-out loss in nats after {base.train.batches} batches, {len(curves['none'])} seeds")
        print(f"{'':16} {'loss':>8} {'over none':>10}   least to most over the seeds")
        for name, row in rows.items():
            print(f"{name:16} {row['held_out']:8.4f} {row['cost']:+10.4f}   {row['least']:+.4f} to {row['most']:+.4f}")
        status = int(not quick and max(row["cost"] for row in rows.values()) > MOST_COST)
    print(json.dumps({**body, "machine": machine(), "versions": versions()}), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
