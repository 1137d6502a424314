"""A worker process at the other end of a collective link: `python -m … FOLDER INCARNATION ROLE [PORT]`.

It says its port, and then each thing that happens to its link, in a line. ROLE `below` accepts and answers each frame;
`stuck` dials, sends one, and closes when told to, with a group that no abort ends.
"""

import os
import queue
import sys
from datetime import timedelta
from pathlib import Path

import torch

from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.collective import link as collective_link
from headway.stages.links.collective.endpoint import CollectiveEndpoint
from headway.stages.links.collective.group import GroupOfTwo
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.links.loop_thread import LoopThread
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.integration.links.two_sides import GENERATION, lower_terms, upper_terms

JOB = "processes"
EXIT_STUCK = 76
CONTRACT = FrameContract(
    forms={
        FrameKind.GRADIENT: (TensorForm(torch.float32, (16,)),),
        FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
    },
    max_unacknowledged_frames=3,
)


def total(generation: Generation = GENERATION) -> Frame:
    """The smallest frame downstream."""
    value = torch.tensor(1.0, dtype=torch.float64)
    return Frame(FrameKind.NORM_TOTAL, generation, Batch(0), MicrobatchIndex(0), (value,))


def gradient() -> Frame:
    """A frame upstream."""
    return Frame(FrameKind.GRADIENT, GENERATION, Batch(0), MicrobatchIndex(0), (torch.arange(16.0),))


def say(text: str) -> None:
    """To whoever started us."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def end_stuck(peer: str) -> None:
    """React as a worker does."""
    say(f"stuck: {peer}")
    os._exit(EXIT_STUCK)


def main(folder: str, incarnation: str, role: str, port: str = "0") -> None:
    """Run until the parent kills this process, or the link ends."""
    loop = LoopThread("peer")
    loop.start()
    identity = TlsIdentity.read(Path(folder))
    ends = LinkEndpoint(loop=loop, identity=identity, host="127.0.0.1", incarnation=incarnation, protocol=1)
    collective = CollectiveEndpoint(
        loop=loop, identity=identity, host="127.0.0.1", incarnation=incarnation, protocol=1, on_stuck=end_stuck
    )
    for name, answer in collective.methods.items():
        ends.add_method(name, answer)
    ends.start()
    inbox: queue.SimpleQueue[Frame | LinkLost] = queue.SimpleQueue()
    say(str(ends.port))
    if role == "below":
        link = collective.accept(lower_terms(JOB, inbox=inbox, contract=CONTRACT))
    else:
        setattr(GroupOfTwo, "abort", lambda _: None)  # noqa: B010
        collective_link.CLOSE_GRACE = collective_link.ABORT_GRACE = timedelta(seconds=0.5)
        silence = timedelta(minutes=5)
        link = collective.dial(upper_terms(JOB, int(port), inbox=inbox, contract=CONTRACT, silence=silence))
        link.send(total())
    while isinstance(item := inbox.get(), Frame):
        say(f"heard: {item.kind.name}")
        if role == "below":
            link.send(gradient())
        else:
            sys.stdin.readline()
            link.close()
            say("closed")
    say(f"lost: {item.reason}")


if __name__ == "__main__":
    main(*sys.argv[1:])
