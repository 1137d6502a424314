"""What a stage's process spends beside its arithmetic: on memory that it frees, and on the memory of its operations.

--rows memory: freed memory that stays with the process, against glibc's own habits: two stages over gRPC.
kept_memory_WIDTH: processor seconds of both processes without `keep_freed_memory`, over those with it.
page_faults_WIDTH: how many times fewer pages the kernel clears.
large_pages_WIDTH: processor seconds of both with kept memory in pages of 4 KiB, over those in pages of 2 MiB.

--rows trace: what it costs that `headway trace` can be asked at any time.
record_ns: to remember one operation, the call included; a call that does nothing, measured in turns, is beside it.
tell_ms: to put a full memory into the answer, in a thread that shares the processor with the computation.

--rows starts: processor milliseconds of what is so small that only its start counts, while two processes compute.
block_ms, ends_ms: forward and backward of a block; of embed and head together. block_update_ms, ends_update_ms: their
updates. microbatch_ms: what a stage does beside them for each microbatch; stage_ms: once a batch. frame_ms: to send a
frame, or to receive one. They come from pipelines of 4 and 8 blocks, 4 and 16 microbatches, one stage and two.

Processor time, unlike wall time, hardly depends on what else the machine does. Sides alternate; losses are compared.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rigs.measure import Figure, alternate, progress, report
from rigs.pipeline_processes import Host, Operations, Processes, StageRun, cut

from headway.daemon.cluster.records import PlanRecord, WorkerPart
from headway.daemon.worker.goal import Start
from headway.daemon.worker.stage_records import StageRecords
from headway.optim.spec import OptimSpec
from headway.stages.schedule.operations import Backward, Forward, Op, Update
from headway.stages.spec import ModelSpec, TrainSpec, layer_names
from headway.stages.stage.allocator import keep_freed_memory, with_large_pages
from headway.stages.stage.launched_ops import StageObserver
from headway.stages.telemetry.goodput import NUM_KEPT, Goodput

WORKLOADS = {256: (4, 8), 128: (2, 24)}
"""By width: sequences of a microbatch, and batches of a run."""
NUM_BLOCKS = 4
ROWS = ("memory", "trace", "starts")
NUM_BATCHES = 40


@dataclass(frozen=True, slots=True)
class Cost:
    """The figures of one process in one run."""

    cpu_s: float
    num_faults: int
    losses: list[float]


@dataclass(frozen=True, slots=True)
class Counted:
    """A stage's run whose costs are counted, in a process that keeps its memory from now on, or not."""

    run_of_stage: StageRun
    is_kept: bool

    def run(self, host: Host) -> Cost:
        """Run in the process."""
        if self.is_kept and not keep_freed_memory():
            raise RuntimeError("this C library's allocator cannot be told to keep freed memory")
        before = resource.getrusage(resource.RUSAGE_SELF)
        losses = self.run_of_stage.run(host).losses
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Cost(cpu_s, after.ru_minflt - before.ru_minflt, losses)


def compare(width: int, *, num_pairs: int) -> dict[str, Figure]:
    """All sides in turns, after one run of each that is not counted."""
    microbatch_size, batches = WORKLOADS[width]
    model = ModelSpec(
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
    )
    train = TrainSpec(batches=batches, microbatches=4, microbatch_size=microbatch_size, sequence_length=128)
    cuts = cut(list(layer_names(model)), 2)
    kept, faults, large = [], [], []
    with (
        Processes(2, environment={}) as usual,
        Processes(2, environment={}) as keeping,
        Processes(2, environment=with_large_pages({})) as in_large_pages,
    ):
        sides = {"usual": usual, "kept": keeping, "large": in_large_pages}

        def costs(name: str) -> list[Cost]:
            side = sides[name]
            run = StageRun(job=side.new_name(), model=model, train=train, optim=OptimSpec(), cuts=cuts)
            return side.run(Counted(run, is_kept=name != "usual"), number=2)

        for index in range(num_pairs + 1):
            order = list(sides)[index % 3 :] + list(sides)[: index % 3]
            by_side = {name: costs(name) for name in order}
            if len({tuple(of_side[-1].losses) for of_side in by_side.values()}) > 1:
                raise RuntimeError("the losses differ")
            if index:
                cpu_s = {name: sum(cost.cpu_s for cost in of_side) for name, of_side in by_side.items()}
                counts = {name: sum(cost.num_faults for cost in of_side) for name, of_side in by_side.items()}
                kept.append(cpu_s["usual"] / cpu_s["kept"])
                faults.append(counts["usual"] / max(1, counts["kept"]))
                large.append(cpu_s["kept"] / cpu_s["large"])
                progress(f"{width}: " + ", ".join(f"{name} {cpu_s[name]:.2f} s" for name in sides))
    return {
        f"kept_memory_{width}": Figure.of(kept),
        f"page_faults_{width}": Figure.of(faults),
        f"large_pages_{width}": Figure.of(large),
    }


