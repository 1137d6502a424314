"""Links of one worker with many others at once, as replicas of a stage have them, and links beside computing.

pairs_N_gb_s: N workers exchange frames both ways, every two at once: 10⁹ bytes that each one takes a second.
compute_slowdown: median time of a product while frames go both ways, over that without; of the worse of two workers.

With cards the links are NCCL's, and each worker has a card of its own. On a CPU they are plain streams.
"""

import queue
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch
from rigs.pipeline_processes import Host, LinkInbox, Processes
from torch import Tensor

from gpu.links import frame
from gpu.probe import Parts, absent
from gpu.sizes import num_cards, wait_for, worker_environment
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import FrameKind, Link, LinkLost

GROUPS: Final = (2, 4, 8)
FRAME_BYTES: Final = {"cuda": 1 << 26, "cpu": 1 << 18}
NUM_FRAMES: Final = 16
NUM_BESIDE: Final = {"cuda": 2000, "cpu": 100}
"""Frames each way beside products: two seconds of them on the quickest links, ten on slow ones."""
WINDOW: Final = 4
"""Frames under way each way of a link."""
SIDE: Final = {"cuda": 4096, "cpu": 256}
NUM_PRODUCTS: Final = 200
NUM_IN_A_ROW: Final = 20
WITHIN_S: Final = 60.0
"""Time for a frame: cards with so many transfers at once could wait for each other for ever."""

Ends = Sequence[tuple[FrameKind, Link, LinkInbox]]
"""Links with the kind of frames that this process sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsRun:
    """Every process has a link with each other one, and exchanges frames with all of them."""

    job: str
    size: int
    kind: str
    is_beside: bool = False

    def run(self, host: Host) -> float:
        """Return the seconds of an exchange with all others; is_beside: the slow-down of a product."""
        host.close_links()
        device = "cpu" if self.kind == "cpu" else f"cuda:{host.rank}"
        if self.kind == "cuda":
            torch.cuda.set_device(device)
        values = torch.ones(FRAME_BYTES[self.kind] // 4, device=device)
        wait_for(device)
        ends = [self._open(host, peer, device) for peer in range(self.size) if peer != host.rank]
        exchange(ends, values, NUM_FRAMES)  # forms the links
        if self.is_beside:
            return slowdown(lambda: exchange(ends, values, NUM_BESIDE[self.kind]), device, SIDE[self.kind])
        began = perf_counter()
        exchange(ends, values, NUM_FRAMES)
        wait_for(device)
        return perf_counter() - began

    def _open(self, host: Host, peer: int, device: str) -> tuple[FrameKind, Link, LinkInbox]:
        inbox: LinkInbox = LinkInbox()
        form = (TensorForm(torch.float32, (FRAME_BYTES[self.kind] // 4,)),)
        contract = FrameContract({FrameKind.ACTIVATION: form, FrameKind.GRADIENT: form}, 3 * WINDOW)
        link = host.open_link(self.job, host.rank, peer, inbox, contract, "collective", device=device)
        return FrameKind.ACTIVATION if host.rank < peer else FrameKind.GRADIENT, link, inbox


def exchange(ends: Ends, values: Tensor, number: int) -> None:
    """Send a number of frames to each other process, and take as many from each."""
    for index in range(-WINDOW, number):
        for kind, link, inbox in ends:
            if index >= 0:
                try:
                    item = inbox.get(timeout=WITHIN_S)
                except queue.Empty:
                    raise TimeoutError(f"{link.peer}: no frame {index} within {WITHIN_S:g} s") from None
                if isinstance(item, LinkLost):
                    raise RuntimeError(f"{item.peer}: {item.reason}")
            if index + WINDOW < number:
                link.send(frame(kind, values))


def slowdown(traffic: Callable[[], None], device: str, side: int) -> float:
    """Return the median time of a product beside traffic over that without."""
    one = torch.randn((side, side), device=device).to(torch.float32 if device == "cpu" else torch.bfloat16)
    product = torch.empty_like(one)

    def product_s() -> float:
        if device == "cpu":
            began = perf_counter()
            torch.mm(one, one, out=product)
            return perf_counter() - began
        # By the stream's own clock: this thread may wait for those of the links, the card does not.
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(NUM_IN_A_ROW):
            torch.mm(one, one, out=product)
        end.record()
        end.synchronize()
        return 1e-3 * float(begin.elapsed_time(end)) / NUM_IN_A_ROW

    alone = [product_s() for _ in range(2 * NUM_PRODUCTS)][NUM_PRODUCTS:]
    beside: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(traffic)
        while not going.done() or not beside:
            beside.append(product_s())
        going.result()
    return statistics.median(beside) / statistics.median(alone)


def measure(kind: str) -> Parts:
    """Two, four and eight workers, then two that compute meanwhile."""
    most = num_cards(kind) if kind == "cuda" else max(GROUPS)
    with Processes(min(most, max(GROUPS)), environment=worker_environment(kind) or None) as processes:

        def of_each(size: int, *, is_beside: bool = False) -> list[float]:
            run = PairsRun(job=processes.new_name(), size=size, kind=kind, is_beside=is_beside)
            return processes.run(run, number=size)

        if most < 2:
            yield absent("needs 2 cards; here: 1", "compute_slowdown")
        else:
            yield {"compute_slowdown": round(max(of_each(2, is_beside=True)), 4)}
        for size in GROUPS:
            if size > most:
                yield absent(f"needs {size} cards; here: {most}", f"pairs_{size}_gb_s")
                continue
            taken = (size - 1) * NUM_FRAMES * FRAME_BYTES[kind]
            yield {f"pairs_{size}_gb_s": round(taken / max(of_each(size)) / 1e9, 3)}
