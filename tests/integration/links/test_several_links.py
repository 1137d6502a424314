"""Several links of one job at one endpoint: from more than one worker of the stage before, and between replicas."""

import queue
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from headway.stages.ids import Batch, Generation, MicrobatchIndex, StageIndex
from headway.stages.links.frame_contract import FrameContract, TensorForm
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.links.stream_link import StreamLink
from tests.integration.links.conftest import Endpoints
from tests.integration.links.two_sides import lower_terms, upper_terms

DEADLINE_S = 20.0
GENERATION = Generation(4)
CONTRACT = FrameContract(
    forms={
        FrameKind.NORM_TOTAL: (TensorForm(torch.float64, ()),),
        FrameKind.REDUCED: (TensorForm(torch.float32, (3,)),),
    },
    max_unacknowledged_frames=8,
)
Inbox = queue.SimpleQueue[Frame | LinkLost]


class Job:
    """One job's links, all from endpoint `above` to endpoint `below`."""

    def __init__(self, endpoints: Endpoints, name: str) -> None:
        _, self.above, self.below = endpoints
        self.name = name
        self.inbox = Inbox()
        """Of everybody at `below`."""
        self.links: list[StreamLink] = []

    def accept(self, worker: int, *, is_last: bool = True, **changes: Any) -> StreamLink:
        """Await a worker of the stage before, at stage 1."""
        fields: dict[str, Any] = {"generation": GENERATION, "peer_worker": worker, "peer_name": f"worker {worker}"}
        terms = lower_terms(self.name, inbox=self.inbox, contract=CONTRACT, **fields | changes)
        self.links.append(self.below.accept(terms, is_last=is_last))
        return self.links[-1]

    def dial(self, worker: int, inbox: Inbox, **changes: Any) -> StreamLink:
        """From a worker of stage 0."""
        fields: dict[str, Any] = {"generation": GENERATION, "worker": worker, **changes}
        self.links.append(
            self.above.dial(upper_terms(self.name, self.below.port, inbox=inbox, contract=CONTRACT, **fields))
        )
        return self.links[-1]

    def received(self) -> list[int]:
        """The batches of the next two frames, sorted: frames of two links come in either order."""
        items = [self.inbox.get(timeout=DEADLINE_S) for _ in range(2)]
        assert all(isinstance(item, Frame) for item in items), items
        return sorted(item.batch for item in items if isinstance(item, Frame))


@pytest.fixture
def job(endpoints: Endpoints, request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job of the test's own."""
    job = Job(endpoints, request.node.name)
    yield job
    for link in job.links:
        link.close()


def total(batch: int, *, generation: Generation = GENERATION) -> Frame:
    """A frame from the stage before."""
    tensor = torch.tensor(1.0, dtype=torch.float64)
    return Frame(FrameKind.NORM_TOTAL, generation, Batch(batch), MicrobatchIndex(0), (tensor,))


def reduced(batch: int) -> Frame:
    """A frame from a replica."""
    return Frame(FrameKind.REDUCED, GENERATION, Batch(batch), MicrobatchIndex(0), (torch.ones(3),))


def test_two_workers_of_one_stage_dial_and_both_survive_a_cut(job: Job) -> None:
    """Frames of both arrive in one inbox, before and after the listener's streams are dropped for a while."""
    for worker in (0, 1):
        job.accept(worker, is_last=worker == 1)
    uppers = [job.dial(worker, Inbox()) for worker in (0, 1)]
    for worker, link in enumerate(uppers):
        link.send(total(worker))
    assert job.received() == [0, 1]
    job.below.cut(timedelta(seconds=0.3), dialled=False)
    for worker, link in enumerate(uppers):
        link.send(total(10 + worker))
    assert job.received() == [10, 11]
    deadline = time.monotonic() + DEADLINE_S
    while not all(link.num_resumed for link in uppers):  # what was sent may have been just before the cut
        assert time.monotonic() < deadline, "not resumed"
        time.sleep(0.01)


def test_nobody_is_refused_while_links_are_still_being_opened(job: Job) -> None:
    """The second of two workers dials when only the first is awaited: it comes again, and is let in."""
    job.accept(0, is_last=False)
    told = Inbox()
    link = job.dial(1, told)
    link.send(total(1))
    with pytest.raises(queue.Empty):
        told.get(timeout=0.3)
    job.accept(1)
    job.dial(0, Inbox()).send(total(0))
    assert job.received() == [0, 1]


def test_a_worker_that_is_not_awaited_is_refused(job: Job) -> None:
    """Worker 2 dials where 0 and 1 are expected, or 1's place in another stage: told at once."""
    for worker in (0, 1):
        job.accept(worker, is_last=worker == 1)
    for worker, stage in ((2, 0), (1, 3)):
        told = Inbox()
        job.dial(worker, told, stage=StageIndex(stage))
        lost = told.get(timeout=DEADLINE_S)
        assert isinstance(lost, LinkLost)
        assert f"stage {stage} of process above is not the one that is awaited" in lost.reason


def test_replicas_speak_their_own_kinds(job: Job) -> None:
    """Two workers of stage 1 join: slices go both ways, and the link has the name that was given to it."""
    at_upper = Inbox()
    lower = job.accept(0, peer_stage=StageIndex(1), peer_name="stage 1 worker 0")
    upper = job.dial(0, at_upper, stage=StageIndex(1), peer_stage=StageIndex(1), peer_name="stage 1 worker 1")
    assert lower.peer.startswith("stage 1 worker 0 at ")
    assert upper.peer == f"stage 1 worker 1 at 127.0.0.1:{job.below.port}"
    upper.send(reduced(5))
    lower.send(reduced(6))
    for inbox, batch in ((job.inbox, 5), (at_upper, 6)):
        item = inbox.get(timeout=DEADLINE_S)
        assert isinstance(item, Frame)
        assert (item.kind, item.batch) == (FrameKind.REDUCED, batch)


def test_a_newer_generation_with_fewer_workers_forgets_the_others(job: Job) -> None:
    """Generation 5 has one worker upstream: worker 1 of generation 4 is told that it is over, whoever it is."""
    for worker in (0, 1):
        job.accept(worker, is_last=worker == 1)
    newer = Generation(GENERATION + 1)
    job.accept(0, generation=newer)
    told = Inbox()
    job.dial(1, told)
    lost = told.get(timeout=DEADLINE_S)
    assert isinstance(lost, LinkLost)
    assert "STALE: generation 5 is in force here" in lost.reason
    job.dial(0, Inbox(), generation=newer).send(total(7, generation=newer))
    item = job.inbox.get(timeout=DEADLINE_S)
    assert isinstance(item, Frame)
    assert item.batch == 7
