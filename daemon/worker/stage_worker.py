"""Brings a worker from where it is to its goal, in the main thread: prepares, runs and writes one stage at a time.

workers/goal.py says what is next; this module does it, and tells the daemon how far it is.
"""

import gc
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import structlog
import torch

from headway.daemon.base.fault_points import LAYER_PLACE, is_armed
from headway.daemon.cluster.measurements import LayerTime
from headway.daemon.cluster.records import Failure
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.plugins import import_plugins
from headway.daemon.worker.control import WorkerControl
from headway.daemon.worker.device import WorkerDevice
from headway.daemon.worker.goal import (
    ENDS_A_RUN,
    Action,
    Actual,
    BatchDone,
    FromWorker,
    Goal,
    Heartbeat,
    Progress,
    next_action,
)
from headway.daemon.worker.held_layers import Held, RefusedError, SnapshotReports, live_parts, load_stage, write_parts
from headway.daemon.worker.neighbours import Neighbours, WorkerInbox, WorkerItem, for_part, start_context
from headway.daemon.worker.out_of_memory import damaged_path, fault_line, refusals_of_libraries, shortage_of
from headway.daemon.worker.stage_records import PacedGraph, RunObserver, StageRecords, WorkerOutput
from headway.optim.step_count import STEPS
from headway.stages.data.token_mixture import open_tokens
from headway.stages.device.run_events import DeviceDone
from headway.stages.early_stop import StopRule
from headway.stages.errors import (
    AbortedError,
    CompilationError,
    DamagedFileError,
    DataError,
    KernelError,
    MissingPackageError,
    NonFiniteLossError,
    PeerError,
    UnreachedError,
)
from headway.stages.ids import Batch, Boundary, LayerName
from headway.stages.links.endpoint import LinkEndpoint
from headway.stages.links.link import Frame, LinkLost
from headway.stages.model.compilation import compile_ahead
from headway.stages.model.decoder import build_layer
from headway.stages.model.determinism import configure
from headway.stages.model.flash3 import choose_flash
from headway.stages.plugin_names import PluginError
from headway.stages.stage.content import StageContent
from headway.stages.stage.executor import Executor
from headway.stages.stage.graph import StageGraph
from headway.stages.stage.loop import StageLoop
from headway.stages.state.journal import JournalRow
from headway.stages.state.snapshot_writer import SnapshotEnded
from headway.stages.telemetry.goodput import IDLE, REPLAN, Goodput

log = structlog.get_logger()

MAX_DAMAGED = 8
"""Files that a worker may refuse before its generation is given up."""
IDLE_S = 0.5
"""Idle time after which a worker measures its device; goals come first."""

_LACKS_HERE = (CompilationError, KernelError, MissingPackageError)
_IMPOSSIBLE = (RefusedError, DataError, DamagedFileError, *_LACKS_HERE, PluginError, OSError)
"""Errors that make an action impossible and leave the worker usable."""


@dataclass(frozen=True, slots=True)
class _Run:
    """The run in progress, with the parts that actions and heartbeats ask."""

    executor: Executor
    loop: StageLoop[WorkerItem]
    observer: RunObserver


