"""What a stage does with neighbours that break the rules, go away or say nothing."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from headway.daemon.jobs.job import JobSpec
from headway.stages.errors import AbortedError, NonFiniteLossError, ProtocolError, UnavailableError
from headway.stages.ids import Batch, Boundary, Generation, LayerName, MicrobatchIndex, StageIndex, Timeline
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.schedule.operations import Backward, Forward, Update
from headway.stages.stage.content import StageContent
from headway.stages.stage.context import StageContext, StageLinks
from headway.stages.stage.executor import Executor
from headway.stages.stage.loop import StageLoop
from headway.stages.state.journal import Journal, JournalRow
from tests.rigs.local_link import LocalLink
from tests.rigs.pipeline import (
    EF,
    MODEL,
    CountingTokens,
    Pipeline,
    Trace,
    cut,
    initial_layers,
    make_job,
    with_train,
)

JOB = make_job(with_train(batches=1, microbatches=2), EF)
TIED_JOB = make_job(with_train(batches=3, microbatches=2), EF, model=replace(MODEL, tie_word_embeddings=True))
GENERATION = 5


class Stage:
    """One stage under test between neighbours that the test plays: `sent` is what it said to them."""

    def __init__(self, stage_index: int, num_stages: int, *, patience_s: float = 30.0, job: JobSpec = JOB) -> None:
        self.inbox: SimpleQueue[Frame | LinkLost | str] = SimpleQueue()
        self.sent: list[Frame] = []
        self.on_sent: Callable[[Frame], None] = lambda _: None
        self.journal = Journal()
        self.on_order: Callable[[str], None] = lambda order: pytest.fail(f"not expected: {order}")
        self.trace = Trace()
        names: tuple[LayerName, ...] = cut(job.layers, num_stages)[stage_index]
        layers = initial_layers(job)
        is_first, is_last = stage_index == 0, stage_index == num_stages - 1
        self.executor = Executor(
            StageContext(
                model=job.model,
                train=job.train,
                seed=job.job.seed,
                job=job.job.name,
                generation=Generation(GENERATION),
                timeline=Timeline(1),
                stage_index=StageIndex(stage_index),
                num_stages=num_stages,
                layers=names,
                depth=num_stages - stage_index,
                boundary=Boundary(0),
                device=torch.device("cpu"),
                patience_s=patience_s,
            ),
            StageContent(
                layers=[layers[name] for name in names],
                tokens=CountingTokens() if is_first else None,
                journal=self.journal if is_last else None,
            ),
            StageLinks(
                upstream={} if is_first else {0: LocalLink("the stage above", self)},
                downstream={} if is_last else {0: LocalLink("the stage below", self)},
                tied={0: LocalLink("the other end", self)} if job is TIED_JOB and (is_first or is_last) else {},
            ),
            observer=self.trace,
        )
        self.loop = StageLoop(self.executor, self.inbox, self.take)

    def take(self, item: Frame | LinkLost | str) -> None:
        """Whatever arrives."""
        if isinstance(item, str):
            self.on_order(item)
        else:
            self.executor.accept(item)

    def put(self, item: Frame | LinkLost) -> None:
        """Both neighbours' inbox."""
        assert isinstance(item, Frame)
        self.sent.append(item)
        self.on_sent(item)


def hidden(*, dtype: torch.dtype = torch.float32, width: int = MODEL.hidden_size) -> Tensor:
    return torch.ones(JOB.train.microbatch_size, JOB.train.sequence_length, width, dtype=dtype)


def frame(
    kind: FrameKind, batch: int = 0, microbatch: int = 0, *tensors: Tensor, generation: int = GENERATION
) -> Frame:
    if not tensors:
        targets = torch.zeros(JOB.train.microbatch_size, JOB.train.sequence_length, dtype=torch.int64)
        tensors = {
            FrameKind.ACTIVATION: (hidden(), targets),
            FrameKind.GRADIENT: (hidden(),),
            FrameKind.NORM_SQUARES: (torch.ones(2, dtype=torch.float64),),
            FrameKind.NORM_TOTAL: (torch.tensor(1.0, dtype=torch.float64),),
            FrameKind.TIED_SUMS: (torch.ones(MODEL.vocab_size, MODEL.hidden_size),),
        }[kind]
    return Frame(kind, Generation(generation), Batch(batch), MicrobatchIndex(microbatch), tensors)


