"""Parts that tests of grpc link share."""

import queue
from datetime import timedelta
from typing import Any

import torch

from headway.stages.ids import Batch, Generation, MicrobatchIndex
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.links.stream_link import StreamLink
from tests.integration.links.two_sides import lower_terms, upper_terms

DEADLINE_S = 20.0


SOON = timedelta(seconds=DEADLINE_S)


GENERATION = Generation(4)


CONTRACT = FrameContract(
    forms={
        FrameKind.GRADIENT: (TensorForm(torch.float32, (16,)),),
        FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
    },
    max_unacknowledged_frames=3,
)


Inbox = queue.SimpleQueue[Frame | LinkLost]


def total(generation: Generation = GENERATION) -> Frame:
    """The smallest frame downstream."""
    value = torch.tensor(1.0, dtype=torch.float64)
    return Frame(FrameKind.NORM_TOTAL, generation, Batch(0), MicrobatchIndex(0), (value,))


def accept(endpoint: LinkEndpoint, job: str, inbox: Inbox, *, timeout: timedelta = SOON, **changes: Any) -> StreamLink:
    """Await stage 0 on stage 1's endpoint."""
    fields: dict[str, Any] = {"generation": GENERATION, "first_contact": timeout, "silence": timeout, **changes}
    return endpoint.accept(lower_terms(job, inbox=inbox, contract=CONTRACT, **fields))


def dial(
    endpoint: LinkEndpoint, port: int, job: str, inbox: Inbox, *, timeout: timedelta = SOON, **changes: Any
) -> StreamLink:
    """Dial stage 1 from stage 0's endpoint."""
    fields: dict[str, Any] = {"generation": GENERATION, "first_contact": timeout, "silence": timeout, **changes}
    return endpoint.dial(upper_terms(job, port, inbox=inbox, contract=CONTRACT, **fields))


def lost(inbox: Inbox) -> LinkLost:
    """What must come next."""
    item = inbox.get(timeout=DEADLINE_S)
    assert isinstance(item, LinkLost), item
    return item
