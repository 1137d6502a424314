"""A worker at one end of a link between two cards: `python -m tests.gpu.nccl_peer RANK DEVICE FOLDER`.

It exchanges large frames with the other end without a pause, and says in a line what happens. When the link is lost it
computes on its card, to show that the process and the card live on. DEVICE `cpu` has gloo in the place of NCCL. The
folder has the certificates of both, and their sockets.
"""

import os
import queue
import sys
import threading
from datetime import timedelta
from pathlib import Path

import structlog
import torch

from headway.stages.device.opening import open_device
from headway.stages.ids import Batch, Generation, MicrobatchIndex, StageIndex
from headway.stages.links.attachment import FORM_TIMEOUT, Attach
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.nccl import NcclAttach, outlive_peers
from headway.stages.links.streams import LocalPlace
from headway.stages.links.worker_link import WorkerLink
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.rigs.gloo_attach import GlooAttach

HOST = "127.0.0.1"
GENERATION = Generation(1)
NUM_VALUES = {"cuda": 1 << 26, "cpu": 1 << 20}
WINDOW = 4
"""Frames under way each way, of 256 MiB each on a card."""
SILENCE = timedelta(seconds=8)


def say(text: str) -> None:
    """To whoever started us."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def terms(rank: int, inbox: "queue.SimpleQueue[Frame | LinkLost]", form: TensorForm, attach: Attach) -> LinkTerms:
    """Return the terms of this end: rank 0 is stage 0, which dials."""
    return LinkTerms(
        job="cards",
        generation=GENERATION,
        stage=StageIndex(rank),
        worker=rank,
        peer_stage=StageIndex(1 - rank),
        peer_worker=1 - rank,
        peer_incarnation=f"peer-{1 - rank}",
        peer_node="node",
        peer_name=f"stage {1 - rank}",
        peer_address=f"{HOST}:1",
        inbox=inbox,
        contract=FrameContract({FrameKind.ACTIVATION: (form,), FrameKind.GRADIENT: (form,)}, 3 * WINDOW),
        first_contact=3 * FORM_TIMEOUT,
        silence=SILENCE,
        attach=attach,
    )


def end_stuck(peer: str) -> None:
    """React as a worker does."""
    say(f"stuck: {peer}")
    os._exit(76)


def main(rank: int, name: str, folder: Path) -> None:
    """Run until the link is lost."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # the parent reads the other
    outlive_peers(os.environ)
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    loop = LoopThread("peer", on_failure=lambda error: say(f"failed: {error}"))
    loop.start()
    inbox: queue.SimpleQueue[Frame | LinkLost] = queue.SimpleQueue()
    seam = open_device(device, on_failure=lambda error: say(f"failed: {error}"))
    endpoint = LinkEndpoint(
        loop=loop,
        identity=TlsIdentity.read(folder / "certificates"),
        host=HOST,
        incarnation=f"peer-{rank}",
        protocol=1,
        local=LocalPlace("node", folder),
    )
    endpoint.start()
    num_values = NUM_VALUES[device.type]
    attach = NcclAttach(device, end_stuck) if device.type == "cuda" else GlooAttach()
    about = terms(rank, inbox, TensorForm(torch.float32, (num_values,)), attach)
    stream_link = endpoint.accept(about) if rank else endpoint.dial(about)
    link = WorkerLink(stream_link, seam, to_device=True)
    kind = FrameKind.GRADIENT if rank else FrameKind.ACTIVATION

    def send(number: int) -> None:
        values = torch.full((num_values,), float(number), device=device)
        link.send(Frame(kind, GENERATION, Batch(number), MicrobatchIndex(0), (values,)))

    for number in range(WINDOW):
        send(number)
    num_received = 0
    while isinstance(item := inbox.get(), Frame):
        assert bool((item.tensors[0] == item.batch).all()), "wrong values"
        send(num_received + WINDOW)
        num_received += 1
        if num_received == 2 * WINDOW:
            say("exchanging")
    say(f"lost: {item.reason}")
    say(f"alive: {int(torch.ones(1000, device=device).sum())}")
    for thread in threading.enumerate():  # those of the attachment: the parent has a deadline
        if thread.name.startswith(("headway-send", "headway-receive", "headway-abort")):
            thread.join()
    say("ended")
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
