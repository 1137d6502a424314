"""The device path: how much of a stage's time its links and host copies take from its kernels.

One stage computes on the card, as the first, the middle and the last of a pipeline. Its neighbours are processes that
compute nothing: they answer at once with frames of the right form, over real gRPC links. So the card is the slowest
stage, and what it idles more than without links is the path's own.

busy_alone: share of the time in which a kernel runs, of all layers in one process without links.
busy_PLACE_vs_alone: the same of the stage in that place, over that.
"""

import json
import queue
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rigs.pipeline_processes import GENERATION, TIMEOUT, Host, LinkInbox, Operations, Processes, StageRun

from gpu.cluster_job import stage_job
from gpu.kernels import KernelTimes
from gpu.one_stage import OneStage, settled
from gpu.probe import Parts
from gpu.sizes import first_device, worker_environment
from headway.daemon.jobs.job import JobSpec
from headway.stages.ids import Batch, MicrobatchIndex
from headway.stages.links.frame_contract import FrameContract
from headway.stages.links.link import Frame, FrameKind, Link, LinkLost
from headway.stages.schedule.operations import Op, Update

Place = Literal["first", "middle", "last"]
PLACES: tuple[Place, ...] = ("first", "middle", "last")
WARM_BATCHES = 3
PROFILED_BATCHES = 4


class ProfiledOperations(Operations):
    """Profiles the batches after the first few, and leaves the busy share in a file."""

    def __init__(self, device: str, out: Path) -> None:
        super().__init__()
        self._times = KernelTimes(device)
        self._out = out

    def ended(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:
        """See `StageObserver`."""
        super().ended(op, version=version, num_versions_live=num_versions_live, started=started, ended=ended)
        if op == Update(WARM_BATCHES - 1):
            self._times.start()
        elif op == Update(WARM_BATCHES + PROFILED_BATCHES - 1):
            self._times.stop()
            self._out.write_text(json.dumps(self._times.busy))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRun(StageRun):
    """The stage of one rank computes; the others are neighbours that answer."""

    rank: int
    out: Path

    def run(self, host: Host) -> Any:
        """The part of a process."""
        if host.rank == self.rank:
            return StageRun.run(self, host)
        host.close_links()
        Neighbour(self, host).run(is_upstream=host.rank < self.rank)
        return None

    def observer(self) -> Operations:
        """See `StageRun`."""
        return ProfiledOperations(self.device, self.out)


class Neighbour:
    """Answers every frame at once, and sends as many microbatches ahead as the stage holds."""

    def __init__(self, run: ProfiledRun, host: Host) -> None:
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


def busy_in(processes: Processes, place: Place, job: JobSpec, device: str) -> float:
    """Return the busy share of the stage in one place."""
    cuts, rank = cuts_of(place, job.layers)
    out = processes.folder / f"{place}.json"
    run = ProfiledRun(
        job=processes.new_name(), model=job.model, train=settled(job.train), optim=job.optim, cuts=cuts,
        device=device, rank=rank, out=out,
    )  # fmt: skip
    processes.run(run, number=len(cuts))
    return float(json.loads(out.read_text()))


def busy_alone(job: JobSpec, device: str) -> float:
    """Return the busy share of all layers in this process."""
    stage, times = OneStage(job, device), KernelTimes(device)
    for batch in range(WARM_BATCHES + PROFILED_BATCHES):
        if batch == WARM_BATCHES:
            times.start()
        for _ in range(job.train.microbatches):
            stage.microbatch()
        stage.update()
    times.stop()
    return times.busy


def measure(kind: str) -> Parts:
    """Without links, then all three places, one after the other."""
    job, device = stage_job("idle", kind, WARM_BATCHES + PROFILED_BATCHES + 1), first_device(kind)
    alone = busy_alone(job, device)
    yield {"busy_alone": round(alone, 5)}
    with Processes(3, environment=worker_environment(kind)) as processes:
        for place in PLACES:
            yield {f"busy_{place}_vs_alone": round(busy_in(processes, place, job, device) / alone, 5)}
