"""What each kind of link carries: gRPC streams with TLS beside gloo process groups, between two processes here.

Frames of one size go both ways at the same time, as activations and gradients do, and are taken as they arrive. Per
size: MB/s each way of both kinds, and how many times the collective link's is the gRPC link's. Pairs in turns.

collective_speedup_SIZE: MB/s of the collective link over those of the gRPC link.
"""

import argparse
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from measure import Figure, alternate, progress, report

from headway.daemon.certificates import CertificateAuthority
from headway.stages.collective_endpoint import METHOD, CollectiveEndpoint, CollectiveTerms
from headway.stages.frame_contract import DOWNSTREAM_KINDS, UPSTREAM_KINDS, FrameContract, TensorForm
from headway.stages.ids import Batch, Generation, Microbatch, StageIndex
from headway.stages.link import Frame, FrameKind, Link, LinkLost
from headway.stages.link_endpoint import LinkEndpoint
from headway.stages.loop_thread import LoopThread
from headway.stages.tls_identity import TlsIdentity

SIZES = {"16KiB": (1 << 14, 400), "256KiB": (1 << 18, 200), "1MiB": (1 << 20, 100), "16MiB": (1 << 24, 16)}
"""By name: bytes of a frame, and frames each way."""
WINDOW = 16
"""Frames under way each way at most, as many as a stage's depth might be."""
TIMEOUT = timedelta(seconds=60)
GENERATION = Generation(1)


class Side:
    """One of the two processes; rank 0 dials."""

    def __init__(self, rank: int, certificates: Path) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._loop = LoopThread()
        self._loop.start()
        identity, incarnation = TlsIdentity.read(certificates), "ab"[rank]
        self._grpc = LinkEndpoint(
            loop=self._loop, identity=identity, host="127.0.0.1", incarnation=incarnation, protocol=1
        )
        self._collective = CollectiveEndpoint(
            loop=self._loop, identity=identity, host="127.0.0.1", incarnation=incarnation, protocol=1, on_stuck=print
        )
        self._grpc.add_method(METHOD, self._collective.answer)
        self._grpc.start()
        self.port = self._grpc.port
        self.peer_port = 0

    def seconds(self, job: str, *, is_collective: bool, num_bytes: int, num_frames: int) -> float:
        """Exchange so many frames over a link of its own; from the first to the last."""
        inbox: queue.SimpleQueue[Frame | LinkLost] = queue.SimpleQueue()
        form = (TensorForm(torch.float32, (num_bytes // 4,)),)
        contract = FrameContract({FrameKind.ACTIVATION: form, FrameKind.GRADIENT: form}, 3 * WINDOW)
        link = (self._open_collective if is_collective else self._open_grpc)(job, inbox, contract)
        kind = FrameKind.GRADIENT if self._rank else FrameKind.ACTIVATION
        values = torch.ones(num_bytes // 4)

        def send(number: int) -> None:
            link.send(Frame(kind, GENERATION, Batch(number), Microbatch(0), (values,)))

        def take() -> None:
            item = inbox.get(timeout=TIMEOUT.total_seconds())
            if isinstance(item, LinkLost):
                raise RuntimeError(f"{item.peer}: {item.reason}")

        send(0)  # both are there
        take()
        began = time.perf_counter()
        for number in range(min(WINDOW, num_frames)):
            send(number)
        for number in range(WINDOW, num_frames + WINDOW):
            take()
            if number < num_frames:
                send(number)
        seconds = time.perf_counter() - began
        if self._rank:
            inbox.get(timeout=TIMEOUT.total_seconds())  # the other side has everything too, and closes
        link.close()
        return seconds

    def _open_grpc(self, job: str, inbox: "queue.SimpleQueue[Frame | LinkLost]", contract: FrameContract) -> Link:
        if self._rank:
            return self._grpc.accept(
                job,
                GENERATION,
                stage=StageIndex(1),
                peer_incarnation="a",
                inbox=inbox,
                contract=contract,
                first_contact=TIMEOUT,
                resume_timeout=TIMEOUT,
            )
        return self._grpc.dial(
            f"127.0.0.1:{self.peer_port}",
            job,
            GENERATION,
            stage=StageIndex(0),
            peer_incarnation="b",
            inbox=inbox,
            contract=contract,
            first_contact=TIMEOUT,
            resume_timeout=TIMEOUT,
        )

    def _open_collective(self, job: str, inbox: "queue.SimpleQueue[Frame | LinkLost]", contract: FrameContract) -> Link:
        peer = 1 - self._rank
        terms = CollectiveTerms(
            job=job,
            generation=GENERATION,
            stage=StageIndex(self._rank),
            worker=self._rank,
            peer_stage=StageIndex(peer),
            peer_worker=peer,
            peer_incarnation="ab"[peer],
            peer_name=f"stage {peer}",
            peer_address=f"127.0.0.1:{self.peer_port}",
            inbox=inbox,
            contract=contract,
            receives=DOWNSTREAM_KINDS if self._rank else UPSTREAM_KINDS,
            device=torch.device("cpu"),
            first_contact=TIMEOUT,
            silence=TIMEOUT,
        )
        return self._collective.accept(terms) if self._rank else self._collective.dial(terms)


def serve(certificates: Path) -> None:
    """The other process: a line of standard input for each exchange."""
    side = Side(1, certificates)
    print(side.port, flush=True)
    for line in sys.stdin:
        job, is_collective, num_bytes, num_frames = line.split()
        side.seconds(job, is_collective=is_collective == "1", num_bytes=int(num_bytes), num_frames=int(num_frames))
    os._exit(0)


def main() -> int:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--serve", type=Path)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    figures: dict[str, Figure] = {}
    speeds: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        certificates = CertificateAuthority.create(Path(folder) / "authority").issue("node")
        side = Side(0, certificates)
        with subprocess.Popen(
            [sys.executable, __file__, "--serve", str(certificates)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            side.peer_port = int(other.stdout.readline())
            for name, (num_bytes, num_frames) in SIZES.items():
                numbers = iter(range(1000))

                def speed(is_collective: bool, name: str = name, size: int = num_bytes, num: int = num_frames) -> float:
                    job = f"{name}-{next(numbers)}"  # noqa: B023
                    other.stdin.write(f"{job} {int(is_collective)} {size} {num}\n")  # type: ignore[union-attr]
                    other.stdin.flush()  # type: ignore[union-attr]
                    seconds = side.seconds(job, is_collective=is_collective, num_bytes=size, num_frames=num)
                    return size * num / seconds / 1e6

                progress(name)
                pairs = alternate(options.pairs, lambda: speed(True), lambda: speed(False))
                figures[f"collective_speedup_{name}"] = Figure.of([ours / theirs for ours, theirs in pairs])
                for kind, values in zip(("collective", "grpc"), zip(*pairs, strict=True), strict=True):
                    speeds[f"{kind}_mb_s_{name}"] = round(statistics.median(values), 1)
            other.kill()
    status = report("Links: gloo process groups over gRPC streams", figures, extra=speeds)
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
