"""The device path: how long a link or a host copy keeps a stage's compute stream idle, in a trace of torch's profiler.

One stage computes on the card, as the first, the middle and the last of a pipeline. Its neighbours are processes that
compute nothing: they answer at once with frames of the right form, over real gRPC links. So the card is the slowest
stage, and every gap is the path's own.

idle_share_PLACE: time of gaps above 50 µs that a wait for a frame or a copy overlaps, over the whole time.
launch_share_PLACE: the same of all other gaps. longest_gap_us_PLACE: the longest of the first kind.
"""

import argparse
import json
import queue
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rigs.pipeline_processes import GENERATION, TIMEOUT, Host, LinkInbox, Operations, Processes, StageRun
from torch.profiler import ProfilerActivity, profile, record_function

from gpu.sizes import first_device, stage_model, stage_train
from gpu.stream_gaps import WAIT, Gaps, gaps_in
from headway.optim.spec import OptimSpec
from headway.stages.ids import Batch, MicrobatchIndex
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Frame, FrameKind, Link, LinkLost
from headway.stages.schedule.operations import Op, Update
from headway.stages.spec import ModelSpec, TrainSpec, layer_names

Place = Literal["first", "middle", "last"]
PLACES: tuple[Place, ...] = ("first", "middle", "last")
WARM_BATCHES = 3
PROFILED_BATCHES = 4


class TracedOperations(Operations):
    """Annotates the waits, and profiles the batches after the first few."""

    def __init__(self, device: str, trace: Path) -> None:
        super().__init__()
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device != "cpu" else [])
        self._profile = profile(activities=activities)
        self._trace = trace
        self._wait: Any = None

    def waits(self, what: str, now: float) -> None:  # noqa: ARG002
        """See `StageObserver`."""
        self._wait_ends()
        self._wait = record_function(WAIT)
        self._wait.__enter__()

    def begins(self, op: Op, now: float) -> None:  # noqa: ARG002
        """See `StageObserver`."""
        self._wait_ends()

    def ended(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:
        """See `StageObserver`."""
        super().ended(op, version=version, num_versions_live=num_versions_live, started=started, ended=ended)
        if op == Update(WARM_BATCHES - 1):
            self._profile.start()
        elif op == Update(WARM_BATCHES + PROFILED_BATCHES - 1):
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._trace))

    def _wait_ends(self) -> None:
        if self._wait is not None:
            self._wait.__exit__(None, None, None)
            self._wait = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRun(StageRun):
    """The stage of one rank computes; the others are neighbours that answer."""

    rank: int
    trace: Path

    def run(self, host: Host) -> Any:
        """The part of a process."""
        if host.rank == self.rank:
            return StageRun.run(self, host)
        host.close_links()
        Neighbour(self, host).run(is_upstream=host.rank < self.rank)
        return None

    def observer(self) -> Operations:
        """See `StageRun`."""
        return TracedOperations(self.device, self.trace)


class Neighbour:
    """Answers every frame at once, and sends as many microbatches ahead as the stage holds."""

    def __init__(self, run: TracedRun, host: Host) -> None:
        self._run = run
        self._inbox: LinkInbox = LinkInbox()
        contract = FrameContract.of(run.model, run.train)
        self._tensors = {
            kind: tuple(torch.zeros(form.shape, dtype=form.dtype) for form in contract.forms[kind])
            for kind in (FrameKind.ACTIVATION, FrameKind.GRADIENT, FrameKind.NORM_TOTAL)
        }
        num_layers = sum(map(len, run.cuts[host.rank :]))
        self._tensors[FrameKind.NORM_SQUARES] = (torch.zeros(num_layers, dtype=torch.float64),)
        self._num_totals = 0
        self._link: Link = host.open_link(run.job, host.rank, run.rank, self._inbox, contract, run.link)

    def run(self, *, is_upstream: bool) -> None:
        """Send or answer all microbatches of the run."""
        train = self._run.train
        keys = [(batch, i) for batch in range(train.batches) for i in range(train.microbatches)]
        ahead = self._run.depth(self._run.rank)
        for number, key in enumerate(keys):
            if is_upstream:
                if number >= ahead:
                    self._take()
                self._send(FrameKind.ACTIVATION, *key)
            else:
                arrived = self._take()
                self._send(FrameKind.GRADIENT, arrived.batch, arrived.microbatch)
                if arrived.microbatch == train.microbatches - 1:
                    self._send(FrameKind.NORM_SQUARES, arrived.batch, 0)
        for _ in range(min(ahead, len(keys)) if is_upstream else 0):
            self._take()
        while is_upstream and self._num_totals < train.batches:
            self._next()

    def _send(self, kind: FrameKind, batch: int, microbatch: int) -> None:
        self._link.send(Frame(kind, GENERATION, Batch(batch), MicrobatchIndex(microbatch), self._tensors[kind]))

    def _take(self) -> Frame:
        """Return the next activation or gradient."""
        while (frame := self._next()).kind not in (FrameKind.ACTIVATION, FrameKind.GRADIENT):
            pass
        return frame

    def _next(self) -> Frame:
        """Return the next frame. Squares of a batch's gradient are answered by their total."""
        try:
            item = self._inbox.get(timeout=TIMEOUT.total_seconds())
        except queue.Empty:
            raise RuntimeError(f"{self._link.peer}: no frame within {TIMEOUT}") from None
        if isinstance(item, LinkLost):
            raise RuntimeError(f"{item.peer}: {item.reason}")
        if item.kind is FrameKind.NORM_SQUARES:
            self._send(FrameKind.NORM_TOTAL, item.batch, 0)
            self._num_totals += 1
        return item


def cuts_of(place: Place, names: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], int]:
    """Return the stages' layers, and the rank that has all the blocks."""
    embed, *blocks, head = names
    match place:
        case "first":
            return ((embed, *blocks), (head,)), 0
        case "middle":
            return ((embed,), tuple(blocks), (head,)), 1
        case "last":
            return ((embed,), (*blocks, head)), 1


def trace_of(processes: Processes, place: Place, model: ModelSpec, train: TrainSpec, device: str) -> Gaps:
    """Run the stage in one place, and read its trace."""
    cuts, rank = cuts_of(place, tuple(layer_names(model)))
    trace = processes.folder / f"{place}.json"
    run = TracedRun(
        job=processes.new_name(), model=model, train=train, optim=OptimSpec(), cuts=cuts,
        device=device, rank=rank, trace=trace,
    )  # fmt: skip
    processes.run(run, number=len(cuts))
    return gaps_in(json.loads(trace.read_text()))


def measure(device: str) -> dict[str, object]:
    """All three places, one after the other."""
    model, train = stage_model(device), stage_train(device, batches=WARM_BATCHES + PROFILED_BATCHES + 1)
    figures: dict[str, object] = {}
    with Processes(3, environment={}) as processes:
        for place in PLACES:
            gaps = trace_of(processes, place, model, train, device)
            figures[f"idle_share_{place}"] = round(gaps.idle_share, 5)
            figures[f"launch_share_{place}"] = round(gaps.launch_share, 5)
            figures[f"longest_gap_us_{place}"] = round(gaps.longest_us, 1)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    print(json.dumps(measure(first_device(options.device))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
