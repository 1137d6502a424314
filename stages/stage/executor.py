"""Drives one stage: asks the schedule what to do, does it, and tells the neighbours.

The thread that calls `run` is the only one that touches the stage. Links put what arrives into the inbox; whoever wants
something else of the stage puts that into the same inbox, and `handle` gets it between two operations.
"""

from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import perf_counter

import torch
from torch import Tensor

from headway.stages.errors import AbortedError, ProtocolError, UnavailableError, UnreachedError
from headway.stages.ids import Batch, Boundary, Microbatch
from headway.stages.links.coded_link import decoded
from headway.stages.links.frame_contract import DOWNSTREAM_KINDS
from headway.stages.links.link import Frame, FrameKind, Link, LinkLost
from headway.stages.schedule.schedule import (
    WAIT,
    Awaited,
    Backward,
    Forward,
    Op,
    ScheduleState,
    StageSchedule,
    Update,
    Wait,
    awaited,
    next_op,
)
from headway.stages.spec import layer_names, weight_version
from headway.stages.stage.clipping import SquaresRelay, clip_coefficient, layer_square
from headway.stages.stage.context import MicrobatchSource, StageContext
from headway.stages.stage.gradient_sums import GradientSums
from headway.stages.stage.graph import StageGraph
from headway.stages.stage.journal_writer import BatchLosses, JournalWriter
from headway.stages.stage.links import StageLinks, by_microbatch
from headway.stages.stage.replicas import Siblings
from headway.stages.stage.snapshots import PATIENCE_S as SNAPSHOT_PATIENCE_S
from headway.stages.stage.snapshots import Snapshots
from headway.stages.state.journal import Journal, JournalRow
from headway.stages.state.layer_state import LayerState, split_by_layer
from headway.stages.state.snapshot_writer import SnapshotEnded
from headway.stages.sums import fold
from headway.stages.telemetry.goodput import BUBBLE, SNAPSHOT, Goodput, waiting_for
from headway.stages.telemetry.history import Recorder
from headway.stages.telemetry.layer_times import LayerTimes
from headway.stages.telemetry.op_times import OpTimes

PATIENCE_S = 600.0

_REPLICA_KINDS = frozenset({FrameKind.SUMS, FrameKind.REDUCED, FrameKind.LOSSES, FrameKind.STOP})


