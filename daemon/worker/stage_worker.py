"""Obeys the daemon's orders in the worker's main thread: prepares, runs and writes one stage at a time.

What is held and what may be ordered is worker/session.py's knowledge; this module does the work that follows.
"""

import gc
import queue
import time
from collections import deque
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import msgspec
import structlog
import torch

from headway.daemon.jobs.job import JobSpec
from headway.daemon.records import decode
from headway.daemon.worker.control import WorkerControl
from headway.daemon.worker.held_layers import HeldSession, load_stage, write_layers
from headway.daemon.worker.output import WorkerOutput
from headway.daemon.worker.session import OrderRefusedError, WorkerSession
from headway.proto import control_pb2
from headway.proto.control_pb2 import Heartbeat, Order, Report
from headway.stages.determinism import configure
from headway.stages.errors import AbortedError, DamagedFileError, DataError, NonFiniteLossError, PeerError
from headway.stages.executor import Executor
from headway.stages.frame_contract import FrameContract
from headway.stages.history import HistoryFile
from headway.stages.ids import Boundary, Generation, LayerName, StageIndex, Timeline
from headway.stages.journal import JournalRow
from headway.stages.link import Frame, Link, LinkLost
from headway.stages.link_endpoint import LinkEndpoint
from headway.stages.model import build_layer
from headway.stages.stage_context import StageContext
from headway.stages.tokens import TokenShards

log = structlog.get_logger()

ROOT_CAUSE_GRACE = timedelta(seconds=3)
"""How long a broken link is kept to ourselves: a neighbour that died is reported by its own daemon, with the cause."""

FIRST_CONTACT = timedelta(minutes=10)
"""How long a neighbour may load its layers before it answers or dials; the coordinator's own deadline is the sharper.
Only a link that was there once breaks after the job's `link_timeout_s`."""

_BAD_ORDERS = (OrderRefusedError, DataError, DamagedFileError, OSError)
"""What makes an order impossible and leaves the worker usable."""


