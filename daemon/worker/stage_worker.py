"""Executes the daemon's orders in the worker's main thread: prepares, runs and writes one stage at a time.

worker/session.py knows which layers are held and which orders are allowed; this module does the work.
"""

import gc
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import structlog
import torch

from headway.daemon.fault_points import LAYER_PLACE, is_armed
from headway.daemon.jobs.job import JobSpec
from headway.daemon.records.format import decode
from headway.daemon.records.journal_entry import journal_entry
from headway.daemon.worker.control import WorkerControl
from headway.daemon.worker.device import WorkerDevice
from headway.daemon.worker.held_layers import HeldSession, live_sources, load_stage, write_layers
from headway.daemon.worker.inbox import WorkerInbox, WorkerItem
from headway.daemon.worker.neighbours import Neighbours
from headway.daemon.worker.out_of_memory import damaged_path, fault_line, refusals_of_libraries, shortage_of
from headway.daemon.worker.output import WorkerOutput
from headway.daemon.worker.reports import add_layer_times, generation_failed
from headway.daemon.worker.session import OrderRefusedError, WorkerSession
from headway.daemon.worker.snapshot_reports import SnapshotReports
from headway.daemon.worker.stage_records import PacedGraph, RunObserver, StageRecords
from headway.daemon.worker.start_order import for_stage, start_context
from headway.optim.step_count import STEPS
from headway.proto import control_pb2
from headway.proto.control_pb2 import Heartbeat, Order, Report
from headway.stages.data.token_mixture import open_tokens
from headway.stages.device.run_events import DeviceDone
from headway.stages.early_stop import StopRule
from headway.stages.errors import (
    AbortedError,
    CompilationError,
    DamagedFileError,
    DataError,
    MissingPackageError,
    NonFiniteLossError,
    PeerError,
)
from headway.stages.ids import Batch, Boundary, LayerName
from headway.stages.links.collective.endpoint import CollectiveEndpoint
from headway.stages.links.grpc.endpoint import LinkEndpoint
from headway.stages.links.link import Frame, LinkLost
from headway.stages.model.compilation import compile_ahead
from headway.stages.model.decoder import build_layer
from headway.stages.model.determinism import configure
from headway.stages.stage.content import StageContent
from headway.stages.stage.executor import Executor
from headway.stages.stage.graph import StageGraph
from headway.stages.stage.loop import StageLoop
from headway.stages.state.journal import JournalRow
from headway.stages.state.snapshot_writer import SnapshotEnded
from headway.stages.telemetry.goodput import IDLE, REPLAN, Goodput

log = structlog.get_logger()

IDLE_S = 0.5
"""Idle time after which a worker measures its device; orders come first."""

_BAD_ORDERS = (OrderRefusedError, DataError, DamagedFileError, CompilationError, MissingPackageError, OSError)
"""Errors that make an order impossible and leave the worker usable."""


@dataclass(frozen=True, slots=True)
class _Run:
    """The run in progress, with the parts that orders and heartbeats ask."""

    executor: Executor
    loop: StageLoop[WorkerItem]
    observer: RunObserver


