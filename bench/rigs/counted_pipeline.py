"""A whole plan in this process, one operation at a time, so that the memory of each worker can be counted.

Each worker computes as far as its schedule allows before the next one does, which fills the pipeline to its depth. What
arrives is a copy of the receiver's own, as over a network. One worker may be on a card, and the others on the CPU.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Final

import torch

from headway.daemon.cluster.records import Device, NodeRecord, PlanRecord
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.worker.neighbours import update_shares
from headway.optim.layer_optimizer import optimizer_factory
from headway.stages.data.microbatch import Microbatch
from headway.stages.device.cpu import CpuDevice
from headway.stages.device.device import StageDevice
from headway.stages.device.opening import open_device
from headway.stages.device.run_events import DeviceDone
from headway.stages.ids import Boundary, Generation, LayerName, StageIndex, Timeline
from headway.stages.links.link import Frame, Link
from headway.stages.links.worker_link import WorkerLink
from headway.stages.schedule.next_op import WAIT, next_op
from headway.stages.schedule.operations import Update
from headway.stages.spec import TrainSpec
from headway.stages.stage.content import StageContent
from headway.stages.stage.context import StageContext, StageLinks
from headway.stages.stage.executor import Executor
from headway.stages.state.journal import Journal, JournalRow
from headway.stages.state.layer_state import LayerState

As = Callable[[int], AbstractContextManager[None]]
"""Counts what is made inside for a worker."""


OpenCard = Callable[..., StageDevice]
"""Opens the card; `on_failure` hears of errors in its threads."""


def open_first_card(*, on_failure: Callable[[BaseException], None]) -> StageDevice:
    """Open the first card of this machine."""
    return open_device(torch.device("cuda", 0), on_failure=on_failure)


DOCUMENT: Final = 48
"""Tokens of a document."""
CARD_TIMEOUT_S: Final = 60.0


class RandomTokens:
    """Tokens by (batch, microbatch). Every other target counts if there is a mask, and documents follow each other."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def microbatch(self, train: TrainSpec, *, seed: int, batch: int, microbatch: int) -> Microbatch:
        """See `MicrobatchSource`."""
        generator = torch.Generator().manual_seed(seed + batch * 1009 + microbatch)
        window = torch.randint(
            self._vocabulary, (train.microbatch_size, train.sequence_length + 1), generator=generator
        )
        inputs, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        if not train.has_mask:
            return Microbatch(inputs, targets)
        targets[:, ::2] = -100
        places = torch.arange(train.sequence_length, dtype=torch.int32) % DOCUMENT
        positions = places.repeat(train.microbatch_size, 1) if train.separates_documents else None
        return Microbatch(inputs, targets, positions, torch.tensor(targets.numel() / 2))

    def held_out(self, train: TrainSpec, microbatch: int) -> Microbatch:
        """As a `MicrobatchSource`."""
        return self.microbatch(train, seed=0, batch=10**6, microbatch=microbatch)


class Unobserved:
    """A `StageObserver`."""

    def waits(self, what: str, now: float) -> None:
        """See `StageObserver`."""

    def begins(self, op: object, now: float) -> None:
        """See `StageObserver`."""

    def ended(self, op: object, **facts: object) -> None:
        """See `StageObserver`."""

    def batch_done(self, row: JournalRow) -> None:
        """See `StageObserver`."""


class CopyLink:
    """A link whose frames wait at the receiver until it takes them."""

    def __init__(self, peer: str, inbox: deque[Frame]) -> None:
        self.peer = peer
        self._inbox = inbox

    def send(self, frame: Frame) -> None:
        """See `Link`. The tensors stay the sender's until they have arrived."""
        self._inbox.append(replace(frame, tensors=tuple(tensor.detach() for tensor in frame.tensors)))

    def close(self) -> None:
        """See `Link`."""


