"""The metrics of a daemon for Prometheus, at `metrics_listen`; off unless that is set.

Every daemon reports on its own node. Figures of a whole job come from the leader's daemon alone, so that sums over
daemons are right. HTTP runs in its own thread; values are gathered in the event loop, which owns the view.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headway.daemon.base.activities import Activities
from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.records import TERMINAL_PHASES
from headway.daemon.decide.job_view import JobView
from headway.daemon.net.rate_limit import OutgoingTransfers
from headway.daemon.node.service import NodeDesk
from headway.daemon.reports.goodput_report import WAITING
from headway.daemon.reports.job_report import JobReport, reports_in

Metric = CounterMetricFamily | GaugeMetricFamily

GATHER_TIMEOUT_S: Final = 5.0
MOST_JOBS: Final = 200
"""Maximum number of jobs with their own metrics."""


class NodeMetrics(Collector):
    """Answers one scrape after the other. Made in the event loop's thread."""

    def __init__(self, desk: NodeDesk, activities: Activities) -> None:
        self._desk, self._activities = desk, activities
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        """Collect the metrics; called in the server's thread. Raises TimeoutError when the event loop does
        not answer.
        """
        return asyncio.run_coroutine_threadsafe(self._gather(), self._loop).result(GATHER_TIMEOUT_S)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: a starting daemon is not asked."""
        return ()

    async def _gather(self) -> list[Metric]:
        return [*node_metrics(self._desk, self._activities), *job_metrics(self._desk)]


def serve_metrics(host: str, port: int, desk: NodeDesk, activities: Activities) -> tuple[int, Callable[[], None]]:
    """Answer scrapes at a port (0: any) until the returned function is called. Raises ConfigError."""
    registry = CollectorRegistry()
    registry.register(NodeMetrics(desk, activities))
    try:
        server, _ = start_http_server(port, host or "0.0.0.0", registry)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}", "metrics_listen") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return int(server.server_address[1]), stop


def node_metrics(desk: NodeDesk, activities: Activities) -> Iterator[Metric]:
    """Yield the metrics of this node."""
    view, node = desk.view, desk.node
    yield _gauge("headway_etcd_reachable", "Whether this daemon reaches etcd.", desk.etcd_away_s() is None)
    is_leader = view.leader is not None and view.leader.node == node
    yield _gauge("headway_leader", "Whether this daemon leads.", is_leader)
    held = sum(file.size_bytes for file in desk.store.contents.values())
    yield _gauge("headway_store_bytes", "Layer files that this node holds.", held)
    ailments = activities.ailments
    yield _gauge("headway_node_ailments", "Present faults of this daemon.", len(ailments))
    yield _gauge("headway_unreadable_keys", "Records in etcd that are set aside.", len(view.unreadable))
    failed = _counter("headway_activity_failures", "Failures of its activities; each was restarted.", "activity")
    for activity, number in activities.num_failures.items():
        failed.add_metric((activity,), number)
    yield failed
    failures = len(view.failures.get(node, {}))
    yield _gauge("headway_node_failures", "Failures of this node within the last ten minutes.", failures)
    whose = "job", "stage", "worker"
    seconds = _counter("headway_goodput_seconds", "Seconds of this node's workers, by class of use.", *whose, "class")
    replayed = _counter("headway_replayed_batches", "Batches that this node's workers recomputed.", *whose)
    resumed = _counter("headway_link_resumes", "Links of this node's workers that broke and resumed.", *whose)
    for name, job in sorted(view.jobs.items()):
        for (generation, position), record in sorted(job.goodput.items()):
            if record.node != node or job.plan is None or generation != job.plan.generation:
                continue
            if position >= len(job.plan.workers):  # anybody may have written it
                continue
            its = (name, str(job.plan.stage_index(position)), str(position))
            spent: dict[str, float] = {}
            for kind, value in record.seconds.items():
                kind = "waiting" if kind.startswith(WAITING) else kind
                spent[kind] = spent.get(kind, 0.0) + value
            for kind, value in spent.items():
                seconds.add_metric((*its, kind), value)
            replayed.add_metric(its, record.num_replayed)
            resumed.add_metric(its, record.num_resumed)
    yield from (seconds, replayed, resumed)
    yield from _transfers(desk.outgoing)


def _transfers(outgoing: OutgoingTransfers) -> Iterator[Metric]:
    num_bytes = _counter("headway_transfer_bytes", "Bytes of files that this node sent.", "kind")
    seconds = _counter("headway_transfer_seconds", "Seconds that these transfers took.", "kind")
    held = _counter("headway_transfer_held_seconds", "Part for which transfer_mbit_s held them back.", "kind")
    for kind, sent in outgoing.sent.items():
        num_bytes.add_metric((kind,), sent.num_bytes)
        seconds.add_metric((kind,), sent.seconds)
        held.add_metric((kind,), sent.held_s)
    yield from (num_bytes, seconds, held)


_OF_JOB: Final[tuple[tuple[str, str, Callable[[JobReport], float | None]], ...]] = (
    ("headway_job_batch", "Last batch whose loss is known.", lambda job: job.batch),
    ("headway_job_loss", "Loss of that batch.", lambda job: job.loss),
    ("headway_job_eval_loss", "Loss on held-out text, at the last evaluation.", lambda job: job.eval_loss),
    (
        "headway_job_stopped_early_at",
        "Boundary at which evaluations ended the job before its last batch.",
        lambda job: job.stopped_early_at,
    ),
    ("headway_job_tokens_per_second", "Tokens a second.", lambda job: job.tokens_per_second),
    ("headway_job_goodput", "Share of all workers' seconds that was useful.", lambda job: job.goodput.useful_share),
    (
        "headway_job_restorable_boundary",
        "Newest boundary that survives the loss of copies - 1 nodes.",
        lambda job: job.safety.restorable[0] if job.safety.restorable else None,
    ),
    ("headway_job_lag_batches", "Batches that a failure now would make the job recompute.", lambda job: job.safety.lag),
    ("headway_job_checkpoint_boundary", "Newest checkpoint.", lambda job: job.checkpoint_boundary),
    ("headway_job_rollbacks", "Rollbacks so far.", lambda job: job.safety.num_rollbacks),
    ("headway_job_troubles", "Faults that keep boundaries from being written.", lambda job: len(job.safety.troubles)),
)


def job_metrics(desk: NodeDesk) -> Iterator[Metric]:
    """Yield the metrics of all jobs, if this node leads; unknown numbers are left out."""
    view = desk.view
    if view.leader is None or view.leader.node != desk.node:
        return
    yield _gauge("headway_jobs", "Jobs that etcd has; the newest of them have metrics of their own.", len(view.jobs))
    reports = reports_in(view, told_of(view.jobs_in_order()))
    phases = GaugeMetricFamily("headway_job_phase", "1 for the phase that a job is in.", labels=("job", "phase"))
    for report in reports:
        phases.add_metric((report.name, report.phase), 1)
    yield phases
    for name, text, value_of in _OF_JOB:
        family = GaugeMetricFamily(name, text, labels=("job",))
        for report in reports:
            if (value := value_of(report)) is not None:
                family.add_metric((report.name,), value)
        yield family


def told_of(jobs: Sequence[JobView]) -> list[JobView]:
    """Return the jobs with metrics, each a label: unfinished jobs, and the newest of the others, up to a maximum."""
    running = [job for job in jobs if job.phase.phase not in TERMINAL_PHASES]
    over = [job for job in jobs if job.phase.phase in TERMINAL_PHASES]
    kept = {job.name for job in (over + running)[-MOST_JOBS:]}
    return [job for job in jobs if job.name in kept]


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=labels)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))