class Nothing(Operations):
    """Forgets."""

    def ended(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None: ...


def trace_costs(num_pairs: int) -> dict[str, Figure]:
    """Of remembering one operation, and of telling all that are kept."""
    num_ops = 200_000
    records = StageRecords(None, node="bench", incarnation="bench")
    part = WorkerPart(node="a", node_incarnation="1", device_index=0, layers=("embed",), depth=1)
    plan = PlanRecord(generation=1, timeline=1, workers=(part,))
    records.begin("bench", Start(plan=plan, position=0))
    remembering, nothing = records.observer(Goodput(), lambda _: None), Nothing()
    ops = [Forward(batch, 0) for batch in range(1000)]

    def ns_of(observer: StageObserver) -> float:
        """One call, of so many."""
        began = time.process_time()
        for _ in range(num_ops // len(ops)):
            for op in ops:
                observer.ended(op, version=1, num_versions_live=2, started=time.perf_counter(), ended=1.0)
        return (time.process_time() - began) / num_ops * 1e9

    pairs = alternate(num_pairs, lambda: ns_of(remembering), lambda: ns_of(nothing))
    told_ms = []
    for _ in range(num_pairs):
        began = time.process_time()
        assert len(records.recent().SerializeToString()) > NUM_KEPT
        told_ms.append((time.process_time() - began) * 1e3)
    return {
        "record_ns": Figure.of([ours for ours, _ in pairs]),
        "empty_call_ns": Figure.of([theirs for _, theirs in pairs]),
        "tell_ms": Figure.of(told_ms),
    }


class ProcessorTimes(Operations):
    """Keeps the processor seconds of each operation, and those of the whole process until its end."""

    def begins(self, op: Op, now: float) -> None:  # noqa: ARG002
        self._began = time.thread_time()

    def ended(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:  # noqa: ARG002
        self.all.append((op, time.thread_time() - self._began, time.process_time()))


class TimedRun(StageRun):
    """A stage's run whose processor times are kept."""

    def observer(self) -> Operations:
        """As of a StageRun."""
        return ProcessorTimes()


@dataclass(frozen=True, slots=True)
class BatchParts:
    """Milliseconds of processor time of a batch, the median of the run, over all stages."""

    microbatch_ms: float
    """Of the operations on one microbatch, forward and backward."""
    update_ms: float
    beside_ms: float
    """Of the processes beside these operations, once a batch."""


def start_costs(num_passes: int) -> dict[str, Figure]:
    """Of tiny layers, by differences between pipelines; each pass has all of them, the first one is not counted."""
    samples: list[dict[str, float]] = []
    with Processes(2, environment={}) as processes:
        for index in range(num_passes + 1):
            one, many, deep, two, two_many = (
                _parts(processes, *shape) for shape in ((4, 4, 1), (4, 16, 1), (8, 4, 1), (4, 4, 2), (4, 16, 2))
            )
            block = (deep.microbatch_ms - one.microbatch_ms) / 4
            layer_update = (deep.update_ms - one.update_ms) / 4
            beside = (many.beside_ms - one.beside_ms) / 12
            frame = ((two_many.beside_ms - two.beside_ms) / 12 - beside) / 4
            found = {
                "block_ms": block,
                "ends_ms": one.microbatch_ms - 4 * block,
                "microbatch_ms": beside,
                "frame_ms": frame,
                "block_update_ms": layer_update,
                "ends_update_ms": one.update_ms - 4 * layer_update,
                "stage_ms": (two.beside_ms - 4 * (beside + 4 * frame)) / 2,
            }
            progress(f"pass {index}: " + ", ".join(f"{name} {ms:.2f}" for name, ms in found.items()))
            samples += [found] if index else []
    return {name: Figure.of([sample[name] for sample in samples]) for name in samples[0]}


def _parts(processes: Processes, num_blocks: int, microbatches: int, num_stages: int) -> BatchParts:
    """Return a tiny pipeline's times. One of a single stage runs in each of both processes, so that both compute."""
    model = ModelSpec(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    train = TrainSpec(batches=NUM_BATCHES, microbatches=microbatches, microbatch_size=1, sequence_length=8)
    run = TimedRun(
        job=processes.new_name(),
        model=model,
        train=train,
        optim=OptimSpec(),
        cuts=cut(list(layer_names(model)), num_stages),
        is_alone=num_stages == 1,
    )
    stages = [_stage_parts(report.operations) for report in processes.run(run, number=2)]
    microbatch_ms, update_ms, beside_ms = (sum(parts) * num_stages / 2 for parts in zip(*stages, strict=True))
    return BatchParts(microbatch_ms, update_ms, beside_ms)


def _stage_parts(operations: Sequence[tuple[Op, float, float]]) -> tuple[float, float, float]:
    """Return one stage's milliseconds, as in BatchParts."""
    took: dict[type, list[float]] = {}
    ends = []
    for op, cpu_s, until_s in operations:
        took.setdefault(type(op), []).append(cpu_s)
        ends += [until_s] if isinstance(op, Update) else []
    each = {kind: statistics.median(seconds) * 1e3 for kind, seconds in took.items()}
    microbatch_ms, update_ms = each[Forward] + each[Backward], each[Update]
    whole_ms = statistics.median(after - before for before, after in pairwise(ends)) * 1e3
    computing_ms = len(took[Forward]) / len(took[Update]) * microbatch_ms + update_ms
    return microbatch_ms, update_ms, whole_ms - computing_ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute, for a first look")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="only these")
    options = parser.parse_args()
    figures: dict[str, Figure] = {}
    for width in WORKLOADS if "memory" in options.rows else ():
        figures |= compare(width, num_pairs=3 if options.quick else 11)
    if "trace" in options.rows:
        figures |= trace_costs(5 if options.quick else 25)
    if "starts" in options.rows:
        figures |= start_costs(3 if options.quick else 11)
    return report("A stage's process beside its arithmetic", figures)


if __name__ == "__main__":
    sys.exit(main())
