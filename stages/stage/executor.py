"""Does a stage's operations: forward, backward, update. Each result goes to the neighbours, the sums or the journal.

`loop.py` says which operation is next, `frame_reception.py` takes what arrives.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headway.stages.data.microbatch import Microbatch
from headway.stages.device.cpu import CpuDevice
from headway.stages.device.device import StageDevice
from headway.stages.device.run_events import DeviceDone, Inbox, RunEvents, numbers_of
from headway.stages.ids import Batch, Boundary
from headway.stages.links.link import Frame, FrameKind, LinkLost
from headway.stages.schedule.operations import Backward, Forward, Op, Orthogonalize, Update
from headway.stages.schedule.schedule_state import ScheduleState
from headway.stages.spec import computed_layers
from headway.stages.stage.batch_gradients import BatchGradients
from headway.stages.stage.content import StageContent
from headway.stages.stage.context import StageContext, StageLinks
from headway.stages.stage.drawn_tokens import DrawnTokens
from headway.stages.stage.frame_reception import FrameReception
from headway.stages.stage.graph import StageGraph
from headway.stages.stage.journal_writer import BatchLosses, JournalWriter
from headway.stages.stage.launched_ops import LaunchedOps, StageObserver
from headway.stages.stage.relays import EndRelay, NormRelay, StageRun
from headway.stages.stage.replicas import Siblings
from headway.stages.state.journal import Journal
from headway.stages.state.snapshot_writer import SnapshotEnded
from headway.stages.telemetry.layer_times import LayerTimes


class Executor:
    """One stage, or one replica of it, from one boundary to the next stop. Belongs to the thread of its loop."""

    def __init__(
        self,
        context: StageContext,
        content: StageContent,
        links: StageLinks,
        *,
        observer: StageObserver,
        make_graph: Callable[..., StageGraph] = StageGraph,
        device: StageDevice | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        """device: None: the CPU. inbox: hears what another device has done, and hands it to `accept`."""
        _check_fit(context, content, links)
        device = device or CpuDevice()
        assert device.torch_device == context.device
        train, layers, journal = context.train, content.layers, content.journal
        self.context = context
        self.observer = observer
        self.snapshots = content.snapshots
        self.state = ScheduleState(context.schedule)
        self._content = content
        self.device = device
        self.events = RunEvents(device, inbox)
        self.ops = LaunchedOps(device, self.events, observer)
        self._is_settling = False
        self._tokens = None if content.tokens is None else DrawnTokens(content.tokens, context, device)
        self._is_last = context.is_last
        self._upstream, self._downstream = map(context.by_microbatch, (links.upstream, links.downstream))
        self._siblings = Siblings(context, layers, links.siblings) if context.has_replicas else None
        self._losses = BatchLosses()
        self._rows = None if journal is None else self._writer_of(journal)
        self.state.awaits_losses = self._rows is not None
        run = StageRun(context, self.state, links, self._siblings, device, self.events)
        self._norm = NormRelay(run, layers, self._norm_known)
        self._gradients = BatchGradients(run, self._norm)
        self._end = EndRelay(run)
        self._reception = FrameReception(
            run, gradients=self._gradients, norm=self._norm, end=self._end, rows=self._rows
        )
        self.awaited_peer = self._reception.awaited_peer
        self.layer_times = LayerTimes(
            [context.model.kind_of(name) for name in computed_layers(context.layers)],
            device,
            recompute=train.recompute,
            has_updates=context.update_shares is None,
        )
        self._graph = make_graph(
            layers,
            context.model,
            train,
            is_first=context.is_first,
            is_last=context.is_last,
            seed=context.seed,
            times=self.layer_times,
        )

    def _writer_of(self, journal: Journal) -> JournalWriter:
        return JournalWriter(
            journal,
            self.context,
            on_judged=self._losses_known,
            on_losses=self.state.losses_known,
            on_batch=self.observer.batch_done,
        )

    @property
    def boundary(self) -> Boundary:
        """The newest boundary that this stage has reached. From any thread."""
        return Boundary(self.state.version)

    @property
    def batch(self) -> Batch:
        """The batch whose backwards are under way, or the job's last one. From any thread."""
        return Batch(min(self.state.backwards.batch, self.state.end - 1))

    @property
    def num_stale_frames(self) -> int:
        """Frames of other generations. They were dropped."""
        return self._reception.num_stale_frames

    @property
    def best_batch(self) -> Batch | None:
        """The best evaluation's batch, if evaluations end the job at the boundary that is reached."""
        return self._end.best_batch

    # --- Between operations ---

    def accept(self, item: Frame | LinkLost | DeviceDone) -> None:
        """Take what a link or the device has put into the inbox."""
        if isinstance(item, DeviceDone):
            self.events.heard(item)
        else:
            self._reception.accept(item)

    def settle(self) -> bool:
        """Return whether the device has done everything, and the links have every frame. Call it at the boundary."""
        if not self._is_settling and not self.device.is_immediate:
            self._is_settling = True
            self.events.when_copied((), lambda _: None)  # in line after the frames that leave
        return self.events.num_pending == 0

    def close(self) -> None:
        """End what runs beside the stage's thread, and forget what the device has not done."""
        self.events.close()
        if self._tokens is not None:
            self._tokens.close()

    def begin(self) -> None:
        """The run begins: the journal is cut at the boundary, and a first snapshot may be due."""
        if self._rows is not None:
            self._rows.begin()
            self._end.began(self._rows.tally)
        if self.snapshots is not None:
            self.snapshots.attach(self.events, self._snapshot_copied)
            self.snapshots.started(self._content.layers, self._content.journal)
            self.state.updates_held = self.snapshots.is_reading

    def end(self) -> Boundary:
        """The stop boundary is reached. At a boundary nothing is under way: a rest would be lost or counted twice."""
        left = {
            "schedule": not self.state.is_empty,
            "activations or gradients": not self._reception.is_empty,
            "graphs": not self._graph.is_empty,
            "gradient sums": not self._gradients.is_empty,
            "squares": not self._norm.is_empty,
            "work of the device": self.events.num_pending > 0,
            "losses": not self._losses.is_empty or not (self._rows is None or self._rows.is_empty),
        }
        assert not any(left.values()), f"left over at boundary {self.boundary}: {[k for k, v in left.items() if v]}"
        assert all(layer.boundary == self.boundary for layer in self._content.layers)
        return self.boundary

    def choose_stop(self) -> Boundary:
        """First stage, its lead: stop as soon as the batch that has begun is done. Returns where."""
        before = self.state.stop
        boundary = self.state.choose_stop()
        if self._siblings is not None and boundary < before:
            # Ahead of the sums that would let them begin the next batch; the coordinator's word may come after that.
            stop = self.context.frame(FrameKind.STOP, self.state.backwards.batch, 0, torch.tensor(boundary))
            self._siblings.send_to_all(stop)
        return Boundary(boundary)

    def stop_at(self, boundary: Boundary) -> None:
        """Stop where the first stage has chosen. Raises ValueError when that is past."""
        self.state.stop_at(boundary)

    def snapshot_ended(self, item: SnapshotEnded) -> None:
        """A snapshot is over, of whatever generation: the next update may run if it was this one's."""
        if self.snapshots is not None:
            self.snapshots.ended(item)
            self.state.updates_held = self.snapshots.is_reading

    def _snapshot_copied(self) -> None:
        assert self.snapshots is not None
        self.state.updates_held = self.snapshots.is_reading

    # --- Operations ---

    def execute(self, op: Op) -> None:
        """Do one operation that the schedule allows now."""
        num_versions_live = self.state.num_versions_live
        self._is_settling = False
        self.ops.begins(op)
        match op:
            case Forward(batch, microbatch):
                version = self._forward(batch, microbatch)
            case Backward(batch, microbatch):
                version = self._backward(batch, microbatch)
            case Orthogonalize(batch):
                version = self._orthogonalize(batch)
            case Update(batch):
                version = self._update(batch)
        self.ops.launched(op, version=version, num_versions_live=num_versions_live)

    def _forward(self, batch: int, microbatch: int) -> int:
        if batch == self.state.end:
            return self._evaluate_end(batch, microbatch)
        key = (batch, microbatch)
        version = self.state.schedule.weight_version(batch)
        rows, held_out = self._input(batch, microbatch)
        link = self._downstream[microbatch]
        if held_out is not None:
            self._evaluate(batch, microbatch, held_out, version=version)
        output = self._graph.forward(key, rows, version=version)
        self.state.forwarded(batch, microbatch)
        if link is not None:
            link.send(
                self.context.frame(FrameKind.ACTIVATION, batch, microbatch, *replace(rows, inputs=output).tensors)
            )
        else:
            self._losses.add(batch, microbatch, output)
        return version

    def _evaluate(self, batch: int, microbatch: int, rows: Microbatch, *, version: int) -> None:
        """Compute a held-out microbatch. It comes first: then the other's graph takes no memory yet."""
        output, link = self._graph.evaluate(rows, version=version), self._downstream[microbatch]
        if link is not None:
            tensors = replace(rows, inputs=output).tensors
            link.send(self.context.frame(FrameKind.EVALUATION, batch, microbatch, *tensors))
        else:
            self._losses.add(batch, self.context.train.microbatches + microbatch, output)

    def _evaluate_end(self, batch: int, microbatch: int) -> int:
        """Compute a held-out microbatch on the job's last weights."""
        if self._tokens is not None:
            rows: Microbatch | None = self._tokens.take_held_out(microbatch)
        else:
            rows = self._reception.take_evaluation(batch, microbatch)
        assert rows is not None, f"held-out microbatch {batch}.{microbatch} has not arrived"
        self._evaluate(batch, microbatch, rows, version=batch)
        self.state.forwarded(batch, microbatch)
        if self._is_last and self.state.next_held_out < 0:
            self._tell_losses(batch)
        return batch

    def _input(self, batch: int, microbatch: int) -> tuple[Microbatch, Microbatch | None]:
        """Return a microbatch, and the held-out one of its number if the batch is evaluated."""
        if self._tokens is not None:
            return self._tokens.take(batch, microbatch)
        held_out = self._reception.take_evaluation(batch, microbatch)
        return self._reception.inputs.pop((batch, microbatch)).taken(self.context.train.dtype), held_out

    def _backward(self, batch: int, microbatch: int) -> int:
        key = (batch, microbatch)
        arrived = self._reception.output_gradients.pop(key, None)
        output_gradient = None if arrived is None else arrived.taken(self.context.train.dtype)
        version = self._graph.version_of(key)
        gradients, input_gradient = self._graph.backward(key, output_gradient)
        link = self._upstream[microbatch]
        if link is not None:
            if input_gradient is None:
                # Upstream is a frozen embedding alone. Its schedule waits for a gradient that nobody reads.
                input_gradient = self._unread_gradient()
            link.send(self.context.frame(FrameKind.GRADIENT, batch, microbatch, input_gradient))
        used = [tensor for tensor in (output_gradient, input_gradient) if tensor is not None]
        self._gradients.add(microbatch, gradients, others=used)
        if self.state.backwarded(batch, microbatch):
            if self._is_last:
                self._tell_losses(batch)
            self._gradients.end_batch(batch)
        return version

    def _unread_gradient(self) -> Tensor:
        """Return zeros in place of the gradient of the stage's input."""
        context = self.context
        train, model = context.train, context.model
        shape = (train.hidden_rows, train.sequence_length, model.hidden_size)
        return torch.zeros(shape, dtype=getattr(torch, train.dtype), device=context.device)

    def _tell_losses(self, batch: int) -> None:
        """Into the journal, or to the lead, who has it."""
        microbatches, losses = self._losses.take(batch)
        rows = self._rows
        if rows is not None:

            def known(copied: tuple[Tensor, ...]) -> None:
                rows.add(batch, microbatches, numbers_of(copied[0]))

            self.events.when_copied((losses,), known)
        elif self._siblings is not None:
            self._siblings.send_losses(batch, losses)

    def _losses_known(self, batch: int) -> None:
        """An evaluation among them decides about the job's end without waiting for the norm."""
        if self._rows is not None and self.state.expects_judgement(batch):
            self._end.judged(batch, self._rows.tally)

    def _norm_known(self, batch: int, norm: float) -> None:
        if self._rows is not None:
            self._rows.add_norm(batch, norm)

    def _orthogonalize(self, batch: int) -> int:
        assert self._siblings is not None
        assert self.context.update_shares is not None
        own = self.context.update_shares.of(self.context.replica_index)
        share = self._graph.share_of_update(batch, self._gradients.clipped(batch), own)
        self.state.orthogonalized(batch)
        self._siblings.share(batch, share)
        self._reception.shares_if_whole(batch)
        return batch

    def _update(self, batch: int) -> int:
        gradients, shares = self._gradients.take(batch), self.context.update_shares
        if shares is None:
            self._graph.update(batch, gradients)
        else:
            assert self._siblings is not None
            arrived = self._siblings.take_shares(batch)
            self._graph.update_from_shares(batch, gradients, owners=shares.owners, shares=arrived)
        self.state.updated(batch)
        if self.snapshots is not None and self.boundary < self.state.stop:
            self.snapshots.reached(self.boundary, self._content.layers, self._content.journal)
            self.state.updates_held = self.snapshots.is_reading
        return batch


def _check_fit(context: StageContext, content: StageContent, links: StageLinks) -> None:
    assert (content.tokens is not None) == context.is_first == (not links.upstream)
    assert context.is_last == (not links.downstream)
    assert (content.journal is not None) == (context.is_last and context.is_lead)
    assert context.has_replicas == bool(links.siblings)
    assert context.has_tied_end == bool(links.tied)
    assert tuple(layer.name for layer in content.layers) == context.layers
    assert all(layer.boundary == context.boundary for layer in content.layers), "a layer is at another boundary"
