"""The measured timeline of a job's last batches, collected through one daemon, next to the predicted one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import ConfigError, RecoveryError
from headway.daemon.base.terminal import table
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.client.cluster_access import ClusterSession, first_answer, node_client
from headway.daemon.client.job_requests import job_of
from headway.daemon.client.plan_simulation import Forecast, forecast
from headway.daemon.client.preview import worker_labels
from headway.daemon.cluster.records import PlanRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.outlook import as_fast_as_their_like, measured
from headway.daemon.reports.pipeline_picture import MeasuredPipeline, Panel, WorkerFigures, figures, measured_pipeline
from headway.proto.control_pb2 import RecentOperations, WorkerTrace
from headway.stages.schedule.operations import Backward, Forward, Op, Orthogonalize, Update
from headway.stages.schedule.simulator import TimedOp

MAX_ATTEMPTS: Final = 3
"""Maximum number of attempts, because the plan may change between our look at it and the daemons'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The alignment of one node's times to the clock of the daemon that was asked."""

    ahead_s: float
    error_s: float
    """Bound of the alignment's error; 0: both use one clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimes:
    """One worker, measured and predicted."""

    name: str
    """The worker's stage and node."""
    measured: WorkerFigures | None
    """The measured operations; None: the troubles say why."""
    predicted: WorkerFigures | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrace:
    """The result of `headway trace`, as `--json` has it."""

    job: str
    generation: int
    first_batch: int
    last_batch: int
    batch_seconds: float
    predicted_batch_seconds: float | None
    """By the simulated schedule; None: a node of the plan is gone."""
    workers: tuple[WorkerTimes, ...]
    """All workers of the plan, in its order."""
    clocks: Mapping[str, Clock]
    """Alignment of each node's clock."""
    are_launches: bool
    """True if times on CUDA devices are those of launches."""
    troubles: tuple[str, ...]

    @property
    def head(self) -> str:
        """Return the headline."""
        took_s, predicted_s = self.batch_seconds, self.predicted_batch_seconds
        over = f", {predicted_s:.3g} predicted ({took_s / predicted_s - 1:+.0%})" if predicted_s else ""
        return (
            f"{self.job}: batches {self.first_batch} to {self.last_batch} of generation {self.generation}, "
            f"{took_s:.3g} s a batch measured{over}"
        )

    @property
    def clock_line(self) -> str:
        """Return how the times of several nodes were aligned; empty if only one clock was used."""
        moved = [
            f"{node} {-clock.ahead_s:+.6f} s ± {clock.error_s * 1e3:.2g} ms"
            for node, clock in sorted(self.clocks.items())
            if clock.error_s
        ]
        return f"Clocks aligned by the middles of short round trips: {', '.join(moved)}." if moved else ""

    @property
    def lines(self) -> list[str]:
        """Return the trace as lines for people."""
        rows = [
            (*worker.name.split(maxsplit=1), *_cells(worker.measured), *_cells(worker.predicted))
            for worker in self.workers
        ]
        lines = [self.head, "", *table(_TITLES, rows), ""]
        if self.are_launches:
            lines.append("Times on CUDA devices are those of launches; the device computes later.")
        return [*lines, *([self.clock_line] if self.clock_line else []), *self.troubles]

    def panels(self, measured: MeasuredPipeline, run: Forecast | None) -> list[Panel]:
        """Return both timelines for a picture, in one scale."""
        title = f"{self.head}\n{self.clock_line}".strip()
        window = measured.window
        panels = [Panel(timeline=measured.timeline, window=window, title=title, x_label="measured", prefix="measured ")]
        if run is not None:
            begin, end = run.window
            panels.append(
                Panel(
                    timeline=run.timeline,
                    window=(begin, min(end, begin + window[1])),
                    title="predicted",
                    x_label="simulated",
                    prefix="predicted ",
                    zero_s=begin,
                )
            )
        return panels


_TITLES: Final = (
    "stage", "worker",
    "forward ms", "backward ms", "update ms", "idle",
    "predicted: forward ms", "backward ms", "update ms", "idle",
)  # fmt: skip


def _cells(found: WorkerFigures | None) -> tuple[str, ...]:
    if found is None:
        return ("", "", "", "")
    times = (found.forward_s, found.backward_s, found.update_s)
    return (*("" if seconds is None else f"{seconds * 1e3:.3g}" for seconds in times), f"{found.idle:.1%}")


