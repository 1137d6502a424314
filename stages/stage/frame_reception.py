"""Takes each frame that arrives at a stage: checks it, begins its copy to the device, and puts it where an operation
waits for it.

A frame of another generation is dropped. One that breaks the contract or the schedule is an error that names its
sender.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.stages.data.microbatch import Microbatch
from headway.stages.device.device import DeviceCopy
from headway.stages.device.run_events import numbers_of
from headway.stages.errors import ProtocolError, UnavailableError, UnreachedError
from headway.stages.links.codec import Codec, num_coded_tensors
from headway.stages.links.compression import decode
from headway.stages.links.frame_contract import DOWNSTREAM_KINDS, REPLICA_KINDS
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.schedule.next_op import Awaited
from headway.stages.stage.batch_gradients import BatchGradients
from headway.stages.stage.journal_writer import JournalWriter
from headway.stages.stage.relays import EndRelay, NormRelay, StageRun


@dataclass(frozen=True, slots=True)
class ArrivedGradient:
    """The gradient of hidden states, on its way to the device."""

    copy: DeviceCopy
    codec: Codec

    def taken(self, dtype: str) -> Tensor:
        """Return the gradient, decoded."""
        return decode(self.copy.take(), self.codec, getattr(torch, dtype))


@dataclass(frozen=True, slots=True)
class ArrivedMicrobatch:
    """Hidden states with what belongs to them, on their way to the device."""

    copy: DeviceCopy
    """Of what this stage reads."""
    codec: Codec
    passing: tuple[Tensor, ...] = ()
    """Targets that only pass through this stage: they stay where they arrived."""

    def taken(self, dtype: str) -> Microbatch:
        """Return the microbatch, its hidden states decoded."""
        tensors = self.copy.take()
        num_coded = num_coded_tensors(self.codec)
        hidden = decode(tensors[:num_coded], self.codec, getattr(torch, dtype))
        return Microbatch.of((hidden, *tensors[num_coded:], *self.passing))


class FrameReception:
    """Of one executor, in its thread."""

    def __init__(
        self, run: StageRun, *, gradients: BatchGradients, norm: NormRelay, end: EndRelay, rows: JournalWriter | None
    ) -> None:
        self._device = run.device
        self._events = run.events
        self._context = run.context
        self._contract = run.context.contract
        self._links = run.links
        self._state = run.state
        self._schedule = run.state.schedule
        self._siblings = run.siblings
        self._gradients = gradients
        self._norm = norm
        self._end = end
        self._rows = rows
        self.inputs: dict[tuple[int, int], ArrivedMicrobatch] = {}
        """(batch, microbatch) to what has arrived."""
        self.evaluations: dict[tuple[int, int], ArrivedMicrobatch | Frame] = {}
        """(batch, number of the held-out microbatch) to what has arrived. Those of the job's end may come all at once,
        since no gradient is awaited in between: they wait as frames, and take no memory of the device.
        """
        self.output_gradients: dict[tuple[int, int], ArrivedGradient] = {}
        """(batch, microbatch) to the gradient that has arrived."""
        self.num_stale_frames = 0

    @property
    def is_empty(self) -> bool:
        """Return whether everything that arrived was used."""
        return not (self.inputs or self.evaluations or self.output_gradients)

    def accept(self, item: Frame | LinkLost) -> None:
        """Something that a link has put into the inbox. Raises UnavailableError, ProtocolError."""
        if isinstance(item, LinkLost):
            raise (UnreachedError if item.was_unreached else UnavailableError)(item.peer, item.reason)
        frame = item
        if frame.generation != self._context.generation:
            self.num_stale_frames += 1
            return
        self._check_form(frame)
        batch, microbatch, state = frame.batch, frame.microbatch, self._state
        match frame.kind:
            case FrameKind.ACTIVATION:
                is_evaluated = self._context.train.evaluates(batch, microbatch)
                has_come = (batch, microbatch) in self.evaluations
                self._require(frame, state.expects_input(batch, microbatch) and has_come == is_evaluated)
                self.inputs[batch, microbatch] = self._arrived_input(frame)
                state.input_arrived(batch, microbatch)
            case FrameKind.EVALUATION:
                is_beside = self._context.train.evaluates(batch, microbatch)
                self._require(frame, state.expects_held_out(batch, microbatch, is_beside=is_beside))
                self.evaluations[batch, microbatch] = frame if batch == state.end else self._arrived_input(frame)
                state.held_out_arrived(batch, microbatch)
            case FrameKind.GRADIENT:
                self._require(frame, state.expects_gradient(batch, microbatch))
                self.output_gradients[batch, microbatch] = ArrivedGradient(
                    self._device.copy_in(frame.tensors), frame.codec
                )
                state.gradient_arrived(batch, microbatch)
            case FrameKind.NORM_SQUARES:
                self._require(frame, self._norm.expects_squares(batch))
                self._norm.squares_arrived(batch, numbers_of(frame.tensors[0]))
            case FrameKind.NORM_TOTAL:
                self._require(frame, self._norm.expects_total(batch))
                self._norm.total_arrived(batch, *numbers_of(frame.tensors[0]))
            case FrameKind.TIED_SUMS:
                self._require(frame, self._gradients.expects_tied(frame))
                copy = self._device.copy_in(frame.tensors)
                self._gradients.tied_arrived(frame, copy)
                self._events.when_arrived(copy, self._gradients.join_ties)
            case FrameKind.JOB_END:
                self._require(frame, self._end.expects(batch))
                self._end_arrived(frame)
            case _:
                self._accept_from_sibling(frame)

    def take_evaluation(self, batch: int, microbatch: int) -> Microbatch | None:
        """Return held-out text that has arrived; None: the batch has none."""
        held_out = self.evaluations.pop((batch, microbatch), None)
        if isinstance(held_out, Frame):
            held_out = self._arrived_input(held_out)
        return None if held_out is None else held_out.taken(self._context.train.dtype)

    def awaited_peer(self, what: Awaited) -> str:
        """Who has to send what an idle stage waits for."""
        state, siblings = self._state, self._siblings
        num_groups = self._schedule.num_groups
        link = None
        match what:
            case Awaited.INPUT if not self._schedule.is_first:
                held_out = state.next_held_out
                awaited = held_out if held_out >= 0 else state.forwards.lowest_next
                link = self._links.upstream.get(awaited % num_groups)
            case Awaited.GRADIENT:
                link = self._links.downstream.get(state.backwards.lowest_next % num_groups)
            case Awaited.REDUCTION if (other_end := self._gradients.awaited_tie(state.version)) is not None:
                return other_end
            case Awaited.REDUCTION if siblings is not None:
                return siblings.awaited(state.version) or "this stage"
            case Awaited.SHARES if siblings is not None:
                return siblings.awaited_share(state.version) or "this stage"
            case Awaited.LOSSES:
                late = siblings and siblings.awaited_losses(state.losses_below, is_end=self._is_end(state.losses_below))
                return late or self._device.name
            case Awaited.CLIP_TOTAL | Awaited.JUDGEMENT if siblings is not None and not self._schedule.is_lead:
                return siblings.lead
            case Awaited.JUDGEMENT:
                link = self._links.downstream_lead
            case Awaited.CLIP_TOTAL:
                link = self._links.upstream_lead or self._links.downstream_lead
        return link.peer if link is not None else "the coordinator"

    def _end_arrived(self, frame: Frame) -> None:
        end, best_batch = map(int, numbers_of(frame.tensors[0]))
        try:
            self._end.arrived(frame.batch, end=end, best_batch=best_batch)
        except ValueError as error:
            raise ProtocolError(self._sender(frame), str(error)) from error

    def _accept_from_sibling(self, frame: Frame) -> None:
        siblings = self._siblings
        assert siblings is not None
        self._require(frame, siblings.expects(frame, newest_batch=self._state.newest_elsewhere))
        if frame.kind is FrameKind.STOP:
            try:
                self._state.stop_at(int(*numbers_of(frame.tensors[0])))
            except ValueError as error:
                raise ProtocolError(self._sender(frame), str(error)) from error
        elif frame.kind is FrameKind.LOSSES:
            self._take_losses(frame, siblings.received_losses(frame, is_end=self._is_end(frame.batch)))
        else:
            copy, batch = self._device.copy_in(frame.tensors), frame.batch
            if frame.kind is FrameKind.UPDATE_SHARE:
                siblings.received_share(frame, copy)
                self._events.when_arrived(copy, lambda: self.shares_if_whole(batch))
                return
            self._gradients.arrived(frame, copy)
            self._events.when_arrived(copy, lambda: self._gradients.go_on(batch))

    def _is_end(self, batch: int) -> bool:
        return batch == self._state.end

    def shares_if_whole(self, batch: int) -> None:
        """Tell the schedule once that the update of a batch has the shares of all replicas, if that is so.

        The last share may be seen on the device before its own event says that it is there.
        """
        is_news = batch >= self._state.shares_below
        if self._siblings is not None and is_news and self._siblings.has_shares(batch):
            self._state.shares_known(batch)

    def _take_losses(self, frame: Frame, microbatches: Sequence[int]) -> None:
        """A link between devices brings them on the device, and they come to the host late."""
        rows, batch = self._rows, frame.batch
        assert rows is not None
        if len(frame.tensors[0]) != len(microbatches):
            what = f"LOSSES of {len(frame.tensors[0])} microbatches instead of {len(microbatches)}"
            raise ProtocolError(self._sender(frame), what)
        if self._device.is_on_host(frame.tensors[0]):
            rows.add(batch, microbatches, numbers_of(frame.tensors[0]))
        else:
            self._events.when_copied(frame.tensors, lambda copied: rows.add(batch, microbatches, numbers_of(copied[0])))

    def _check_form(self, frame: Frame) -> None:
        if self._siblings is not None and frame.kind in REPLICA_KINDS:
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
        is_from_lead = frame.kind in (FrameKind.NORM_TOTAL, FrameKind.JOB_END) and not self._schedule.is_lead
        if frame.kind in REPLICA_KINDS or is_from_lead:
            return (self._siblings and self._siblings.peer(frame)) or "an unknown peer"
        if frame.kind is FrameKind.TIED_SUMS:
            other_end = self._links.tied.get(frame.microbatch)
            return other_end.peer if other_end is not None else "an unknown peer"
        links = self._links.upstream if frame.kind in DOWNSTREAM_KINDS else self._links.downstream
        link = links.get(frame.microbatch % self._schedule.num_groups)
        return link.peer if link is not None else "an unknown peer"

    def _arrived_input(self, frame: Frame) -> ArrivedMicrobatch:
        """Only the last stage reads the targets, so they go to no other device."""
        if self._context.is_last:
            return ArrivedMicrobatch(self._device.copy_in(frame.tensors), frame.codec)
        num_passing = 2 if self._context.train.has_mask else 1
        read, passing = frame.tensors[:-num_passing], frame.tensors[-num_passing:]
        return ArrivedMicrobatch(self._device.copy_in(read), frame.codec, passing)
