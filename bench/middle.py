"""What the links of a middle stage take of its worker: three processes in a row, frames both ways at once, over gRPC.

The middle one passes each frame on, as a stage between two others does: activations downstream, gradients upstream. The
frames of both ways count: at 1 GB/s each way, the middle one receives 2 GB/s and sends as much. Sides:

    one_loop     one loop for all links
    two_loops    a loop for the link upstream, and one for the link downstream
    offloaded    one loop, and gRPC encrypts large writes in its own threads, as a worker has it

Each side has processes of its own, of which one side's run at a time; the sides take turns.

SIDE_mb_s: of each way. SIDE_speedup: over one_loop, round by round.
SIDE_THREAD_s_per_gb: processor seconds of the middle process for each GB of each way, by thread: `loop` is the busiest
loop, `loops` are all; `core` are the threads of gRPC's C library, and `poller` is the one that wakes the loops.
SIDE_all_s_per_gb: of all threads. SIDE_loop_limit_gb_s: GB/s of each way at which the busiest loop is full.
SIDE_lock_limit_gb_s: at which the interpreter's lock is. The loops hold it in nearly all of their time, also in gRPC's
calls: on one_loop it encrypts and writes to the socket inside the call that hands a message over.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rigs.measure import Figure, progress, report
from rigs.wire_sides import GENERATION, MAX_FRAMES, TIMEOUT, WINDOW

from headway.daemon.net.certificates import CertificateAuthority
from headway.stages.ids import Batch, MicrobatchIndex, StageIndex
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, Link, LinkLost
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.loop_thread import LoopThread
from headway.stages.sockets.core_threads import with_encryption_aside
from headway.stages.sockets.tls_identity import TlsIdentity
from headway.stages.stage.allocator import keep_freed_memory, with_large_pages

HOST = "127.0.0.1"
MIDDLE = 1
SIDES: dict[str, tuple[int, dict[str, str]]] = {
    "one_loop": (1, {}),
    "two_loops": (2, {}),
    "offloaded": (1, with_encryption_aside({})),
}
"""Loops of the middle one, and what its environment has."""
FEWEST_FRAMES = 2 * WINDOW
LOOP, MAIN, POLLER, CORE = "loop", "main", "poller", "core"


class Worker:
    """One of the three. The first one dials the second, and that one the third."""

    def __init__(self, rank: int, certificates: Path, *, num_bytes: int, num_loops: int) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()  # as every worker does
        self._rank = rank
        self._num_bytes = num_bytes
        loops = [LoopThread(f"{LOOP} {number}") for number in range(num_loops)]
        about: dict[str, Any] = {"identity": TlsIdentity.read(certificates), "host": HOST, "protocol": 1}
        for loop in loops:
            loop.start()
        self._accepting, *_, self._dialling = [
            LinkEndpoint(loop=loop, incarnation=str(rank), **about) for loop in loops
        ] * 2
        self._accepting.start()
        self.port = self._accepting.port
        self._inbox: queue.SimpleQueue[Frame | LinkLost] = queue.SimpleQueue()
        self._links: dict[FrameKind, Link] = {}
        """By what is sent over them."""

    def connect(self, port: int) -> None:
        """Open its links. port: of the next one."""
        if self._rank > 0:
            self._links[FrameKind.GRADIENT] = self._accepting.accept(self._terms(self._rank - 1, 0))
        if self._rank <= MIDDLE:
            self._links[FrameKind.ACTIVATION] = self._dialling.dial(self._terms(self._rank + 1, port))

    def run(self, num_frames: int) -> dict[str, float]:
        """Move this number of frames each way; return processor seconds by thread."""
        before = thread_seconds()
        (self._pass_on if self._rank == MIDDLE else self._exchange)(num_frames)
        return {name: seconds - before.get(name, 0.0) for name, seconds in thread_seconds().items()}

    def _exchange(self, num_frames: int) -> None:
        ((kind, link),) = self._links.items()
        frame = Frame(kind, GENERATION, Batch(0), MicrobatchIndex(0), (torch.ones(self._num_bytes // 4),))
        for _ in range(min(WINDOW, num_frames)):
            link.send(frame)
        for number in range(num_frames):
            self._take()
            if number + WINDOW < num_frames:
                link.send(frame)

    def _pass_on(self, num_frames: int) -> None:
        for _ in range(2 * num_frames):
            frame = self._take()
            self._links[frame.kind].send(frame)

    def _take(self) -> Frame:
        item = self._inbox.get(timeout=TIMEOUT.total_seconds())
        if isinstance(item, LinkLost):
            raise SystemExit(item.reason)
        return item

    def _terms(self, peer: int, port: int) -> LinkTerms:
        form = (TensorForm(torch.float32, (self._num_bytes // 4,)),)
        return LinkTerms(
            job="middle",
            generation=GENERATION,
            stage=StageIndex(self._rank),
            worker=self._rank,
            peer_stage=StageIndex(peer),
            peer_worker=peer,
            peer_incarnation=str(peer),
            peer_node="node",
            peer_name=f"stage {peer}",
            peer_address=f"{HOST}:{port}",
            inbox=self._inbox,
            contract=FrameContract({FrameKind.ACTIVATION: form, FrameKind.GRADIENT: form}, MAX_FRAMES),
            first_contact=TIMEOUT,
            silence=TIMEOUT,
        )


def thread_seconds() -> dict[str, float]:
    """Return the processor seconds of this process's threads, by what they are."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        name = names.get(int(task.name), CORE)
        name = MAIN if name == "MainThread" else POLLER if "_poll_wrapper" in name else name
        seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        found[name] = found.get(name, 0.0) + seconds
    return found


