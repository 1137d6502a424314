"""Where a device's time goes: the kernels of a microbatch and of an update, by torch's profiler.

microbatch_busy: share of the time in which a kernel runs. microbatch_products, _attention: shares of the kernels' time.
update_share: an update's part of a batch; most of it is Newton–Schulz.

The JSON has the longest kernels of both. On a CPU operations take the place of kernels.
"""

import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Final

from torch.profiler import ProfilerActivity, profile

from gpu.cluster_job import stage_job
from gpu.one_stage import OneStage
from gpu.probe import Parts
from gpu.sizes import first_device, wait_for

NUM_TIMED: Final = 10
NUM_PROFILED: Final = 4
LONGEST: Final = 20
_COPIES: Final = re.compile("^Mem(cpy|set)")
ATTENTION: Final = re.compile("flash|fmha|attention", re.IGNORECASE)
PRODUCTS: Final = re.compile(r"gemm|cutlass|xmma|nvjet|::(add)?b?mm$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Kernel:
    """All runs of one kernel."""

    name: str
    calls: int
    seconds: float


class KernelTimes:
    """The kernels between `start` and `stop`, without a trace: that would be larger than what it tells."""

    def __init__(self, device: str) -> None:
        self._device = device
        is_cpu = device == "cpu"
        self._kind = "CPU" if is_cpu else "CUDA"
        self._profile = profile(activities=[ProfilerActivity.CPU if is_cpu else ProfilerActivity.CUDA])
        self.kernels: list[Kernel] = []
        self.span_s = 0.0

    def start(self) -> None:
        wait_for(self._device)
        self._profile.start()
        self.span_s = -perf_counter()

    def stop(self) -> None:
        wait_for(self._device)
        self.span_s += perf_counter()
        self._profile.stop()
        self.kernels = [
            Kernel(event.key, event.count, 1e-6 * (event.self_cpu_time_total or event.self_device_time_total))
            for event in self._profile.key_averages()
            if event.device_type.name == self._kind and not event.is_user_annotation and not _COPIES.search(event.key)
        ]

    @property
    def busy(self) -> float:
        """Return the share of the time in which a kernel ran."""
        return sum(kernel.seconds for kernel in self.kernels) / self.span_s


def share_of(pattern: re.Pattern[str], kernels: Sequence[Kernel], *, without: re.Pattern[str] | None = None) -> float:
    """Return the share of the kernels' time in those with such names."""
    found = [k.seconds for k in kernels if pattern.search(k.name) and not (without and without.search(k.name))]
    return sum(found) / sum(kernel.seconds for kernel in kernels)


def longest(kernels: Sequence[Kernel]) -> list[dict[str, object]]:
    """Return the longest kernels, and print them for people."""
    chosen = sorted(kernels, key=lambda kernel: -kernel.seconds)[:LONGEST]
    for kernel in chosen:
        print(f"{1e3 * kernel.seconds:10.3f} ms {kernel.calls:6d} × {kernel.name[:110]}", file=sys.stderr)
    return [asdict(kernel) for kernel in chosen]


def seconds_of(work: Callable[[], object], device: str, number: int = NUM_TIMED) -> float:
    """Return the median seconds of some runs of a piece of work, after one that does not count."""
    seconds = []
    work()
    for _ in range(number):
        wait_for(device)
        began = perf_counter()
        work()
        wait_for(device)
        seconds.append(perf_counter() - began)
    return statistics.median(seconds)


def measure(kind: str) -> Parts:
    """A microbatch, then an update."""
    job, device = stage_job("kernels", kind, 2 * NUM_TIMED), first_device(kind)
    stage = OneStage(job, device)
    microbatch_s = seconds_of(stage.microbatch, device)

    def whole_batch() -> None:
        stage.microbatch()
        stage.update()

    update_s = seconds_of(whole_batch, device) - microbatch_s
    batch_s = job.train.microbatches * microbatch_s + update_s
    yield {"microbatch_s": microbatch_s, "update_s": update_s, "update_share": update_s / batch_s}
    times = KernelTimes(device)
    times.start()
    for _ in range(NUM_PROFILED):
        stage.microbatch()
    times.stop()
    yield {
        "microbatch_busy": times.busy,
        "microbatch_products": share_of(PRODUCTS, times.kernels, without=ATTENTION),
        "microbatch_attention": share_of(ATTENTION, times.kernels),
        "microbatch_kernels": longest(times.kernels),
    }
    times = KernelTimes(device)
    times.start()
    stage.update()
    times.stop()
    yield {
        "update_busy": times.busy,
        "update_products": share_of(PRODUCTS, times.kernels),
        "update_kernels": longest(times.kernels),
    }