A, G, S, T = FrameKind.ACTIVATION, FrameKind.GRADIENT, FrameKind.NORM_SQUARES, FrameKind.NORM_TOTAL
E = FrameKind.TIED_SUMS


def test_a_middle_stage_answers_every_frame_and_ends_empty() -> None:
    """Activations and gradients of one batch, squares from below, the total from above → the same kinds pass on."""
    stage = Stage(1, 3)
    for item in (frame(A, 0, 0), frame(A, 0, 1), frame(S)):
        stage.inbox.put(item)

    def answer(item: Frame) -> None:
        if item.kind is A:
            stage.inbox.put(frame(G, item.batch, item.microbatch))
        if item.kind is S:
            stage.inbox.put(frame(T))

    stage.on_sent = answer
    assert stage.loop.run() == 1
    kinds = [(item.kind, item.microbatch) for item in stage.sent]
    assert sorted(kinds) == sorted([(A, 0), (A, 1), (G, 0), (G, 1), (S, 0), (T, 0)])
    squares = next(item for item in stage.sent if item.kind is S)
    assert squares.tensors[0].shape == (2 + 2,)  # two layers below, two of its own
    assert squares.tensors[0][:2].tolist() == [1.0, 1.0]
    assert Counter(type(op) for op, _, _ in stage.trace.ops) == {Forward: 2, Backward: 2, Update: 1}


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([frame(A), frame(A)], "the stage above: sent an unexpected ACTIVATION of batch 0, microbatch 0"),
        ([frame(A, 1, 0)], "the stage above: sent an unexpected ACTIVATION of batch 1, microbatch 0"),
        ([frame(A, 0, 2)], "the stage above: sent an unexpected ACTIVATION"),
        ([frame(G)], "the stage below: sent an unexpected GRADIENT"),
        ([frame(T)], "the stage above: sent an unexpected NORM_TOTAL"),
        ([frame(S), frame(S)], "the stage below: sent an unexpected NORM_SQUARES"),
        ([frame(A, 0, 0, hidden())], "the stage above: ACTIVATION with 1 tensors"),
        ([frame(G, 0, 0, hidden(width=3))], "the stage below: GRADIENT tensor 0"),
        ([frame(G, 0, 0, hidden(dtype=torch.float64))], "the stage below: GRADIENT tensor 0"),
    ],
)
def test_a_frame_that_breaks_the_rules_names_its_sender(frames: list[Frame], words: str) -> None:
    """Twice, too early, of no microbatch, for no forward, of another shape or type → ProtocolError."""
    stage = Stage(1, 3)
    for item in frames:
        stage.inbox.put(item)
    with pytest.raises(ProtocolError, match=words):
        stage.loop.run()


@pytest.mark.parametrize(
    ("stage_index", "frames", "words"),
    [
        (0, [frame(E), frame(E)], "the other end: sent an unexpected TIED_SUMS of batch 0, microbatch 0"),
        (2, [frame(E, 1)], "the other end: sent an unexpected TIED_SUMS of batch 1"),
        (0, [frame(E, 0), frame(E, 1), frame(E, 2)], "the other end: sent an unexpected TIED_SUMS of batch 2"),
        (0, [frame(E, 0, 1)], "an unknown peer: sent an unexpected TIED_SUMS of batch 0, microbatch 1"),
        (1, [frame(E)], "an unknown peer: sent an unexpected TIED_SUMS|an unknown peer: TIED_SUMS, which this link"),
        (0, [frame(E, 0, 0, torch.ones(MODEL.hidden_size, MODEL.vocab_size))], "the other end: TIED_SUMS tensor 0"),
        (2, [frame(E, 0, 0, torch.ones(0))], "the other end: TIED_SUMS tensor 0"),
    ],
)
def test_a_sum_of_a_tie_that_breaks_the_rules_names_its_sender(
    stage_index: int, frames: list[Frame], words: str
) -> None:
    """Twice, too early, further ahead than the other end can be, of a group or a stage without a tie, misshapen."""
    stage = Stage(stage_index, 3, job=TIED_JOB)
    for item in frames:
        stage.inbox.put(item)
    with pytest.raises(ProtocolError, match=words):
        stage.loop.run()