def serve(rank: int, certificates: Path, *, num_bytes: int, num_loops: int) -> None:
    """One of the three: a line of standard input for each pass."""
    worker = Worker(rank, certificates, num_bytes=num_bytes, num_loops=num_loops if rank == MIDDLE else 1)
    print(worker.port, flush=True)
    worker.connect(int(sys.stdin.readline()))
    for line in sys.stdin:
        print(json.dumps(worker.run(int(line))), flush=True)
    os._exit(0)


class Row:
    """All three of one side."""

    def __init__(self, side: str, certificates: Path, *, frame_mib: int) -> None:
        num_loops, settings = SIDES[side]
        self._frame_bytes = frame_mib << 20
        command = [sys.executable, __file__, "--frame-mib", str(frame_mib), "--loops", str(num_loops), "--serve"]
        environment = {**os.environ, **with_large_pages(os.environ), **settings}
        self.workers = [
            subprocess.Popen(
                [*command, str(rank), str(certificates)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]

    def connect(self) -> None:
        """Open the links, once all listen."""
        ports = [int(self._hear(worker)) for worker in self.workers]
        for worker, port in zip(self.workers, [*ports[1:], 0], strict=True):
            self._say(worker, port)

    def sample(self, num_frames: int) -> "Sample":
        """One pass."""
        began = time.perf_counter()
        for worker in self.workers:
            self._say(worker, num_frames)
        heard = [json.loads(self._hear(worker)) for worker in self.workers]
        gb = num_frames * self._frame_bytes / 1e9
        return Sample(gb / (time.perf_counter() - began), {name: s / gb for name, s in heard[MIDDLE].items()})

    def _say(self, worker: "subprocess.Popen[str]", what: int) -> None:
        assert worker.stdin is not None
        worker.stdin.write(f"{what}\n")
        worker.stdin.flush()

    def _hear(self, worker: "subprocess.Popen[str]") -> str:
        assert worker.stdout is not None
        while "[info" in (line := worker.stdout.readline()):
            pass
        return line


@dataclass(frozen=True, slots=True)
class Sample:
    """One pass: GB/s of each way, and the middle one's processor seconds for each GB, by thread."""

    gb_s: float
    seconds: dict[str, float]


def summary(side: str, samples: list[Sample]) -> dict[str, object]:
    """The medians of one side."""
    by_thread = {name: statistics.median(s.seconds.get(name, 0.0) for s in samples) for name in samples[-1].seconds}
    loops = sorted(seconds for name, seconds in by_thread.items() if name.startswith(LOOP))
    figures = {
        "mb_s": statistics.median(sample.gb_s for sample in samples) * 1e3,
        "loop_s_per_gb": loops[-1],
        "loops_s_per_gb": sum(loops),
        **{f"{name}_s_per_gb": by_thread.get(name, 0.0) for name in (MAIN, POLLER, CORE)},
        "all_s_per_gb": statistics.median(sum(sample.seconds.values()) for sample in samples),
        "loop_limit_gb_s": 1 / loops[-1],
        "lock_limit_gb_s": 1 / (sum(loops) + by_thread[MAIN]),
    }
    return {f"{side}_{name}": round(value, 3) for name, value in figures.items()}


def main() -> int:
    """Measure all sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--frame-mib", type=int, default=4)
    parser.add_argument("--pass-mib", type=int, default=256, help="each way")
    parser.add_argument("--loops", type=int, default=1, help="of the middle process that --serve makes this one")
    parser.add_argument("--serve", nargs=2)
    options = parser.parse_args()
    if options.serve:
        rank, certificates = options.serve
        serve(int(rank), Path(certificates), num_bytes=options.frame_mib << 20, num_loops=options.loops)
    num_frames = max(FEWEST_FRAMES, options.pass_mib // options.frame_mib)
    with tempfile.TemporaryDirectory() as folder:
        certificates = CertificateAuthority.create(Path(folder) / "authority").issue("node")
        rows = {side: Row(side, certificates, frame_mib=options.frame_mib) for side in SIDES}
        try:
            for row in rows.values():
                row.connect()
                row.sample(num_frames)  # its memory and buffers grow to what they will be
            samples: dict[str, list[Sample]] = {side: [] for side in SIDES}
            for number in range(options.rounds):
                for side in list(SIDES)[:: 1 - 2 * (number % 2)]:
                    samples[side].append(rows[side].sample(num_frames))
                progress(f"round {number}: {', '.join(f'{side} {samples[side][-1].gb_s:.3f}' for side in SIDES)} GB/s")
        finally:
            for row in rows.values():
                for worker in row.workers:
                    worker.kill()
    extra = {name: value for side in SIDES for name, value in summary(side, samples[side]).items()}
    for name, value in extra.items():
        print(f"{name:30} {value}")
    one, *others = SIDES
    figures = {
        f"{side}_speedup": Figure.of([s.gb_s / o.gb_s for s, o in zip(samples[side], samples[one], strict=True)])
        for side in others
    }
    return report("The links of a middle stage", figures, extra=extra)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
