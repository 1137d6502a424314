"""A worker at one end of a link between two cards: `python -m tests.gpu.nccl_peer RANK DEVICE STORE`.

It exchanges large frames with the other end without a pause, and says in a line what happens. When the link is lost it
computes on its card, to show that the process and the card live on.
"""

import os
import queue
import sys
from datetime import timedelta
from functools import partial

import structlog
import torch
from torch._C._distributed_c10d import FileStore

from headway.stages.device.opening import open_device
from headway.stages.ids import Batch, Generation, MicrobatchIndex, StageIndex
from headway.stages.links.collective.group import GroupOfTwo
from headway.stages.links.collective.group_guard import Rendezvous
from headway.stages.links.collective.link import CollectiveLink
from headway.stages.links.collective.nccl_direction import nccl_directions
from headway.stages.links.collective.nccl_settings import FORM_TIMEOUT, outlive_peers
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.loop_thread import LoopThread

HOST = "127.0.0.1"
GENERATION = Generation(1)
NUM_VALUES = 1 << 26
WINDOW = 4
"""Frames under way each way, of 256 MiB each."""


def say(text: str) -> None:
    """To whoever started us."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def terms(rank: int, inbox: "queue.SimpleQueue[Frame | LinkLost]", device: torch.device) -> LinkTerms:
    """Return the terms of this end: stage 0 dials with rank 1."""
    stage, peer = 1 - rank, rank
    form = (TensorForm(torch.float32, (NUM_VALUES,)),)
    return LinkTerms(
        job="cards",
        generation=GENERATION,
        stage=StageIndex(stage),
        worker=stage,
        peer_stage=StageIndex(peer),
        peer_worker=peer,
        peer_incarnation="",
        peer_node="node",
        peer_name=f"stage {peer}",
        peer_address=f"{HOST}:1",
        inbox=inbox,
        contract=FrameContract({FrameKind.ACTIVATION: form, FrameKind.GRADIENT: form}, 3 * WINDOW),
        first_contact=FORM_TIMEOUT,
        silence=timedelta(minutes=5),
        device=device,
    )


def end_stuck(peer: str) -> None:
    """React as a worker does."""
    say(f"stuck: {peer}")
    os._exit(76)


def main(rank: int, card: int, path: str) -> None:
    """Run until the link is lost."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # the parent reads the other
    outlive_peers(os.environ)
    device = torch.device("cuda", card)
    torch.cuda.set_device(device)
    loop = LoopThread("peer", on_failure=lambda error: say(f"failed: {error}"))
    loop.start()
    inbox: queue.SimpleQueue[Frame | LinkLost] = queue.SimpleQueue()
    seam = open_device(device, on_failure=lambda error: say(f"failed: {error}"))
    link = CollectiveLink(loop, terms(rank, inbox, device), end_stuck, device=seam)
    meeting = Rendezvous(FileStore(path, 2), HOST, HOST, rank)
    directions = nccl_directions(device, timeout=FORM_TIMEOUT)
    link.meet(partial(GroupOfTwo, meeting, timeout=FORM_TIMEOUT, open_direction=directions))
    kind = FrameKind.GRADIENT if rank == 0 else FrameKind.ACTIVATION

    def send(number: int) -> None:
        values = torch.full((NUM_VALUES,), float(number), device=device)
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
    threads_end(link)
    say("ended")
    os._exit(0)


def threads_end(link: CollectiveLink) -> None:
    """Return when no thread of the link runs, and its communicators are aborted; the parent has a deadline."""
    for thread in (*link._threads, *link._releases):
        thread.join()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
