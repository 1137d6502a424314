"""A link between stage 0, which dials, and stage 1: its terms from either side, frames, and what arrives."""

import itertools
import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from headway.stages.ids import Batch, Generation, MicrobatchIndex, StageIndex
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.links.link import Inbox as AnyInbox
from headway.stages.links.link_terms import LinkTerms
from headway.stages.links.loop_thread import LoopThread
from headway.stages.links.stream_link import StreamLink

DEADLINE_S = 20.0
SOON = timedelta(seconds=DEADLINE_S)
GENERATION = Generation(4)
MAX_BYTES = 5 << 20
CONTRACT = FrameContract(
    forms={
        FrameKind.GRADIENT: (TensorForm(torch.float32, (16,)),),
        FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
    },
    max_unacknowledged_frames=3,
)
_FORM = (TensorForm(torch.uint8, (MAX_BYTES,), may_be_shorter=True),)
BYTES = FrameContract({FrameKind.ACTIVATION: _FORM, FrameKind.GRADIENT: _FORM}, 64)
"""Any number of bytes, both ways."""
Inbox = queue.SimpleQueue[Frame | LinkLost]
Endpoints = tuple[LoopThread, LinkEndpoint, LinkEndpoint]
_numbers = itertools.count()


def new_job(kind: str = "job") -> str:
    """Return a name that no link of this process has had.

    Endpoints outlive a test. A hello for a name of an earlier test finds the link of that test, as both have one
    generation: it is refused as stale, or its frames arrive where nobody looks.
    """
    return f"{kind}-{next(_numbers)}"


def upper_terms(
    job: str, port: int, *, inbox: AnyInbox, contract: FrameContract = CONTRACT, **changes: Any
) -> LinkTerms:
    """Return the terms of stage 0, which dials."""
    terms = LinkTerms(
        job=job,
        generation=GENERATION,
        stage=StageIndex(0),
        worker=0,
        peer_stage=StageIndex(1),
        peer_worker=1,
        peer_incarnation="below",
        peer_node="node",
        peer_name="stage 1",
        peer_address=f"127.0.0.1:{port}",
        inbox=inbox,
        contract=contract,
        first_contact=SOON,
        silence=SOON,
    )
    return replace(terms, **changes)


def lower_terms(job: str, *, inbox: AnyInbox, contract: FrameContract = CONTRACT, **changes: Any) -> LinkTerms:
    """Return the terms of stage 1, which accepts."""
    other = {
        "stage": StageIndex(1),
        "worker": 1,
        "peer_stage": StageIndex(0),
        "peer_worker": 0,
        "peer_incarnation": "above",
        "peer_name": "stage 0",
    }
    return upper_terms(job, 1, inbox=inbox, contract=contract, **other | changes)


def accept(endpoint: LinkEndpoint, job: str, inbox: Inbox, *, timeout: timedelta = SOON, **changes: Any) -> StreamLink:
    """Await stage 0 on stage 1's endpoint."""
    return endpoint.accept(lower_terms(job, inbox=inbox, **{"first_contact": timeout, "silence": timeout, **changes}))


def dial(
    endpoint: LinkEndpoint, port: int, job: str, inbox: Inbox, *, timeout: timedelta = SOON, **changes: Any
) -> StreamLink:
    """Dial stage 1 from stage 0's endpoint."""
    return endpoint.dial(
        upper_terms(job, port, inbox=inbox, **{"first_contact": timeout, "silence": timeout, **changes})
    )


def total(batch: int = 0, *, generation: Generation = GENERATION) -> Frame:
    """The smallest frame downstream."""
    value = torch.tensor(1.0, dtype=torch.float64)
    return Frame(FrameKind.NORM_TOTAL, generation, Batch(batch), MicrobatchIndex(0), (value,))


def frame_of(kind: FrameKind, batch: int, num_bytes: int) -> Frame:
    """Bytes that depend on the place of the frame and within it."""
    values = (torch.arange(num_bytes) * 31 + batch + len(kind.name)).to(torch.uint8)
    return Frame(kind, GENERATION, Batch(batch), MicrobatchIndex(0), (values,))


def heard(inbox: Inbox) -> Frame:
    """Return the frame that must come next."""
    item = inbox.get(timeout=DEADLINE_S)
    assert isinstance(item, Frame), item
    return item


def lost(inbox: Inbox) -> LinkLost:
    """Return the loss that must come next."""
    item = inbox.get(timeout=DEADLINE_S)
    assert isinstance(item, LinkLost), item
    return item


class Pair:
    """Both ends of a link of a job of its own, which carries bytes, and what arrives at each."""

    def __init__(self, endpoints: Endpoints, *, port: int | None = None, upper: Any = None, **terms: Any) -> None:
        """port: that is dialled, if it is not the lower end's. upper: changes of that end's terms alone."""
        _, self.above, self.below = endpoints
        job, port = new_job(), port or self.below.port
        self.at_upper, self.at_lower = Inbox(), Inbox()
        terms = {"contract": BYTES, **terms}
        self.lower = self.below.accept(lower_terms(job, inbox=self.at_lower, **terms))
        self.upper = self.above.dial(upper_terms(job, port, inbox=self.at_upper, **terms | (upper or {})))

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self.upper.close()
        self.lower.close()

    def exchange(self, sizes: Sequence[int], *, pause: Callable[[], object] = lambda: None) -> None:
        """Send frames both ways at once, and compare each bit that arrives."""
        for batch, size in enumerate(sizes):
            self.upper.send(frame_of(FrameKind.ACTIVATION, batch, size))
            self.lower.send(frame_of(FrameKind.GRADIENT, batch, size))
            pause()
        for inbox, kind in ((self.at_lower, FrameKind.ACTIVATION), (self.at_upper, FrameKind.GRADIENT)):
            for batch, size in enumerate(sizes):
                received, sent = heard(inbox), frame_of(kind, batch, size)
                assert (received.kind, received.batch) == (kind, batch)
                assert torch.equal(received.tensors[0], sent.tensors[0])
            assert inbox.empty()