@pytest.mark.parametrize("kind", [A, T])
def test_the_first_stage_takes_nothing_from_above(kind: FrameKind) -> None:
    """An activation or a total at stage 0 → ProtocolError."""
    stage = Stage(0, 2)
    stage.inbox.put(frame(kind))
    with pytest.raises(ProtocolError, match="an unknown peer: sent an unexpected"):
        stage.loop.run()


def test_frames_of_another_generation_are_counted_and_change_nothing() -> None:
    """Stale and future frames, even misshapen ones → refused and counted; the stage goes on."""
    stage = Stage(1, 3)
    stage.inbox.put(frame(A, generation=GENERATION - 1))
    stage.inbox.put(frame(A, generation=GENERATION + 1))
    stage.inbox.put(frame(A, 0, 0, hidden(width=1), generation=GENERATION - 1))
    stage.inbox.put("stop")
    stage.on_order = lambda _: stage.executor.stop_at(Boundary(0))
    assert stage.loop.run() == 0
    assert stage.executor.num_stale_frames == 3


def test_a_lost_link_names_the_neighbour() -> None:
    """A link gives up → UnavailableError with its words."""
    stage = Stage(1, 3)
    stage.inbox.put(LinkLost("stage 2 at b:1", "no heartbeat for 30 s"))
    with pytest.raises(UnavailableError, match="stage 2 at b:1: no heartbeat for 30 s"):
        stage.loop.run()


@pytest.mark.parametrize(
    ("arrived", "words"),
    [([], "the stage above: no input arrived"), ([frame(A, 0, 0), frame(A, 0, 1)], "the stage below: no gradient")],
)
def test_a_silent_neighbour_is_named_at_the_deadline(arrived: list[Frame], words: str) -> None:
    """Nothing arrives within the patience → UnavailableError naming who was waited for, and for what."""
    stage = Stage(1, 3, patience_s=0.01)
    for item in arrived:
        stage.inbox.put(item)
    with pytest.raises(UnavailableError, match=words):
        stage.loop.run()
    assert not stage.loop.is_runnable


def test_an_abort_ends_the_run() -> None:
    """An order to abort between two operations → AbortedError with its reason, and nothing is computed any more."""
    stage = Stage(0, 1)
    stage.inbox.put("abort")

    def abort(_: str) -> NoReturn:
        raise AbortedError("order quit")

    stage.on_order = abort
    with pytest.raises(AbortedError, match="order quit"):
        stage.loop.run()
    assert not stage.trace.ops
    assert not stage.loop.is_runnable


def test_a_loss_that_is_not_finite_stops_the_job_at_its_batch() -> None:
    """A head of infinite weights → the loss of batch 0 is not a number, and batch 0 is not in the journal."""
    job = make_job(with_train(), EF)
    layers, journal = initial_layers(job), Journal()
    with torch.no_grad():
        layers["head"].versions.sets[0]["lm_head.weight"].fill_(float("inf"))
    with pytest.raises(NonFiniteLossError, match="batch 0, microbatch 0, is nan"):
        Pipeline(job, layers, journal, num_stages=1).run()
    assert len(journal) == 0


def test_rows_beyond_the_boundary_are_cut_before_the_run() -> None:
    """The journal knows a batch that is to be computed again → it is there once at the end."""
    job = make_job(with_train(batches=2), EF)
    row = JournalRow(batch=Batch(0), microbatch_losses=(1.0,), tokens=1, seconds=0.0, generation=Generation(1))
    journal = Journal([row, replace(row, batch=Batch(1))])
    Pipeline(job, initial_layers(job), journal, num_stages=1).run()
    assert [len(row.microbatch_losses) for row in journal.rows] == [4, 4]