class StageWorker:
    """Reaches one goal after the other. `serve` runs in the main thread until a goal ends the process; any thread may
    call `heartbeat`.
    """

    def __init__(
        self,
        *,
        inbox: WorkerInbox,
        endpoint: LinkEndpoint,
        on_stuck: Callable[[str], None],
        device: WorkerDevice,
        output: WorkerOutput,
        records: StageRecords,
    ) -> None:
        self._inbox = inbox
        self._endpoint = endpoint
        self._timed: Mapping[str, LayerTime] = {}
        """The layers of the last run, as its last heartbeat told them: other threads read it."""
        self._neighbours = Neighbours(endpoint, inbox, on_stuck, lambda: self._timed)
        self._device = device
        self._output = output
        self._records = records
        self._goal = Goal()
        self._actual = Actual()
        """What the daemon is told. It changes as a whole: other threads read it."""
        self._held = Held()
        self._control: WorkerControl | None = None
        self._run: _Run | None = None
        """The run in progress. Between runs, what is held stands at `_held.boundary`."""
        self._batch = -1
        """Batch at which the last run ended."""
        self._goodput = Goodput()
        self._plugins = ""
        """SHA-256 of the wheel from which this process has imported; empty: none."""
        self._snapshots = SnapshotReports(inbox, records, self._send)

    def serve(self, control: WorkerControl) -> None:
        """Act until a goal ends the process. An error that is neither an action's nor a neighbour's is told and
        raised.
        """
        self._control = control
        try:
            while (action := next_action(self._goal, self._actual)) is not Action.END:
                if action is Action.RELEASE and self._plugins:
                    break  # another job's modules, and what they have changed, stay until the process ends
                if action is not None:
                    self._act(action)
                else:
                    self._take(self._next())
        except Exception as error:
            self._tell(dies_of=self._failure(error, f"{type(error).__name__}: {error}", fault=fault_line(error)))
            control.flush()
            raise
        self._snapshots.let_go()

    def _next(self) -> WorkerItem:
        """Wait for the next item. A worker that stays idle measures its device first, if the daemon asked for it."""
        if self._device.is_to_be_measured and not self._actual.job:
            try:
                return self._inbox.get(timeout=IDLE_S)
            except queue.Empty:
                self._device.measure()
        return self._inbox.get()

    def heartbeat(self) -> Heartbeat:
        """Return what this worker is doing now."""
        self._output.rotate()
        actual, run, goodput = self._actual, self._run, self._goodput
        figures: dict[str, Any] = {}
        if actual.job:
            figures |= {
                "typical_s": self._records.typical_s,
                "num_replayed": goodput.num_replayed,
                "replan_s": goodput.replan_s,
                "num_resumed": self._endpoint.num_resumed,
                "seconds": goodput.seconds(perf_counter()),
                "broken_links": tuple(self._neighbours.broken),
                "cuts": self._neighbours.cuts,
            }
        if run is not None:
            measured = run.executor.layer_times.measured
            awaited = run.loop.waiting_for
            self._timed = {
                kind: LayerTime(
                    forward_s=times.forward_s,
                    backward_s=times.backward_s,
                    update_s=times.update_s,
                    spread=times.spread,
                )
                for kind, times in measured.layers.items()
            }
            figures |= {
                "operations": run.observer.recent.num_recorded,
                "runnable": run.loop.is_runnable,
                "steps": STEPS.num_done,
                "expected_s": run.observer.expected_s,
                "batch": run.executor.batch,
                "waiting_for": awaited,
                "awaited_worker": self._neighbours.position_of(awaited),
                "peak_bytes": measured.peak_bytes,
                "num_samples": measured.num_samples,
                "layers": self._timed,
            }
        return Heartbeat(
            job=actual.job,
            generation=actual.generation,
            speed=self._device.speed,
            **figures,
        )

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
                if item.job == self._actual.job:
                    spacing = self._snapshots.ended(item, self._actual.spacing)
                    if spacing != self._actual.spacing:
                        self._tell(spacing=spacing)
            case Goal():
                self._goal = item
                # What is to be written once more was written before, and has been lost.
                written = tuple(part for part in self._actual.written if part in item.write)
                if written != self._actual.written:
                    self._tell(written=written)
                if run is not None:
                    self._act_in_run()
            case BaseException():
                raise item

    # --- Actions ----------------------------------------------------------------------------------------------------

    def _act_in_run(self) -> None:
        """Do what can be done between two operations. Anything else ends the run, and `serve` does it then."""
        while (action := next_action(self._goal, self._actual)) is not None:
            if action in ENDS_A_RUN:
                raise AbortedError(f"the daemon wants it to {action}")
            self._act(action)

    def _act(self, action: Action) -> None:
        """Do an action. If that is impossible, the generation has failed here."""
        part = self._goal.prepare if action is Action.PREPARE else self._goal.start
        generation = part.plan.generation if part is not None else 0
        try:
            with refusals_of_libraries():
                self._do(action)
        except torch.OutOfMemoryError as error:
            # Nothing has changed yet: what was being built goes with the error, and the next plan asks for less.
            self._ran_out_of_memory(generation, error, batch=-1)
        except _IMPOSSIBLE as error:
            reason = f"{action.name.lower()}: {' '.join(str(error).split())}"
            log.warning("goal_refused", action=action.name, job=self._goal.job, generation=generation, reason=reason)
            path = damaged_path(error)
            if path and action is Action.START and self._actual.num_damaged < MAX_DAMAGED:
                self._tell(num_damaged=self._actual.num_damaged + 1, damaged_path=path)
            else:
                self._fail(generation, _code_failure(error, reason, self._batch_of(generation)))

    def _do(self, action: Action) -> None:
        goal = self._goal
        match action:
            case Action.PREPARE:
                self._prepare()
            case Action.START:
                self._start()
            case Action.CHOOSE_STOP:
                self._choose_stop()
            case Action.STOP_AT:
                self._stop_at()
            case Action.WRITE:
                self._write()
            case Action.RELEASE:
                self._release()
            case Action.SPACE_SNAPSHOTS:
                self._snapshots.space(goal.spacing)
                log.info("snapshots_spaced", job=goal.job, factor=goal.spacing.factor)
                self._tell(spacing=goal.spacing)
            case Action.TRIM_JOURNAL:
                if self._held.journal is not None and self._held.spec is not None:
                    self._held.journal.drop_below(Batch(goal.journal_from), StopRule.of(self._held.spec.train))
                self._tell(journal_from=goal.journal_from)

    def _prepare(self) -> None:
        goal, held = self._goal, self._held
        prepare, spec = goal.prepare, goal.spec
        assert prepare is not None, "asked by next_action"
        assert spec is not None, "a goal with a job has its spec"
        layers = prepare.plan.workers[prepare.position].layers
        device = self._device.claim(goal.device_index)
        self._plugins = spec.plugins.sha256
        import_plugins(spec, Path(prepare.plugins_path))
        configure(spec.train, device)
        choose_flash(spec.model, spec.train, device)
        for layer in layers:
            _check_layer(layer, spec)
        if spec.train.compile:
            compile_ahead(layers, spec.model, spec.train, device)
        if self._run is None and not held.layers:  # otherwise the card is warm, and perhaps full
            chosen = for_part(spec, prepare.plan, prepare.position)
            self._device.warm_up(layers, chosen, on_failure=self._inbox.put)
        is_other_data = held.spec is not None and held.spec.data != spec.data
        # Opening data reads its index, so open data is kept for every generation of the job.
        if prepare.data_paths and (held.tokens is None or is_other_data):
            names = [part.sha256 for part in spec.data.parts]
            held.tokens = open_tokens(prepare.data_paths, names, spec.data.weights, verified=prepare.data_states)
        if held.spec is None:
            if goal.log_path:
                self._output.redirect(Path(goal.log_path))
            self._goodput = Goodput()
        held.spec = spec
        generation = prepare.plan.generation
        log.info("stage_prepared", job=goal.job, generation=generation, position=prepare.position)
        self._tell(job=goal.job, prepared=generation, num_damaged=0, damaged_path="")

    def _choose_stop(self) -> None:
        boundary = self._run.executor.choose_stop() if self._run is not None else self._held.boundary
        if boundary is None:
            raise RefusedError("the run was cut off between two boundaries")
        log.info("stop_chosen", job=self._actual.job, generation=self._actual.generation, boundary=boundary)
        self._tell(chosen=int(boundary), stop_at=int(boundary))

    def _stop_at(self) -> None:
        boundary = self._goal.stop_at
        assert boundary is not None, "asked by next_action"
        if self._run is None:
            raise RefusedError("the run was cut off between two boundaries")
        try:
            self._run.executor.stop_at(Boundary(boundary))
        except ValueError as error:
            raise RefusedError(str(error)) from error
        self._tell(stop_at=boundary)

    def _write(self) -> None:
        goal, boundary = self._goal, self._actual.boundary
        assert goal.start is not None, "asked by next_action"
        assert boundary is not None, "asked by next_action"
        assert self._held.spec is not None, "it was prepared"
        if not self._snapshots.let_go():
            # It may write the same boundary, and its end would delete the files that are written now.
            raise RefusedError("the writer has not let go of an earlier snapshot")
        parts = [part for part in goal.write if part not in self._actual.written]
        wrote = write_parts(goal.start, self._held.spec, self._held, boundary, parts)
        log.info("layers_written", job=goal.job, boundary=boundary, layers=parts)
        self._send(wrote)
        self._tell(written=tuple(sorted({*self._actual.written, *parts})))

    def _release(self) -> None:
        job = self._actual.job
        self._drop_all_but(())
        self._neighbours.forget_pairs()
        self._held, self._timed = Held(), {}
        self._records.release()
        log.info("job_released", job=job)
        self._output.restore()
        self._actual = Actual()
        self._tell()

    # --- Running ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        goal, held = self._goal, self._held
        start, spec = goal.start, held.spec
        assert start is not None, "asked by next_action"
        assert spec is not None, "it was prepared"
        plan = start.plan
        context = start_context(start, spec, self._device.device)
        tokens = held.tokens if context.is_first else None
        if context.is_first and tokens is None:
            raise RefusedError("the first stage was prepared without data")
        # Refusals come first: below, the layers of the last run are dropped.
        live = live_parts(start, held)
        # Only for accounting: batches that were begun before count as recovery, a planned change as replanning.
        if plan.boundary < plan.furthest or held.timeline not in (0, plan.timeline):
            self._goodput.recovers(perf_counter())
        else:
            self._goodput.waits(REPLAN, perf_counter())
        self._records.begin(goal.job, start)
        # Old layers go before new ones are loaded: a device may lack room for both.
        self._drop_all_but(live)
        device = self._device.open(on_failure=self._inbox.put)
        layers, journal = load_stage(start, spec, held=held, device=device, on_layer=self._records.loading)
        held.layers, held.journal, held.timeline, held.boundary = layers, journal, plan.timeline, plan.boundary
        self._goodput.begin_generation(furthest=plan.furthest)
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
            job=goal.job,
            generation=plan.generation,
            stage=context.stage_index,
            boundary=plan.boundary,
            layers=list(start.layers),
        )
        self._records.event("started", boundary=plan.boundary, furthest=plan.furthest, layers=[*start.layers])
        self._started()
        self._compute(run)

    def _started(self) -> None:
        """Tell that the generation of the start runs. All that was said of the one before is over."""
        start = self._goal.start
        assert start is not None, "it has been started"
        generation = start.plan.generation
        self._actual = Actual(
            job=self._actual.job,
            prepared=self._actual.prepared,
            generation=generation,
            layers=start.layers,
            has_journal=self._held.journal is not None,
            failures={number: why for number, why in self._actual.failures.items() if number > generation},
        )
        self._tell()

    def _compute(self, run: _Run) -> None:
        """Run to the next boundary, unless a goal or the loss of a neighbour interrupts."""
        held, actual = self._held, self._actual
        held.boundary = None  # the executor is about to change the layers
        self._run = run
        boundary: Boundary | None = None
        reason = ""
        try:
            with refusals_of_libraries():
                boundary = run.loop.run()
        except AbortedError as error:
            reason = error.reason
            log.warning("run_aborted", job=actual.job, generation=actual.generation, reason=reason)
        except PeerError as error:
            reason = str(error)
            log.warning(
                "neighbour_lost", job=actual.job, generation=actual.generation, peer=error.peer, reason=error.reason
            )
            # The daemon must know which neighbour it was: the neighbour's own error is the cause, if it has one.
            lost_peer = self._neighbours.position_of(error.peer)
            self._fail(actual.generation, self._failure(error, reason, lost_peer=lost_peer))
        except torch.OutOfMemoryError as error:
            reason = str(error).partition("\n")[0]
            self._ran_out_of_memory(actual.generation, error, batch=run.executor.batch)
        except NonFiniteLossError as error:
            reason = str(error)
            log.error("loss_not_finite", job=actual.job, batch=error.batch, microbatch=error.microbatch)
            failure = Failure(reason, error.batch, fault_line(error), is_hopeless=True)
            self._fail(actual.generation, failure)
        except PluginError as error:
            reason = str(error)
            log.error("plugin_failed", job=actual.job, batch=run.executor.batch, reason=reason, exc_info=error)
            self._fail(actual.generation, _code_failure(error, reason, run.executor.batch, fault=reason))
        finally:
            # From here on heartbeats describe an idle worker; failures still name the batch.
            self._run, self._batch = None, run.executor.batch
            held.boundary = boundary
        if boundary is None:
            self._goodput.recovers(perf_counter())
            self._records.event("aborted", batch=self._batch, reason=reason)
            return
        assert held.spec is not None, "it was prepared"
        best_batch = run.executor.best_batch
        is_over = boundary == held.spec.train.batches or best_batch is not None
        self._goodput.waits(IDLE if is_over else REPLAN, perf_counter())
        self._records.event("stopped", boundary=boundary)
        log.info("boundary_reached", job=actual.job, generation=actual.generation, boundary=boundary)
        self._tell(boundary=int(boundary), best_batch=best_batch)

    def _ran_out_of_memory(self, generation: int, error: torch.OutOfMemoryError, *, batch: int) -> None:
        """Tell it with its sizes. The process lives on: freed memory goes back before it loads anything again."""
        shortage = shortage_of(error)
        log.error(
            "device_out_of_memory",
            job=self._goal.job,
            generation=generation,
            wanted_bytes=shortage.wanted_bytes,
            allocated_bytes=shortage.allocated_bytes,
            allowed_bytes=shortage.allowed_bytes,
        )
        self._fail(generation, Failure(str(error), batch, shortage=shortage))

    def _drop_all_but(self, live: Sequence[LayerName]) -> None:
        """Free the last run's tensors before anything else is loaded: a device may lack room for both."""
        if not self._snapshots.close():
            log.warning("snapshot_writer_stuck", job=self._actual.job)
        self._neighbours.close()
        self._held.keep(live)
        gc.collect()
        self._device.release_memory()

    def _graph_maker(self) -> Callable[..., StageGraph]:
        return partial(PacedGraph, on_layer=self._records.layer_paced) if is_armed(LAYER_PLACE) else StageGraph

    # --- What the daemon is told ------------------------------------------------------------------------------------

    def _send(self, message: FromWorker) -> None:
        assert self._control is not None
        self._control.tell(message)

    def _tell(self, **changes: Any) -> None:
        """Tell where the worker is now, with these changes."""
        self._actual = msgspec.structs.replace(self._actual, **changes)
        self._send(self._actual)

    def _fail(self, generation: int, failure: Failure) -> None:
        # It is of the job from here on, also when it could not prepare for it.
        job = self._actual.job or self._goal.job
        self._tell(job=job, failures={**self._actual.failures, generation: failure})

    def _failure(self, error: Exception, text: str, *, fault: str = "", lost_peer: int = -1) -> Failure:
        return Failure(
            text,
            self._batch_of(self._actual.generation),
            fault,
            lost_peer=lost_peer,
            was_unreached=isinstance(error, UnreachedError),
        )

    def _batch_of(self, generation: int) -> int:
        """Return the batch of a generation at which the worker is or was; -1: it has not started it."""
        if generation != self._actual.generation:
            return -1
        return self._run.executor.batch if self._run is not None else self._batch

    def _on_batch(self, row: JournalRow) -> None:
        batch = BatchDone(
            batch=row.batch,
            loss=row.loss,
            tokens=row.tokens,
            seconds=row.seconds,
            eval_loss=row.eval_loss,
            gradient_norm=row.gradient_norm,
            final_eval_loss=row.final_eval_loss,
        )
        self._send(Progress(self._actual.job, self._actual.generation, batch))


def _code_failure(error: Exception, text: str, batch: int, *, fault: str = "") -> Failure:
    """Return the failure by code that is missing or wrong: another attempt helps only where the machine is to blame."""
    is_refused = isinstance(error, PluginError) and error.is_machines
    is_hopeless = isinstance(error, MissingPackageError | PluginError) and not is_refused
    return Failure(text, batch, "" if is_refused else fault, is_hopeless=is_hopeless, refuses_plugins=is_refused)


def _check_layer(layer: str, spec: JobSpec) -> None:
    try:
        build_layer(layer, spec.model, attention_backend=spec.train.attention_backend)
    except ValueError as error:
        raise RefusedError(str(error)) from error