class Executor:
    """One stage, or one replica of it, from one boundary to the next stop."""

    def __init__(
        self,
        context: StageContext,
        layers: Sequence[LayerState],
        *,
        tokens: MicrobatchSource | None,
        journal: Journal | None,
        links: StageLinks,
        inbox: SimpleQueue[object],
        handle: Callable[[object], None],
        on_batch: Callable[[JournalRow], None] | None = None,
        recorder: Recorder | None = None,
        snapshots: Snapshots | None = None,
        goodput: Goodput | None = None,
        on_operation: Callable[[Op], None] | None = None,
        layer_times: LayerTimes | None = None,
        stops_at_non_finite: bool = True,
        patience_s: float = PATIENCE_S,
        make_graph: Callable[..., StageGraph] = StageGraph,
        choose: Callable[[ScheduleState], Op | Wait] = next_op,
    ) -> None:
        """layers: live, at the context's boundary; the stage is the only one to touch them until `run` returns.

        tokens: on the first stage only. journal: on the last only, and there on its lead; rows from the boundary on are
        cut off. handle: is called in the thread of `run` with everything in the inbox that no link put there. on_batch:
        where the journal is, once per batch. on_operation: after each operation, with its frames handed to the links.
        patience_s: how long nothing at all may arrive while the stage waits. choose: what to do next.
        """
        is_first, is_last = context.stage_index == 0, context.stage_index == context.num_stages - 1
        assert (tokens is not None) == is_first == (not links.upstream)
        assert is_last == (not links.downstream)
        assert (journal is not None) == (is_last and context.is_lead)
        assert context.has_replicas == bool(links.siblings)
        assert tuple(layer.name for layer in layers) == context.layers
        assert all(layer.boundary == context.boundary for layer in layers), "a layer is at another boundary"
        train = context.train
        self._context = context
        self._layers = tuple(layers)
        self._tokens = tokens
        self._journal = journal
        self._links = links
        num_microbatches, num_groups = train.microbatches, train.reduction_groups
        self._upstream = by_microbatch(links.upstream, num_microbatches=num_microbatches, num_groups=num_groups)
        self._downstream = by_microbatch(links.downstream, num_microbatches=num_microbatches, num_groups=num_groups)
        self._inbox = inbox
        self._handle = handle
        self._recorder = recorder
        self._snapshots = snapshots
        self._goodput = goodput or Goodput()
        self._on_operation = on_operation
        self._patience_s = patience_s
        self._schedule = StageSchedule.of(
            train,
            stage_index=context.stage_index,
            num_stages=context.num_stages,
            depth=context.depth,
            first_batch=context.boundary,
            groups=context.groups,
        )
        self._state = ScheduleState(self._schedule)
        self._contract = context.contract
        self.layer_times = layer_times or LayerTimes(context.layers, context.device)
        times = self.layer_times
        self._graph = make_graph(layers, context.model, train, is_first=is_first, is_last=is_last, times=times)
        self._choose = choose
        self._sums = GradientSums(num_microbatches=num_microbatches, num_groups=num_groups)
        self._siblings: Siblings | None = None
        if context.has_replicas:
            shapes = [tensor.shape for layer in layers for tensor in layer.versions.sets[0].values()]
            self._siblings = Siblings(context, links.siblings, shapes)
        self._squares = SquaresRelay(is_last=is_last)
        self._inputs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._output_gradients: dict[tuple[int, int], Tensor] = {}
        self._reduced: dict[int, list[Tensor]] = {}
        self._total_squares: dict[int, float] = {}
        self._losses = BatchLosses()
        self._rows: JournalWriter | None = None
        if journal is not None:
            self._rows = JournalWriter(journal, context, stops_at_non_finite=stops_at_non_finite, on_batch=on_batch)
        self._abort_reason: str | None = None
        # Read by others, from any thread, at any time.
        self.num_ops_done = 0
        self.num_stale_frames = 0
        self.waiting_for = ""
        """The neighbour that an idle stage waits for."""
        self.is_runnable = False
        """Whether an operation is running or could run."""
        self.running: type[Op] | None = None
        """The kind of the operation that runs now."""
        self.op_times: dict[type[Op], OpTimes] = {Forward: OpTimes(), Backward: OpTimes(), Update: OpTimes()}

    # --- For `handle`, between operations ---

    def choose_stop(self) -> Boundary:
        """First stage, its lead: stop as soon as the batch that has begun is done. Returns where."""
        before = self._state.stop
        boundary = self._state.choose_stop()
        if self._siblings is not None and boundary < before:
            # Ahead of the sums that would let them begin the next batch; the coordinator's word may come after that.
            stop = self._frame(FrameKind.STOP, self._state.backwards.batch, 0, (torch.tensor(boundary),))
            self._siblings.send_to_all(stop)
        return Boundary(boundary)

    def stop_at(self, boundary: Boundary) -> None:
        """Stop where the first stage has chosen. Raises ValueError when that is past."""
        self._state.stop_at(boundary)

    def abort(self, reason: str) -> None:
        """Make `run` raise AbortedError. The layers' state is then good for nothing."""
        self._abort_reason = reason

    # --- For anybody ---

    @property
    def boundary(self) -> Boundary:
        """The newest boundary that this stage has reached."""
        return Boundary(self._state.version)

    @property
    def batch(self) -> Batch:
        """The batch whose backwards are under way."""
        return Batch(self._state.backwards.batch)

    def run(self) -> Boundary:
        """Compute until the stop boundary, which is the job's last one unless somebody says otherwise. Returns it.

        Raises UnavailableError when a neighbour is gone, ProtocolError when it breaks the rules, NonFiniteLossError,
        AbortedError, and whatever `handle`, `on_batch` and the layers raise.
        """
        state = self._state
        if self._rows is not None:
            self._rows.begin()
        if self._snapshots is not None:
            self._tell(self._snapshots.started(self._layers, self._journal))
        self.is_runnable = True
        try:
            while True:
                self._drain_inbox()
                if state.is_done:
                    break
                op = self._choose(state)
                if op is WAIT:
                    self._wait()
                else:
                    self._execute(op)
        finally:
            self.is_runnable = False
        self._check_empty()
        return self.boundary

    # --- What arrives ---

    def _drain_inbox(self) -> None:
        inbox = self._inbox
        while not inbox.empty():
            self._accept(inbox.get_nowait())
        if self._abort_reason is not None:
            raise AbortedError(self._abort_reason)

    def _wait(self) -> None:
        what = awaited(self._state)
        if what is Awaited.SNAPSHOT:
            self._wait_for_snapshot()
            return
        peer = self._awaited_peer(what)
        is_inherent = self._schedule.delay == 0 and self._state.forwards.num_done == 0 and what is not Awaited.REDUCTION
        self._goodput.waits(BUBBLE if is_inherent else waiting_for(peer), perf_counter())
        try:
            item = self._next_item(peer, self._patience_s)
        except Empty:
            raise UnavailableError(peer, f"no {what.value} arrived for {self._patience_s:g} s") from None
        self._accept(item)

    def _wait_for_snapshot(self) -> None:
        """Only the writer keeps the next update from running. It is given up rather than waited for in vain."""
        assert self._snapshots is not None
        began = perf_counter()
        self._goodput.waits(SNAPSHOT, began)
        item: object = None
        try:
            item = self._next_item("the snapshot writer", SNAPSHOT_PATIENCE_S)
        except Empty:
            item = self._snapshots.give_up()
            self._state.updates_held = False
        self._snapshots.waited(perf_counter() - began)
        if item is not None:
            self._accept(item)

    def _next_item(self, peer: str, patience_s: float) -> object:
        self.waiting_for, self.is_runnable = peer, False
        try:
            return self._inbox.get(timeout=patience_s)
        finally:
            self.waiting_for, self.is_runnable = "", True

    def _awaited_peer(self, what: Awaited) -> str:
        state, siblings = self._state, self._siblings
        link: Link | None = None
        match what:
            case Awaited.INPUT if not self._schedule.is_first:
                link = self._upstream[state.forwards.lowest_next]
            case Awaited.GRADIENT:
                link = self._downstream[state.backwards.lowest_next]
            case Awaited.REDUCTION if siblings is not None:
                return siblings.awaited(state.version) or "this stage"
            case Awaited.CLIP_TOTAL if siblings is not None and not self._schedule.is_lead:
                return siblings.lead
            case Awaited.CLIP_TOTAL:
                link = self._links.upstream_lead or self._links.downstream_lead
        return link.peer if link is not None else "the coordinator"

    def _accept(self, item: object) -> None:
        if isinstance(item, Frame):
            self._accept_frame(item)
        elif isinstance(item, LinkLost):
            raise (UnreachedError if item.was_unreached else UnavailableError)(item.peer, item.reason)
        elif isinstance(item, SnapshotEnded) and self._snapshots is not None:
            self._snapshots.ended(item)
            self._tell(item)
        else:
            self._handle(item)

    def _tell(self, item: SnapshotEnded | None) -> None:
        """Hold the updates as long as a snapshot is read; pass on what became of one."""
        assert self._snapshots is not None
        self._state.updates_held = self._snapshots.is_reading
        if item is not None:
            self._handle(item)

    def _accept_frame(self, frame: Frame) -> None:
        if frame.generation != self._context.generation:
            self.num_stale_frames += 1
            return
        self._check_form(frame)
        if frame.codec:
            frame = decoded(frame, dtype=self._context.train.dtype, device=self._context.device)
        batch, microbatch, state = frame.batch, frame.microbatch, self._state
        match frame.kind:
            case FrameKind.ACTIVATION:
                self._require(frame, state.expects_input(batch, microbatch))
                hidden, targets = frame.tensors
                self._inputs[batch, microbatch] = (self._received(hidden), self._received(targets))
                state.input_arrived(batch, microbatch)
            case FrameKind.GRADIENT:
                self._require(frame, state.expects_gradient(batch, microbatch))
                self._output_gradients[batch, microbatch] = self._received(frame.tensors[0])
                state.gradient_arrived(batch, microbatch)
            case FrameKind.NORM_SQUARES:
                is_next = batch >= state.totals_below and self._squares.expects_downstream(batch)
                self._require(frame, self._schedule.has_clip and self._schedule.is_lead and is_next)
                self._pass_squares(batch, self._squares.add_downstream(batch, frame.tensors[0].tolist()))
            case FrameKind.NORM_TOTAL:
                has_sender = not (self._schedule.is_first and self._schedule.is_lead)
                self._require(frame, has_sender and state.expects_clip_total(batch))
                self._learn_total(batch, frame.tensors[0].item())
            case FrameKind.SUMS | FrameKind.REDUCED | FrameKind.LOSSES | FrameKind.STOP:
                self._accept_from_sibling(frame)

    def _accept_from_sibling(self, frame: Frame) -> None:
        siblings = self._siblings
        assert siblings is not None
        newest_batch = self._state.backwards.batch + self._schedule.delay
        self._require(frame, siblings.expects(frame, newest_batch=newest_batch))
        if frame.kind is FrameKind.STOP:
            try:
                self._state.stop_at(int(frame.tensors[0].item()))
            except ValueError as error:
                raise ProtocolError(self._sender(frame), str(error)) from error
        elif frame.kind is FrameKind.LOSSES:
            assert self._rows is not None
            self._rows.add(frame.batch, siblings.received_losses(frame), frame.tensors[0])
        else:
            self._reduced_if_whole(frame.batch, siblings.received(frame, self._received(frame.tensors[0])))

    def _check_form(self, frame: Frame) -> None:
        if self._siblings is not None and frame.kind in _REPLICA_KINDS:
            violation = self._siblings.violation(frame)
        else:
            forms = [(tensor.dtype, tensor.shape) for tensor in frame.tensors]
            violation = self._contract.violation(frame.kind, forms, frame.codec)
        if violation is not None:
            raise ProtocolError(self._sender(frame), violation)

    def _require(self, frame: Frame, is_expected: bool) -> None:
        if not is_expected:
            what = f"{frame.kind.name} of batch {frame.batch}, microbatch {frame.microbatch}"
            raise ProtocolError(self._sender(frame), f"sent an unexpected {what}")

    def _sender(self, frame: Frame) -> str:
        if frame.kind in _REPLICA_KINDS or (frame.kind is FrameKind.NORM_TOTAL and not self._schedule.is_lead):
            return (self._siblings and self._siblings.peer(frame)) or "an unknown peer"
        links = self._links.upstream if frame.kind in DOWNSTREAM_KINDS else self._links.downstream
        link = links.get(frame.microbatch % self._schedule.num_groups)
        return link.peer if link is not None else "an unknown peer"

    def _received(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._context.device, non_blocking=True)

    def _frame(self, kind: FrameKind, batch: int, microbatch: int, tensors: tuple[Tensor, ...]) -> Frame:
        return Frame(kind, self._context.generation, Batch(batch), Microbatch(microbatch), tensors)

    # --- What is done ---

    def _execute(self, op: Op) -> None:
        num_versions_live = self._state.num_versions_live
        started, self.running = perf_counter(), type(op)
        self._goodput.operates(op.batch, started)
        match op:
            case Forward(batch, microbatch):
                version = self._forward(batch, microbatch)
            case Backward(batch, microbatch):
                version = self._backward(batch, microbatch)
            case Update(batch):
                version = self._update(batch)
        ended, self.running = perf_counter(), None
        self.op_times[type(op)].add(ended - started)
        self._goodput.operated(ended - started)
        self.num_ops_done += 1
        if self._recorder is not None:
            self._recorder.record(
                op, version=version, num_versions_live=num_versions_live, started=started, ended=ended
            )
        if self._on_operation is not None:
            self._on_operation(op)

    def _forward(self, batch: int, microbatch: int) -> int:
        key = (batch, microbatch)
        version = weight_version(batch, self._schedule.delay)
        inputs, targets = self._inputs.pop(key) if self._tokens is None else self._drawn(batch, microbatch)
        output = self._graph.forward(key, inputs, targets, version=version)
        self._state.forwarded(batch, microbatch)
        link = self._downstream[microbatch]
        if link is not None:
            link.send(self._frame(FrameKind.ACTIVATION, batch, microbatch, (output, targets)))
        else:
            self._losses.add(batch, microbatch, output)
        return version

    def _drawn(self, batch: int, microbatch: int) -> tuple[Tensor, Tensor]:
        assert self._tokens is not None
        train = self._context.train
        inputs, targets = self._tokens.microbatch(
            seed=self._context.seed,
            batch=batch,
            microbatch=microbatch,
            size=train.microbatch_size,
            length=train.sequence_length,
        )
        return self._received(inputs), self._received(targets)

    def _backward(self, batch: int, microbatch: int) -> int:
        key = (batch, microbatch)
        output_gradient = self._output_gradients.pop(key, None)
        version = self._graph.version_of(key)
        gradients, input_gradient = self._graph.backward(key, output_gradient)
        link = self._upstream[microbatch]
        if link is not None:
            assert input_gradient is not None
            link.send(self._frame(FrameKind.GRADIENT, batch, microbatch, (input_gradient,)))
        used = [tensor for tensor in (output_gradient, input_gradient) if tensor is not None]
        self._sums.add(microbatch, gradients, others=used)
        if self._state.backwarded(batch, microbatch):
            self._end_batch(batch)
        return version

    def _end_batch(self, batch: int) -> None:
        """This worker's last backward of a batch is done."""
        siblings = self._siblings
        if self._schedule.is_last:
            microbatches, losses = self._losses.take(batch)
            if self._rows is not None:
                self._rows.add(batch, microbatches, losses)
            elif siblings is not None:
                siblings.send_losses(batch, losses)
        gradients = self._sums.reduce() if siblings is None else siblings.end_batch(batch, self._sums.take())
        self._reduced_if_whole(batch, gradients)

    def _reduced_if_whole(self, batch: int, gradients: list[Tensor] | None) -> None:
        """The groups of a batch are added up, once there are gradients."""
        if gradients is None:
            return
        self._reduced[batch] = gradients
        assert len(self._reduced) <= 1 + self._schedule.delay, "too many gradient sets are waiting"
        self._state.groups_reduced(batch)
        if self._schedule.has_clip and self._schedule.is_lead:
            by_layer = split_by_layer(self._layers, gradients)
            own = [layer_square(of_layer) for of_layer in reversed(by_layer)]
            self._pass_squares(batch, self._squares.add_own(batch, own))

    def _update(self, batch: int) -> int:
        gradients = self._reduced.pop(batch)
        if self._schedule.has_clip:
            coefficient = clip_coefficient(self._total_squares.pop(batch), self._context.train.clip_norm)
            torch._foreach_mul_(gradients, coefficient)
        self._graph.update(batch, gradients)
        self._state.updated(batch)
        self._goodput.updated(batch)
        if self._snapshots is not None and self.boundary < self._state.stop:
            self._tell(self._snapshots.reached(self.boundary, self._layers, self._journal))
        return batch

    # --- The norm of the gradient ---

    def _pass_squares(self, batch: int, squares: list[float] | None) -> None:
        """All squares of this stage and of those downstream, once they are there: upstream, or into the total."""
        if squares is None:
            return
        if self._links.upstream_lead is not None:
            frame = self._frame(FrameKind.NORM_SQUARES, batch, 0, (torch.tensor(squares, dtype=torch.float64),))
            self._links.upstream_lead.send(frame)
            return
        num_layers = len(layer_names(self._context.model))
        if len(squares) != num_layers:
            peer = self._links.downstream_lead.peer if self._links.downstream_lead is not None else "this stage"
            raise ProtocolError(peer, f"squares of {len(squares)} layers arrived, the model has {num_layers}")
        self._learn_total(batch, fold(squares))

    def _learn_total(self, batch: int, total: float) -> None:
        self._total_squares[batch] = total
        self._state.clip_total_known(batch)
        if not self._schedule.is_lead:
            return
        frame = self._frame(FrameKind.NORM_TOTAL, batch, 0, (torch.tensor(total, dtype=torch.float64),))
        if self._links.downstream_lead is not None:
            self._links.downstream_lead.send(frame)
        if self._siblings is not None:
            self._siblings.send_to_all(frame)

    def _check_empty(self) -> None:
        """At a boundary nothing is under way: what is left over would be lost or counted twice."""
        left = {
            "schedule": not self._state.is_empty,
            "activations": bool(self._inputs),
            "gradients": bool(self._output_gradients),
            "graphs": not self._graph.is_empty,
            "gradient sums": not self._sums.is_empty,
            "groups' sums": self._siblings is not None and not self._siblings.is_empty,
            "reduced gradients": bool(self._reduced),
            "squares": not self._squares.is_empty or bool(self._total_squares),
            "losses": not self._losses.is_empty or not (self._rows is None or self._rows.is_empty),
        }
        assert not any(left.values()), f"left over at boundary {self.boundary}: {[k for k, v in left.items() if v]}"
        assert all(layer.boundary == self.boundary for layer in self._layers)