class StageWorker:
    """Executes one order after the other. `serve` runs in the main thread until Quit; any thread may call
    `heartbeat`.
    """

    def __init__(
        self,
        *,
        inbox: WorkerInbox,
        endpoint: LinkEndpoint,
        collective: CollectiveEndpoint,
        device: WorkerDevice,
        output: WorkerOutput,
        records: StageRecords,
    ) -> None:
        self._inbox = inbox
        self._endpoint = endpoint
        self._neighbours = Neighbours(endpoint, collective, inbox)
        self._device = device
        self._output = output
        self._records = records
        self._session: HeldSession = WorkerSession()
        self._control: WorkerControl | None = None
        self._run: _Run | None = None
        self._batch = -1
        """Batch at which the last run ended."""
        self._goodput = Goodput()
        self._snapshots = SnapshotReports(inbox, records, self._report)
        self._deferred: Order | None = None
        """Order that interrupted the run; it is executed next."""
        self._is_quitting = False

    def serve(self, control: WorkerControl) -> None:
        """Execute orders until Quit. Any error that is neither a bad order's nor a neighbour's is reported
        and raised.
        """
        self._control = control
        try:
            while not self._is_quitting:
                deferred, self._deferred = self._deferred, None
                # An order that ended the run was taken from the inbox inside the run, so it comes before the rest.
                self._take(deferred if deferred is not None else self._next())
        except Exception as error:
            self._report(self._failed(error, fault=fault_line(error)))
            control.flush()
            raise
        self._snapshots.let_go()

    def _next(self) -> WorkerItem:
        """Wait for the next item. A worker that stays idle measures its device first, if the daemon asked for it."""
        if self._device.is_to_be_measured and not self._session.job:
            try:
                return self._inbox.get(timeout=IDLE_S)
            except queue.Empty:
                self._device.measure()
        return self._inbox.get()

    def heartbeat(self) -> Heartbeat:
        """Return what this worker is doing now."""
        self._output.rotate()
        session, run, goodput = self._session, self._run, self._goodput
        beat = Heartbeat(
            job=session.job,
            generation=session.generation,
            device_speed=self._device.speed.float32,
            device_bfloat16_speed=self._device.speed.bfloat16,
        )
        if session.job:
            beat.typical_s, beat.num_replayed = self._records.typical_s, goodput.num_replayed
            beat.replan_s = goodput.replan_s
            beat.num_resumed = self._endpoint.num_resumed
            beat.seconds.update(goodput.seconds(perf_counter()))
            beat.broken_links.extend(self._neighbours.broken)
        if run is not None:
            beat.operations = run.observer.recent.num_recorded
            beat.runnable = run.loop.is_runnable
            beat.steps, beat.expected_s = STEPS.num_done, run.observer.expected_s
            beat.batch = run.executor.batch
            beat.waiting_for = awaited = run.loop.waiting_for
            beat.awaited_worker = self._neighbours.position_of(awaited) + 1
            measured = run.executor.layer_times.measured
            beat.peak_bytes, beat.num_samples = measured.peak_bytes, measured.num_samples
            add_layer_times(beat, measured.layers)
        return beat

    def _take(self, item: WorkerItem) -> None:
        """Handle one item of the inbox: between two operations of a run, or while no run is active."""
        run = self._run
        match item:
            # The executor decides about frames of a run; without a run they are late frames of the last one.
            case Frame() | LinkLost() | DeviceDone() if run is not None:
                run.executor.accept(item)
            case Frame():
                log.warning("idle_frame_dropped", kind=item.kind.name, generation=item.generation)
            case LinkLost():
                log.info("idle_link_lost", peer=item.peer, reason=item.reason)
            case DeviceDone():
                pass  # the last run was aborted before it heard of this
            case SnapshotEnded():
                if run is not None:
                    run.executor.snapshot_ended(item)
                if item.job == self._session.job:
                    self._snapshots.ended(item)
            case Order():
                self._obey(item)
            case BaseException():
                raise item

    # --- Orders -----------------------------------------------------------------------------------------------------

    def _obey(self, order: Order) -> None:
        kind = order.WhichOneof("order")
        if kind is None or kind == "quit":
            self._end_run_first(order)
            self._is_quitting = True
            return
        about = getattr(order, kind)
        generation = 0 if kind == "release" else about.generation
        try:
            with refusals_of_libraries():
                self._execute(kind, order)
        except torch.OutOfMemoryError as error:
            # Nothing has changed yet: what was being built goes with the error, and the next plan asks for less.
            self._ran_out_of_memory(about.job_name, generation, error, batch=-1)
        except _BAD_ORDERS as error:
            reason = " ".join(str(error).split())
            log.warning("order_refused", order=kind, job=about.job_name, generation=generation, reason=reason)
            refused = control_pb2.Refused(
                job=about.job_name,
                generation=generation,
                reason=f"{kind}: {reason}",
                hopeless=isinstance(error, MissingPackageError),
                damaged_path=damaged_path(error),
            )
            self._report(Report(refused=refused))

    def _execute(self, kind: str, order: Order) -> None:
        match kind:
            case "prepare":
                self._prepare(order.prepare)
            case "start":
                self._start(order)
            case "choose_stop":
                self._choose_stop(order.choose_stop)
            case "stop_at":
                self._stop_at(order.stop_at)
            case "write":
                self._write(order.write)
            case "release":
                self._release(order)
            case "space_snapshots":
                self._space_snapshots(order.space_snapshots)
            case "trim_journal":
                self._trim_journal(order.trim_journal)

    def _end_run_first(self, order: Order) -> None:
        """Abort the run, if one is active, and execute the order after it: both cannot happen at once."""
        if self._run is not None:
            self._deferred = order
            raise AbortedError(f"order {order.WhichOneof('order')}")

    def _prepare(self, order: control_pb2.Prepare) -> None:
        session = self._session
        session.admit_prepare(order.job_name, order.generation)
        try:
            spec = decode(order.job, JobSpec)
        except ValueError as error:
            raise OrderRefusedError(f"the job's spec cannot be read: {error}") from error
        device = self._device.claim(order.device_index)
        configure(spec.train, device)
        for layer in order.stage.layers:
            _check_layer(layer, spec)
        if spec.train.compile:
            compile_ahead(order.stage.layers, spec.model, spec.train, device)
        if self._run is None and not session.layers:  # otherwise the card is warm, and perhaps full
            self._device.warm_up(order.stage.layers, for_stage(spec, order.stage), on_failure=self._inbox.put)
        tokens = session.tokens
        is_other_data = session.spec is not None and session.spec.data != spec.data
        # Opening data reads its index, so open data is kept for every generation of the job.
        if order.data_paths and (tokens is None or is_other_data):
            names, states = [part.sha256 for part in spec.data.parts], order.data_states
            tokens = open_tokens(order.data_paths, names, spec.data.weights, verified=states)
        if order.log_path and order.job_name != session.job:
            self._output.redirect(Path(order.log_path))
        if not session.job:
            self._goodput = Goodput()
        session.did_prepare(order.job_name, order.generation, spec=spec, tokens=tokens)
        log.info("stage_prepared", job=order.job_name, generation=order.generation, stage=order.stage.index)
        self._report(Report(prepared=control_pb2.Prepared(job=order.job_name, generation=order.generation)))

    def _choose_stop(self, order: control_pb2.ChooseStop) -> None:
        session = self._session
        session.admit(order.job_name, order.generation)
        boundary = self._run.executor.choose_stop() if self._run is not None else session.boundary
        if boundary is None:
            raise OrderRefusedError("the run was cut off between two boundaries")
        log.info("stop_chosen", job=order.job_name, generation=order.generation, boundary=boundary)
        self._report(
            Report(
                stop_chosen=control_pb2.StopChosen(job=order.job_name, generation=order.generation, boundary=boundary)
            )
        )

    def _stop_at(self, order: control_pb2.StopAt) -> None:
        session = self._session
        session.admit(order.job_name, order.generation)
        if self._run is None:
            session.admit_boundary(order.boundary)
            self._report_at_boundary(order.boundary)
            return
        try:
            self._run.executor.stop_at(Boundary(order.boundary))
        except ValueError as error:
            raise OrderRefusedError(str(error)) from error

    def _write(self, order: control_pb2.Write) -> None:
        if not self._snapshots.let_go():
            # It may write the same boundary, and its end would delete the files that are written now.
            raise OrderRefusedError("the writer has not let go of an earlier snapshot")
        wrote = write_layers(order, self._session)
        log.info("layers_written", job=order.job_name, boundary=order.boundary, layers=list(order.layers))
        self._report(Report(wrote=wrote))

    def _release(self, order: Order) -> None:
        job = order.release.job_name
        if self._session.job not in ("", job):
            raise OrderRefusedError(f"job {job}: this worker serves job {self._session.job}")
        self._end_run_first(order)
        self._drop_all_but(())
        self._session.release()
        self._records.release()
        log.info("job_released", job=job)
        self._output.restore()
        self._report(Report(released=control_pb2.Released(job=job)))

    def _space_snapshots(self, order: control_pb2.SpaceSnapshots) -> None:
        self._session.admit(order.job_name, order.generation)
        if self._snapshots.space(order.factor):
            log.info("snapshots_spaced", job=order.job_name, generation=order.generation, factor=order.factor)

    def _trim_journal(self, order: control_pb2.TrimJournal) -> None:
        """Drop rows between two operations. An order about another generation comes too late to matter."""
        session = self._session
        if (session.job, session.generation) == (order.job_name, order.generation) and session.journal is not None:
            assert session.spec is not None
            session.journal.drop_below(Batch(order.boundary), StopRule.of(session.spec.train))

    # --- Running ----------------------------------------------------------------------------------------------------

    def _start(self, order: Order) -> None:
        start, session = order.start, self._session
        spec = session.admit_start(start.job_name, start.generation)
        self._end_run_first(order)
        tokens = session.tokens if start.stage.index == 0 else None
        if start.stage.index == 0 and tokens is None:
            raise OrderRefusedError("the first stage was prepared without data")
        context = start_context(start, spec, self._device.device)
        # Refusals come first: below, the layers of the last run are dropped.
        live = live_sources(start, session=session)
        # Only for accounting: batches that were begun before count as recovery, a planned change as replanning.
        if start.boundary < start.furthest or session.timeline not in (0, start.timeline):
            self._goodput.recovers(perf_counter())
        else:
            self._goodput.waits(REPLAN, perf_counter())
        self._records.begin(start)
        # Old layers go before new ones are loaded: a device may lack room for both.
        self._drop_all_but(live)
        device = self._device.open(on_failure=self._inbox.put)
        layers, journal = load_stage(start, spec, session=session, device=device, on_layer=self._records.loading)
        session.did_start(
            start.generation,
            start.boundary,
            timeline=start.timeline,
            stage=start.stage.index,
            layers=layers,
            journal=journal,
        )
        self._goodput.begin_generation(furthest=start.furthest)
        snapshots = self._snapshots.open(start, spec, context, live, device)
        content = StageContent(layers=list(layers.values()), tokens=tokens, journal=journal, snapshots=snapshots)
        # Links open after the layers are loaded; until then a neighbour that dials is told to come again.
        links = self._neighbours.open(start, spec, context, device)
        observer = self._records.observer(self._goodput, self._on_batch)
        executor = Executor(
            context,
            content,
            links,
            observer=observer,
            make_graph=self._graph_maker(),
            device=device,
            inbox=self._inbox,
        )
        run = _Run(executor, StageLoop(executor, self._inbox, self._take), observer)
        log.info(
            "stage_started",
            job=start.job_name,
            generation=start.generation,
            stage=start.stage.index,
            boundary=start.boundary,
            layers=list(start.stage.layers),
        )
        self._records.event("started", boundary=start.boundary, furthest=start.furthest, layers=[*start.stage.layers])
        self._report(Report(started=control_pb2.Started(job=start.job_name, generation=start.generation)))
        self._compute(run)

    def _compute(self, run: _Run) -> None:
        """Run to the next boundary, unless an order or the loss of a neighbour interrupts."""
        session = self._session
        session.did_run()
        self._run = run
        boundary: Boundary | None = None
        reason = ""
        try:
            with refusals_of_libraries():
                boundary = run.loop.run()
        except AbortedError as error:
            reason = error.reason
            log.warning("run_aborted", job=session.job, generation=session.generation, reason=reason)
        except PeerError as error:
            reason = str(error)
            log.warning(
                "neighbour_lost", job=session.job, generation=session.generation, peer=error.peer, reason=error.reason
            )
            # The daemon must know which neighbour it was: the neighbour's own error is the cause, if it has one.
            lost_peer = self._neighbours.position_of(error.peer)
            self._report(self._failed(error, lost_peer=lost_peer))
        except torch.OutOfMemoryError as error:
            reason = str(error).partition("\n")[0]
            self._ran_out_of_memory(session.job, session.generation, error, batch=run.executor.batch)
        except NonFiniteLossError as error:
            reason = str(error)
            log.error("loss_not_finite", job=session.job, batch=error.batch, microbatch=error.microbatch)
            self._report(self._failed(error, fault=fault_line(error)))
        finally:
            # From here on heartbeats describe an idle worker; reports still name the batch.
            self._run, self._batch = None, run.executor.batch
            session.did_stop(boundary, best_batch=run.executor.best_batch if boundary is not None else None)
        if boundary is None:
            self._goodput.recovers(perf_counter())
            self._records.event("aborted", batch=self._batch, reason=reason)
            return
        assert session.spec is not None
        is_over = boundary == session.spec.train.batches or session.best_batch is not None
        self._goodput.waits(IDLE if is_over else REPLAN, perf_counter())
        self._records.event("stopped", boundary=boundary)
        log.info("boundary_reached", job=session.job, generation=session.generation, boundary=boundary)
        self._report_at_boundary(boundary)

    def _ran_out_of_memory(self, job: str, generation: int, error: torch.OutOfMemoryError, *, batch: int) -> None:
        """Report it with its sizes. The process lives on: freed memory goes back before it loads anything again."""
        shortage = shortage_of(error)
        log.error(
            "device_out_of_memory",
            job=job,
            generation=generation,
            wanted_bytes=shortage.wanted_bytes,
            allocated_bytes=shortage.allocated_bytes,
            allowed_bytes=shortage.allowed_bytes,
        )
        self._report(generation_failed(job, generation, error, batch=batch, shortage=shortage))

    def _drop_all_but(self, live: Sequence[LayerName]) -> None:
        """Free the last run's tensors before anything else is loaded: a device may lack room for both."""
        if not self._snapshots.close():
            log.warning("snapshot_writer_stuck", job=self._session.job)
        self._neighbours.close()
        self._session.keep(live)
        gc.collect()
        self._device.release_memory()

    def _graph_maker(self) -> Callable[..., StageGraph]:
        return partial(PacedGraph, on_layer=self._records.layer_paced) if is_armed(LAYER_PLACE) else StageGraph

    # --- Reports ----------------------------------------------------------------------------------------------------

    def _report(self, report: Report) -> None:
        assert self._control is not None
        self._control.report(report)

    def _report_at_boundary(self, boundary: int) -> None:
        session = self._session
        at_boundary = control_pb2.AtBoundary(
            job=session.job, generation=session.generation, boundary=boundary, best_batch=session.best_batch
        )
        self._report(Report(at_boundary=at_boundary))

    def _on_batch(self, row: JournalRow) -> None:
        assert self._control is not None
        self._control.progress(self._session.job, self._session.generation, journal_entry(row))

    def _failed(self, error: Exception, *, fault: str = "", lost_peer: int = -1) -> Report:
        session = self._session
        batch = self._run.executor.batch if self._run is not None else self._batch
        return generation_failed(session.job, session.generation, error, batch=batch, fault=fault, lost_peer=lost_peer)


def _check_layer(layer: str, spec: JobSpec) -> None:
    try:
        build_layer(layer, spec.model, attention_backend=spec.train.attention_backend)
    except ValueError as error:
        raise OrderRefusedError(str(error)) from error