async def trace_job(
    session: ClusterSession, name: str, *, num_batches: int
) -> tuple[JobTrace, MeasuredPipeline, Forecast | None]:
    """Return the newest batches that all workers remember, with the timelines, measured and predicted.

    Raises ConfigError for a job that does not exist or does not run, RecoveryError when there is nothing to show,
    UnavailableError when no daemon answers.
    """
    async with node_client(session.identity) as client:
        for _ in range(MAX_ATTEMPTS):
            view = await session.view()
            job = job_of(view, name)
            if (plan := job.plan) is None:
                raise ConfigError(f"is {job.phase.phase}: no worker runs, so there is nothing to trace", f"job {name}")
            own = {worker.node for worker in plan.workers}
            names = sorted(view.nodes, key=lambda node: (node not in own, node))
            daemons = [view.nodes[node].endpoint for node in names]
            traces = await first_answer(daemons, lambda endpoint: _collect(client, endpoint, name))
            if all(trace.operations.generation == plan.generation for trace in traces if not trace.trouble):
                return _put_together(view, job, plan, traces, num_batches=num_batches)
    raise RecoveryError(f"job {name}", "its plan is changing; ask again")


async def _collect(client: NodeClient, endpoint: NodeEndpoint, job: str) -> list[WorkerTrace]:
    return [trace async for trace in client.trace(endpoint, job)]


def _put_together(
    view: ClusterView, job: JobView, plan: PlanRecord, traces: Sequence[WorkerTrace], *, num_batches: int
) -> tuple[JobTrace, MeasuredPipeline, Forecast | None]:
    names = worker_labels(plan.workers)
    found = {trace.worker: trace for trace in traces if not trace.trouble}
    troubles = tuple(f"{names[trace.worker]}: {trace.trouble}" for trace in traces if trace.trouble)
    memories = {position: _timeline(trace) for position, trace in found.items()}
    pipeline = measured_pipeline(memories, num_batches=num_batches) if memories else None
    if pipeline is None:
        raise RecoveryError(
            f"job {job.name}", "; ".join(troubles) or "no batch has gone through all of its workers yet; ask again"
        )
    run = _predicted(view, job, plan, num_batches=pipeline.last_batch - pipeline.first_batch + 1)
    have = {done.stage for done in pipeline.timeline}
    told = JobTrace(
        job=job.name,
        generation=plan.generation,
        first_batch=pipeline.first_batch,
        last_batch=pipeline.last_batch,
        batch_seconds=pipeline.step_seconds,
        predicted_batch_seconds=run.step_seconds if run is not None else None,
        workers=tuple(
            WorkerTimes(
                name=name,
                measured=figures(pipeline.timeline, row, pipeline.window) if row in have else None,
                predicted=figures(run.timeline, row, run.window) if run is not None else None,
            )
            for row, name in enumerate(names)
        ),
        clocks={
            trace.node: Clock(ahead_s=trace.clock_ahead_s, error_s=trace.clock_error_s) for trace in found.values()
        },
        are_launches=any(trace.operations.launched for trace in found.values()),
        troubles=troubles,
    )
    return told, pipeline, run


def _timeline(trace: WorkerTrace) -> list[TimedOp]:
    """Return a worker's operations in the clock of the daemon that was asked."""
    told, ahead_s = trace.operations, trace.clock_ahead_s
    return [
        TimedOp(trace.worker, op, version, started_s - ahead_s, ended_s - ahead_s)
        for op, version, started_s, ended_s in zip(
            _operations(told), told.versions, told.started_s, told.ended_s, strict=True
        )
    ]


def _operations(told: RecentOperations) -> Iterator[Op]:
    for kind, batch, microbatch in zip(told.kinds.decode(), told.batches, told.microbatches, strict=True):
        match kind:
            case "F":
                yield Forward(batch, microbatch)
            case "B":
                yield Backward(batch, microbatch)
            case "O":
                yield Orthogonalize(batch)
            case _:
                yield Update(batch)


def _predicted(view: ClusterView, job: JobView, plan: PlanRecord, *, num_batches: int) -> Forecast | None:
    """Simulate the plan with the present measurements."""
    nodes = as_fast_as_their_like(view.nodes.values())
    if job.spec is None or any(worker.node not in nodes for worker in plan.workers):
        return None
    return forecast(job.spec, plan.workers, nodes.values(), profiles=measured(job, view), num_shown=num_batches)
