"""Where the time goes that a pipeline of `bench/throughput.py` lacks to its bound.

Real compute: two stages of the default model, and two whole models side by side: what the operations take (medians),
and per batch the processor time of each kind of thread and how long it stood ready without a core (Linux's schedstat).
Emulated: how much longer than its time an operation took, how long after its neighbour's operation a stage that had
nothing else to do began its own (`hop`), and what the processes took of the cores.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import Figure, report
from pipeline_processes import Host, KeepFreedMemory, Processes, StageReport, StageRun, cut, seconds_per_batch
from throughput import OPTIM, SLEEPS, Emulated

from headway.stages.schedule import Backward, Forward, Update
from headway.stages.spec import ModelSpec, TrainSpec, layer_names

SETTLING, BATCHES, MICROBATCHES = 3, 12, 4


@dataclass(frozen=True, slots=True)
class Used:
    """By one kind of thread, seconds."""

    running: float
    ready: float
    """Without a core."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A stage's run, and what the threads of its process used meanwhile."""

    stage_run: StageRun

    def run(self, host: Host) -> tuple[StageReport, dict[str, Used], float]:
        """In the process: also the seconds that it took."""
        before, began = _threads(), time.perf_counter()
        done = self.stage_run.run(host)
        took, after = time.perf_counter() - began, _threads()
        used: dict[str, Used] = {}
        for thread, (name, now) in after.items():
            then = before[thread][1] if thread in before else Used(0, 0)
            so_far = used.get(name, Used(0, 0))
            used[name] = Used(so_far.running + now.running - then.running, so_far.ready + now.ready - then.ready)
        return done, used, took


def _threads() -> dict[str, tuple[str, Used]]:
    """By its number: a thread's name, and what it has used since its start."""
    found = {}
    for folder in Path("/proc/self/task").iterdir():
        name = "main" if folder.name == str(os.getpid()) else (folder / "comm").read_text().strip()
        running, ready = (folder / "schedstat").read_text().split()[:2]
        found[folder.name] = (name, Used(int(running) / 1e9, int(ready) / 1e9))
    return found


def real(link: str) -> dict[str, Figure]:
    """Two stages, or (`alone`) two whole models."""
    model, train = ModelSpec(), TrainSpec(schedule="2bw", batches=BATCHES, microbatches=MICROBATCHES)
    is_alone = link == "alone"
    names = layer_names(model)
    with Processes(2) as processes:
        processes.run(KeepFreedMemory(), number=2)
        run = StageRun(
            job=processes.new_name(),
            model=model,
            train=train,
            optim=OPTIM,
            cuts=[names] if is_alone else cut(names, 2),
            link="grpc" if is_alone else link,
            is_alone=is_alone,
        )
        all_done = processes.run(Watched(run), number=2)
    batch_s = seconds_per_batch(all_done[-1][0].batch_ends(), num_settling=SETTLING)
    print(f"\n{link}: {train.tokens_per_batch / batch_s:.0f} tokens/s of one, {1e3 * batch_s:.1f} ms a batch")
    for rank, (done, used, _) in enumerate(all_done):
        medians = {
            kind.__name__: 1e3
            * statistics.median(end - begin for op, begin, end in done.operations if type(op) is kind)
            for kind in (Forward, Backward, Update)
        }
        print(f"  process {rank}:", *(f"{name} {ms:.1f} ms" for name, ms in medians.items()))
        for name, one in sorted(used.items(), key=lambda item: -item[1].running):
            if one.running > 1e-4 * BATCHES:
                each, waits = 1e3 * one.running / BATCHES, 1e3 * one.ready / BATCHES
                print(f"    {name:18} {each:7.2f} ms a batch, {waits:6.2f} ms ready without a core")
    return {f"{link}_batch_ms": Figure.of([1e3 * batch_s])}


def emulated(processes: Processes, row: Emulated) -> dict[str, Figure]:
    """2bw of one size."""
    all_done = processes.run(Watched(row.run(processes.new_name())), number=row.num_stages)
    reports = [done for done, _, _ in all_done]
    share = row.bound_s / seconds_per_batch(reports[-1].batch_ends(), num_settling=row.num_settling)
    late = {Forward: SLEEPS.forward_s, Backward: SLEEPS.backward_s}
    lateness = {
        kind: [end - begin - nominal for done in reports for op, begin, end in done.operations if type(op) is kind]
        for kind, nominal in late.items()
    }
    waits = {Forward: hops(reports, Forward, 1), Backward: hops(reports, Backward, -1)}
    cores = sum(one.running for _, used, _ in all_done for one in used.values()) / max(took for *_, took in all_done)
    print(
        f"p = {row.num_stages}, m = {row.num_microbatches}: {share:.4f} of the bound, {cores:.2f} cores;",
        *(
            f"{kind.__name__} {_mean_ms(lateness[kind]):.2f} ms late, hop {_mean_ms(waits[kind]):.2f} ms;"
            for kind in late
        ),
    )
    return {f"p{row.num_stages}_m{row.num_microbatches}": Figure.of([share])}


def hops(reports: Sequence[StageReport], kind: type[Forward] | type[Backward], step: int) -> list[float]:
    """From the end of a neighbour's operation to the begin of the same one here, where the stage waited for it."""
    ends = [{op: end for op, _, end in done.operations} for done in reports]
    found = []
    for stage, done in enumerate(reports):
        if not 0 <= stage - step < len(reports):
            continue
        own_end = None
        for op, begin, end in done.operations:
            if own_end is not None and type(op) is kind and ends[stage - step][op] > own_end:
                found.append(begin - ends[stage - step][op])
            own_end = end
    return found


def _mean_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.fmean(seconds) if seconds else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("real", "emulated"), help="only this half")
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8, 16], help="of emulated pipelines, m = p")
    options = parser.parse_args()
    figures: dict[str, Figure] = {}
    if options.part != "emulated":
        for link in ("grpc", "collective", "alone"):
            figures |= real(link)
    if options.part != "real":
        with Processes(max(options.stages)) as processes:
            for p in options.stages:
                figures |= emulated(processes, Emulated(p, p, "2bw"))
    return report("Where the rest of the time goes", figures)


if __name__ == "__main__":
    sys.exit(main())