class StageWorker:
    """`serve` runs in the main thread until Quit; `heartbeat` may be called from any."""

    def __init__(
        self,
        *,
        inbox: "queue.SimpleQueue[object]",
        endpoint: LinkEndpoint,
        device: torch.device,
        output: WorkerOutput,
        history_dir: Path | None,
    ) -> None:
        self._inbox = inbox
        self._endpoint = endpoint
        self._device = device
        self._output = output
        self._history_dir = history_dir
        self._session: HeldSession = WorkerSession()
        self._control: WorkerControl | None = None
        self._executor: Executor | None = None
        self._links: list[Link] = []
        self._deferred: deque[Order] = deque()
        self._failure: tuple[float, Report] | None = None
        """When to report a run that ended because of a neighbour, and what."""
        self._is_quitting = False

    def serve(self, control: WorkerControl) -> None:
        """Obey orders until Quit. Raises whatever is neither a bad order's nor a neighbour's fault."""
        self._control = control
        while not self._is_quitting:
            try:
                self._take(self._deferred.popleft() if self._deferred else self._inbox.get(timeout=self._patience_s()))
            except queue.Empty:
                self._report_failure()

    def heartbeat(self) -> Heartbeat:
        """What this worker is doing now."""
        self._output.rotate()
        session, executor = self._session, self._executor
        beat = Heartbeat(job=session.job, generation=session.generation)
        if executor is not None:
            beat.operations = executor.num_ops_done
            beat.runnable = executor.is_runnable
            beat.batch = executor.batch
            beat.waiting_for = executor.waiting_for
        return beat

    # --- Orders -----------------------------------------------------------------------------------------------------

    def _take(self, item: object) -> None:
        """Something from the inbox, between two operations or while nothing runs."""
        if isinstance(item, Order):
            self._obey(item)
        elif isinstance(item, BaseException):
            raise item  # the loop thread's
        elif isinstance(item, LinkLost):
            log.info("idle_link_lost", peer=item.peer, reason=item.reason)
        else:
            assert isinstance(item, Frame), f"an unknown item in the inbox: {item!r}"
            log.warning("idle_frame_dropped", kind=item.kind.name, generation=item.generation)

    def _obey(self, order: Order) -> None:
        kind = order.WhichOneof("order")
        if kind is None or kind == "quit":
            self._quit(order)
            return
        about = getattr(order, kind)
        generation = 0 if kind == "release" else about.generation
        try:
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
        except _BAD_ORDERS as error:
            reason = " ".join(str(error).split())
            log.warning("order_refused", order=kind, job=about.job_name, generation=generation, reason=reason)
            refused = control_pb2.Refused(job=about.job_name, generation=generation, reason=f"{kind}: {reason}")
            self._report(Report(refused=refused))

    def _quit(self, order: Order) -> None:
        if not self._is_deferred(order):
            self._is_quitting = True

    def _prepare(self, order: control_pb2.Prepare) -> None:
        session = self._session
        session.admit_prepare(order.job_name, order.generation)
        try:
            spec = decode(order.job, JobSpec)
        except msgspec.DecodeError as error:
            raise OrderRefusedError(f"the job's spec cannot be read: {error}") from error
        configure(spec.train, self._device)
        for layer in order.stage.layers:
            _check_layer(layer, spec)
        tokens = session.tokens
        is_other_data = session.spec is not None and session.spec.data != spec.data
        if order.data_path and (tokens is None or is_other_data):
            tokens = TokenShards.open(Path(order.data_path), expected_sha256=spec.data.sha256)
        if order.log_path and order.job_name != session.job:
            self._output.redirect(Path(order.log_path))
        session.did_prepare(order.job_name, order.generation, spec=spec, tokens=tokens)
        log.info("stage_prepared", job=order.job_name, generation=order.generation, stage=order.stage.index)
        self._report(Report(prepared=control_pb2.Prepared(job=order.job_name, generation=order.generation)))

    def _choose_stop(self, order: control_pb2.ChooseStop) -> None:
        session = self._session
        session.admit(order.job_name, order.generation)
        boundary = self._executor.choose_stop() if self._executor is not None else session.boundary
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
        if self._executor is None:
            session.admit_boundary(order.boundary)
            self._report_at_boundary(order.boundary)
            return
        try:
            self._executor.stop_at(Boundary(order.boundary))
        except ValueError as error:
            raise OrderRefusedError(str(error)) from error

    def _write(self, order: control_pb2.Write) -> None:
        wrote = write_layers(order, self._session)
        log.info("layers_written", job=order.job_name, boundary=order.boundary, layers=list(order.layers))
        self._report(Report(wrote=wrote))

    def _release(self, order: Order) -> None:
        job = order.release.job_name
        if self._session.job not in ("", job):
            raise OrderRefusedError(f"job {job}: this worker serves job {self._session.job}")
        if self._is_deferred(order):
            return
        self._failure = None
        self._close_links()
        self._session.release()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        log.info("job_released", job=job)
        self._output.restore()
        self._report(Report(released=control_pb2.Released(job=job)))

    # --- Running ----------------------------------------------------------------------------------------------------

    def _start(self, order: Order) -> None:
        start, session = order.start, self._session
        spec = session.admit_start(start.job_name, start.generation)
        if self._is_deferred(order):
            return
        layers, journal = load_stage(start, spec, session=session, device=self._device)
        tokens = session.tokens if start.stage.index == 0 else None
        if start.stage.index == 0 and tokens is None:
            raise OrderRefusedError("the first stage was prepared without data")
        session.did_start(start.generation, start.boundary, layers=layers, journal=journal)
        self._failure = None
        with ExitStack() as stack:
            recorder = None
            if self._history_dir is not None:
                self._history_dir.mkdir(parents=True, exist_ok=True)
                path = self._history_dir / f"{start.job_name}-{start.generation:08d}-{start.stage.index:04d}.jsonl"
                recorder = stack.enter_context(
                    HistoryFile(
                        path, generation=Generation(start.generation), stage_index=StageIndex(start.stage.index)
                    )
                )
            upstream, downstream = self._open_links(start, spec)
            self._executor = Executor(
                self._context(start, spec),
                list(layers.values()),
                tokens=tokens,
                journal=journal,
                upstream=upstream,
                downstream=downstream,
                inbox=self._inbox,
                handle=self._take,
                on_batch=self._on_batch,
                recorder=recorder,
            )
            log.info(
                "stage_started",
                job=start.job_name,
                generation=start.generation,
                stage=start.stage.index,
                boundary=start.boundary,
                layers=list(start.stage.layers),
            )
            self._report(Report(started=control_pb2.Started(job=start.job_name, generation=start.generation)))
            self._run(self._executor)

    def _run(self, executor: Executor) -> None:
        """To the next boundary, unless an order or a neighbour's end comes first."""
        session = self._session
        session.did_run()
        boundary: Boundary | None = None
        try:
            boundary = executor.run()
        except AbortedError as error:
            log.warning("run_aborted", job=session.job, generation=session.generation, reason=error.reason)
        except PeerError as error:
            log.warning(
                "neighbour_lost", job=session.job, generation=session.generation, peer=error.peer, reason=error.reason
            )
            self._failure = (time.monotonic() + ROOT_CAUSE_GRACE.total_seconds(), self._failed(error))
        except NonFiniteLossError as error:
            log.error("loss_not_finite", job=session.job, batch=error.batch, microbatch=error.microbatch)
            self._report(self._failed(error))
        finally:
            self._executor = None
            session.did_stop(boundary)
        if boundary is not None:
            log.info("boundary_reached", job=session.job, generation=session.generation, boundary=boundary)
            self._report_at_boundary(boundary)

    def _is_deferred(self, order: Order) -> bool:
        """End the run first, if there is one; then the order comes again."""
        if self._executor is None:
            return False
        self._executor.abort(f"order {order.WhichOneof('order')}")
        self._deferred.append(order)
        return True

    def _context(self, start: control_pb2.Start, spec: JobSpec) -> StageContext:
        return StageContext(
            model=spec.model,
            train=spec.train,
            seed=spec.job.seed,
            job=start.job_name,
            generation=Generation(start.generation),
            timeline=Timeline(start.timeline),
            stage_index=StageIndex(start.stage.index),
            num_stages=start.stage.num_stages,
            layers=tuple(LayerName(layer) for layer in start.stage.layers),
            depth=start.stage.depth,
            boundary=Boundary(start.boundary),
            device=self._device,
        )

    def _open_links(self, start: control_pb2.Start, spec: JobSpec) -> tuple[Link | None, Link | None]:
        """To the neighbours of this generation, after those of the one before are closed and forgotten."""
        self._close_links()
        stage, job, generation = StageIndex(start.stage.index), start.job_name, Generation(start.generation)
        contract = FrameContract.of(spec.model, spec.train)
        timeout = max(FIRST_CONTACT, timedelta(seconds=spec.fault.link_timeout_s))
        upstream: Link | None = None
        downstream: Link | None = None
        if stage > 0:
            upstream = self._endpoint.accept(
                job,
                generation,
                stage=stage,
                peer_incarnation=start.upstream.incarnation,
                inbox=self._inbox,
                contract=contract,
                timeout=timeout,
                address=start.upstream.address,
            )
            self._links.append(upstream)
        if stage + 1 < start.stage.num_stages:
            downstream = self._endpoint.dial(
                start.downstream.address,
                job,
                generation,
                stage=stage,
                peer_incarnation=start.downstream.incarnation,
                inbox=self._inbox,
                contract=contract,
                timeout=timeout,
            )
            self._links.append(downstream)
        return upstream, downstream

    def _close_links(self) -> None:
        """Nothing arrives from a closed link; what has arrived from it before is of no use to anybody."""
        for link in self._links:
            link.close()
        self._links.clear()
        arrived = [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]
        for item in arrived:
            if not isinstance(item, Frame | LinkLost):
                self._inbox.put(item)

    # --- Reports ----------------------------------------------------------------------------------------------------

    def _report(self, report: Report) -> None:
        assert self._control is not None
        self._control.report(report)

    def _report_at_boundary(self, boundary: int) -> None:
        session = self._session
        at_boundary = control_pb2.AtBoundary(job=session.job, generation=session.generation, boundary=boundary)
        self._report(Report(at_boundary=at_boundary))

    def _on_batch(self, row: JournalRow) -> None:
        assert self._control is not None
        entry = control_pb2.JournalEntry(
            batch=row.batch,
            loss=row.loss,
            tokens=row.tokens,
            seconds=row.seconds,
            generation=row.generation,
            microbatch_losses=row.microbatch_losses,
        )
        self._control.progress(self._session.job, self._session.generation, entry)

    def _failed(self, error: Exception) -> Report:
        session = self._session
        return Report(refused=control_pb2.Refused(job=session.job, generation=session.generation, reason=str(error)))

    def _patience_s(self) -> float | None:
        return None if self._failure is None else max(0.0, self._failure[0] - time.monotonic())

    def _report_failure(self) -> None:
        if self._failure is not None:
            self._report(self._failure[1])
            self._failure = None


def _check_layer(layer: str, spec: JobSpec) -> None:
    try:
        build_layer(layer, spec.model, attention_backend=spec.train.attention_backend)
    except ValueError as error:
        raise OrderRefusedError(str(error)) from error
