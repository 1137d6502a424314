"""Links between two processes with tensors on cards: from the sender's card to the receiver's, copies included.

A gRPC link takes what the device has copied to the host, and its frames are copied in on the other side, as a stage
does both. A collective link sends from card to card (NCCL), which needs a card for each process. On a CPU both carry
host tensors.

LINK_mb_s_SIZE: frames of one size go one way, and the clock stops at the answer to the last one.
grpc_device_vs_host: the gRPC link's MB/s at 16 MiB with tensors on cards, over tensors of the host.
"""

import queue
import statistics
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from rigs.pipeline_processes import GENERATION, TIMEOUT, Host, LinkInbox, Processes
from torch import Tensor

from gpu.probe import Parts, absent
from gpu.sizes import num_cards, worker_environment
from headway.stages.device.device import HostCopy, StageDevice
from headway.stages.device.opening import open_device
from headway.stages.ids import Batch, MicrobatchIndex
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, Link, LinkLost

SIZES = {"1MiB": 1 << 20, "16MiB": 1 << 24}
PASS_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
NUM_PASSES = 5
MOST_FRAMES = 1 << 10
COPY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRun:
    """Passes of frames of one size over one link. Rank 0 sends."""

    job: str
    link: str
    devices: tuple[str, str]
    num_bytes: int
    num_frames: int

    def run(self, host: Host) -> list[float]:
        """Return the seconds of each pass."""
        host.close_links()
        name = self.devices[host.rank]
        if name.startswith("cuda"):
            torch.cuda.set_device(name)
        failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        device = open_device(torch.device(name), on_failure=failures.put)
        inbox: LinkInbox = LinkInbox()
        form = (TensorForm(torch.float32, (self.num_bytes // 4,)),)
        forms = {FrameKind.ACTIVATION: form, FrameKind.NORM_SQUARES: (TensorForm(torch.float64, (1,)),)}
        contract = FrameContract(forms, MOST_FRAMES)
        link = host.open_link(self.job, host.rank, 1 - host.rank, inbox, contract, self.link, device=name)
        end = _End(link, inbox, device, values=torch.ones(self.num_bytes // 4, device=name), is_direct=self._is_direct)
        try:
            one_pass = end.take if host.rank else end.send
            return [_seconds(lambda: one_pass(self.num_frames)) for _ in range(NUM_PASSES + 1)][1:]
        finally:
            device.close()
            if not failures.empty():
                raise failures.get()

    @property
    def _is_direct(self) -> bool:
        return self.link == "collective"


class _End:
    """One end of the link."""

    def __init__(self, link: Link, inbox: LinkInbox, device: StageDevice, *, values: Tensor, is_direct: bool) -> None:
        self._link = link
        self._inbox = inbox
        self._device = device
        self._values = values
        self._is_direct = is_direct

    def send(self, num_frames: int) -> None:
        """Send the frames, and wait for the answer."""
        for _ in range(num_frames):
            if self._is_direct:
                self._link.send(frame(FrameKind.ACTIVATION, self._values))
                continue
            copied = self._device.copy_out((self._values,))
            self._device.after(copied, partial(self._send_copy, copied))
        self._next()

    def take(self, num_frames: int) -> None:
        """Take the frames onto the device, wait for the last copy, and answer."""
        for _ in range(num_frames):
            self._device.copy_in(self._next().tensors).take()
        self._device.mark().wait(COPY_TIMEOUT_S)
        self._link.send(frame(FrameKind.NORM_SQUARES, torch.ones(1, dtype=torch.float64)))

    def _send_copy(self, copied: HostCopy) -> None:
        self._link.send(frame(FrameKind.ACTIVATION, *copied.wait(COPY_TIMEOUT_S)))

    def _next(self) -> Frame:
        item = self._inbox.get(timeout=TIMEOUT.total_seconds())
        if isinstance(item, LinkLost):
            raise RuntimeError(f"{item.peer}: {item.reason}")
        return item


def frame(kind: FrameKind, *tensors: Tensor) -> Frame:
    """Return a frame of these tensors."""
    return Frame(kind, GENERATION, Batch(0), MicrobatchIndex(0), tensors)


def _seconds(work: Any) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


def mb_s(processes: Processes, link: str, devices: tuple[str, str], num_bytes: int, pass_bytes: int) -> float:
    """Return the median MB/s of the passes, by the sender's clock."""
    num_frames = min(max(4, pass_bytes // num_bytes), MOST_FRAMES)
    run = LinkRun(
        job=processes.new_name(), link=link, devices=devices, num_bytes=num_bytes, num_frames=num_frames
    )  # fmt: skip
    seconds: list[float] = processes.run(run, number=2)[0]
    return round(num_bytes * num_frames / statistics.median(seconds) / 1e6, 1)


def measure(device: str) -> Parts:
    """All links and sizes."""
    cards = num_cards(device)
    devices = ("cpu", "cpu") if device == "cpu" else ("cuda:0", "cuda:1" if cards > 1 else "cuda:0")
    pass_bytes = PASS_BYTES[device]
    with Processes(2, environment=worker_environment(device)) as processes:
        for size, num_bytes in SIZES.items():
            on_device = mb_s(processes, "grpc", devices, num_bytes, pass_bytes)
            yield {f"grpc_mb_s_{size}": on_device}
        host = mb_s(processes, "grpc", ("cpu", "cpu"), num_bytes, pass_bytes)
        yield {"grpc_host_mb_s": host, "grpc_device_vs_host": round(on_device / host, 4)}
        for size, num_bytes in SIZES.items():
            key = f"collective_mb_s_{size}"
            if cards == 1:
                yield absent("needs 2 cards; here: 1", key)
            else:
                yield {key: mb_s(processes, "collective", devices, num_bytes, pass_bytes)}