class CountedPipeline:
    """The workers of a plan."""

    def __init__(
        self,
        spec: JobSpec,
        plan: ClusterPlan,
        *,
        as_worker: As,
        on_card: int = -1,
        open_card: OpenCard = open_first_card,
    ) -> None:
        """as_worker: see `As`. on_card: position of the worker whose device is a card; -1: none."""
        self._spec = spec
        self._as = as_worker
        self._plan = PlanRecord(generation=1, timeline=1, workers=plan.workers, codecs=plan.codecs)
        self._inboxes: list[deque[Frame]] = [deque() for _ in plan.workers]
        self._from_siblings: list[deque[Frame]] = [deque() for _ in plan.workers]
        self._on_card = on_card
        self._open_card = open_card
        self._done: SimpleQueue[DeviceDone] = SimpleQueue()
        """What the card has done."""
        self._journal = Journal()
        self._failures: SimpleQueue[BaseException] = SimpleQueue()
        """Of the card's threads."""
        self._hears_at_once = False
        self._updates_wait = False
        self.executors = []
        for position in range(len(plan.workers)):
            with as_worker(position):
                self.executors.append(self._executor(position))

    def run(self, *, ahead: int = 0, updates_are_late: bool = False) -> None:
        """Train all batches.

        ahead: 0: replicas take what they sent each other as late as possible; else at once, and those at the front of a
        stage are ahead (1), or those at its end (-1).

        updates_are_late: a worker updates when nobody can do anything else, as if the norm of all gradients travelled
        for long.
        """
        self._hears_at_once = ahead != 0
        self._updates_wait = updates_are_late
        for executor in self.executors:
            executor.begin()
        is_settled = False
        while not all(executor.state.is_done for executor in self.executors):
            moved = [self._goes_on(position) for position in range(len(self.executors))[:: ahead or 1]]
            if any(moved):
                is_settled = False
            elif not is_settled:
                is_settled = self._hears_card()
            elif self._hear_siblings() or self._update_one():
                is_settled = False
            else:
                raise RuntimeError("all workers wait for each other")

    def _hears_card(self) -> bool:
        """Let the worker on the card hear of the next thing that the card has done. Return whether that was the last,
        and every frame has left.
        """
        if self._on_card < 0:
            return True
        executor, is_last = self.executors[self._on_card], False
        if not executor.events.num_pending:
            is_last = True
            executor.events.when_copied((), lambda _: None)  # in line after the frames that leave
        try:
            executor.accept(self._done.get(timeout=CARD_TIMEOUT_S))
        except Empty:
            raise (RuntimeError("the card is late") if self._failures.empty() else self._failures.get()) from None
        return is_last

    def _update_one(self) -> bool:
        """Let the first worker make an update of the oldest batch that is due. All others come later still."""
        due = [
            (op.batch, position)
            for position, executor in enumerate(self.executors)
            if not executor.state.is_done and isinstance(op := next_op(executor.state), Update)
        ]
        if not due:
            return False
        batch, position = min(due)
        with self._as(position):
            self.executors[position].execute(Update(batch))
        return True

    def _hear_siblings(self) -> bool:
        """Let replicas take what they sent each other: as late as it may arrive, when nobody can do anything else."""
        waiting = [position for position, late in enumerate(self._from_siblings) if late]
        for position in waiting:
            with self._as(position):
                self.executors[position].accept(_arrived(self._from_siblings[position].popleft()))
        return bool(waiting)

    def _goes_on(self, position: int) -> bool:
        """Let a worker take what has arrived, and compute until it waits."""
        executor, inbox = self.executors[position], self._inboxes[position]
        late, has_moved = self._from_siblings[position], False
        with self._as(position):
            while True:
                while inbox:
                    executor.accept(_arrived(inbox.popleft()))
                    has_moved = True
                while late and self._hears_at_once:
                    executor.accept(_arrived(late.popleft()))
                    has_moved = True
                is_held = executor.state.is_done or executor.ops.is_full
                op = WAIT if is_held else next_op(executor.state)
                if op is WAIT or (self._updates_wait and isinstance(op, Update)):
                    return has_moved
                executor.execute(op)
                has_moved = True

    def _executor(self, position: int) -> Executor:
        spec, plan = self._spec, self._plan
        stage_index = plan.stage_index(position)
        replicas = plan.replicas[stage_index]
        stage, index = plan.workers[position], replicas.index(position)
        is_on_card = position == self._on_card
        device = self._open_card(on_failure=self._failures.put) if is_on_card else CpuDevice()
        context = StageContext(
            model=spec.model,
            train=spec.train,
            seed=spec.job.seed,
            job=spec.job.name,
            generation=Generation(1),
            timeline=Timeline(1),
            stage_index=StageIndex(stage_index),
            num_stages=plan.num_stages,
            layers=tuple(map(LayerName, stage.layers)),
            depth=stage.depth,
            boundary=Boundary(0),
            device=device.torch_device,
            replica_groups=tuple(plan.workers[each].groups for each in replicas) if len(replicas) > 1 else (),
            replica_index=index,
            update_shares=update_shares(spec, stage.layers, len(replicas)) if stage.shares_update else None,
            group_by_group=all(len(workers) == 1 for workers in plan.replicas),
            upstream_codec=plan.codec(stage_index),
            downstream_codec=plan.codec(stage_index + 1),
        )
        make = optimizer_factory(spec.optim, num_batches=spec.train.batches, delay=spec.train.delay)
        content = StageContent(
            layers=[
                LayerState.initial(
                    name, spec.model, spec.train, seed=1, device=device.torch_device, optimizer_factory=make
                )
                for name in context.layers
            ],
            tokens=RandomTokens(spec.model.vocab_size) if context.is_first else None,
            journal=self._journal if context.is_last and context.is_lead else None,
        )
        links = self._links(position, device)
        return Executor(context, content, links, observer=Unobserved(), device=device, inbox=self._done)

    @property
    def losses(self) -> list[float]:
        """Return the loss of each batch."""
        return [row.loss for row in self._journal.rows]

    def close(self) -> None:
        """End the threads of the card."""
        for executor in self.executors:
            executor.close()
            executor.device.close()

    def _links(self, position: int, device: StageDevice) -> StageLinks:
        plan, here = self._plan, self._plan.stage_index(position)
        every = range(self._spec.train.reduction_groups)

        def to_stage(stage: int) -> dict[int, Link]:
            if not 0 <= stage < plan.num_stages:
                return {}
            codec, links = plan.codec(max(stage, here)), dict[int, Link]()
            for other in plan.replicas[stage]:
                link = WorkerLink(CopyLink(str(other), self._inboxes[other]), device, codec, self._spec.train)
                links |= dict.fromkeys(plan.workers[other].groups or every, link)
            return {group: links[group] for group in plan.workers[position].groups or every}

        # The other end's link is the neighbour's where there are two stages.
        has_ties = self._spec.model.trains_tie and plan.num_stages > 1
        other_end = {0: plan.num_stages - 1, plan.num_stages - 1: 0}.get(here, -1) if has_ties else -1
        siblings = {
            index: WorkerLink(CopyLink(str(other), self._from_siblings[other]), device)
            for index, other in enumerate(plan.replicas[here])
            if other != position
        }
        return StageLinks(
            upstream=to_stage(here - 1), downstream=to_stage(here + 1), siblings=siblings, tied=to_stage(other_end)
        )


def unlimited_node(name: str) -> NodeRecord:
    """Return a machine whose memory is not limited."""
    return NodeRecord(
        name=name,
        incarnation=f"{name}-1",
        address="",
        host="",
        site="here",
        devices=(Device(kind="cpu"),),
        memory_bytes=0,
        arithmetic_class="one",
    )


def _arrived(frame: Frame) -> Frame:
    """Return the frame with tensors of the receiver's own."""
    tensors = tuple(tensor.to("cpu", copy=True) for tensor in frame.tensors)
    return replace(frame, tensors=tensors)
