"""The metrics of a daemon for Prometheus, at `metrics_listen`; off unless that is set.

Every daemon reports on its own node. Figures of jobs, users and all nodes come from the leader's daemon alone. HTTP has
threads of its own, and so have disks and cards, which may hang. The event loop, which owns the view, gathers the rest.

A family without samples is told too, with its help: so the names are the same in each state of a cluster.
"""

import asyncio
import importlib.metadata
import math
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headway.daemon.base.activities import Activities
from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.records import PROTOCOL_VERSION, TERMINAL_PHASES
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import WAITING, JobView
from headway.daemon.decide.quarantine import QUARANTINE_AFTER, left_out
from headway.daemon.decide.usage import MAX_USERS
from headway.daemon.decide.waiting import is_queued
from headway.daemon.net.rate_limit import OutgoingTransfers
from headway.daemon.node.service import NodeDesk
from headway.daemon.reports.job_report import JobReport, reports_in
from headway.daemon.reports.metrics_file import rates

log = structlog.get_logger()

Metric = CounterMetricFamily | GaugeMetricFamily

GATHER_TIMEOUT_S: Final = 5.0
GATHER_EVERY_S: Final = 1.0
MOST_JOBS: Final = 200
"""Maximum number of jobs with their own metrics."""
MOST_SCRAPES: Final = 8
"""Maximum number of connections that are answered at once."""
PROBE_EVERY_S: Final = 5.0
OLDEST_ANSWER_S: Final = 60.0
"""Age of disks' and cards' figures at which they are left out: the machine has not answered since then."""
CARDS_TIMEOUT_S: Final = 3.0
"""Time for nvidia-smi. One that hangs in its driver cannot be ended, and is not asked again."""
ASK_CARDS: Final = (
    "nvidia-smi",
    "--query-gpu=index,memory.used,memory.total,utilization.gpu",
    "--format=csv,noheader,nounits",
)


class Probe:
    """Asks the machine for something that may hang, in one thread, however many scrapes there are.

    A scrape reads the last answer. While nobody scrapes, nothing is asked.
    """

    def __init__(self, name: str, ask: Callable[[], list[Metric]], *, nothing: list[Metric]) -> None:
        """nothing: the families without samples, told while there is no answer of the last minute."""
        self._ask, self._nothing = ask, nothing
        self._answer, self._at = nothing, -math.inf
        self._is_wanted, self._has_answered = threading.Event(), threading.Event()
        self._is_first = True
        threading.Thread(target=self._run, name=f"metrics of {name}", daemon=True).start()

    def read(self) -> list[Metric]:
        """Return the last answer. Only the first call waits for one, for a second."""
        self._is_wanted.set()
        if self._is_first:
            self._is_first = False
            self._has_answered.wait(1.0)
        return self._answer if time.monotonic() - self._at < OLDEST_ANSWER_S else self._nothing

    def _run(self) -> None:
        while self._is_wanted.wait():
            try:
                answer = self._ask()
            except Exception as error:  # a thread that ends tells nobody
                log.warning("metrics_probe_failed", probe=threading.current_thread().name, error=str(error))
                answer = self._nothing
            self._answer, self._at = answer, time.monotonic()
            self._has_answered.set()
            time.sleep(PROBE_EVERY_S)
            self._is_wanted.clear()


class NodeMetrics(Collector):
    """Answers one scrape after the other. Made in the event loop's thread."""

    def __init__(self, desk: NodeDesk, activities: Activities) -> None:
        self._desk, self._activities = desk, activities
        self._loop = asyncio.get_running_loop()
        self._gathered: list[Metric] = []
        self._gathered_at = -math.inf
        node, folders = desk.node, {"state": desk.logs_dir.parent, "store": desk.store.directory}
        self._probes = (
            Probe("disks", lambda: list(_disks(node, folders)), nothing=list(_disks(node, {}))),
            Probe("cards", lambda: list(card_metrics(node, _ask_cards())), nothing=list(card_metrics(node, ""))),
        )

    def collect(self) -> Iterable[Metric]:
        """Collect the metrics; called in the server's thread. Raises TimeoutError when the event loop does
        not answer.
        """
        yield from asyncio.run_coroutine_threadsafe(self._gather(), self._loop).result(GATHER_TIMEOUT_S)
        for probe in self._probes:
            yield from probe.read()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: a starting daemon is not asked."""
        return ()

    async def _gather(self) -> list[Metric]:
        """Return what the view has. Whoever scrapes more often than that costs the event loop nothing."""
        if self._loop.time() - self._gathered_at >= GATHER_EVERY_S:
            self._gathered = [*node_metrics(self._desk, self._activities), *leader_metrics(self._desk)]
            self._gathered_at = self._loop.time()
        return self._gathered


class _Server(ThreadingMixIn, WSGIServer):
    """Answers few connections at once, and closes what comes beyond them: anybody may dial this port."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._places = threading.Semaphore(MOST_SCRAPES)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if there is a place."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and give the place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


class _Handler(WSGIRequestHandler):
    """Says nothing, and gives up on who says nothing."""

    timeout = GATHER_TIMEOUT_S

    def log_message(self, *_: object) -> None:
        """Log no scrape."""


def serve_metrics(host: str, port: int, desk: NodeDesk, activities: Activities) -> tuple[int, Callable[[], None]]:
    """Answer scrapes at a port (0: any) until the returned function is called. Raises ConfigError."""
    try:
        server = _Server((host or "0.0.0.0", port), _Handler)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}", "metrics_listen") from error
    registry = CollectorRegistry()
    registry.register(NodeMetrics(desk, activities))
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return int(server.server_address[1]), stop


def node_metrics(desk: NodeDesk, activities: Activities) -> Iterator[Metric]:
    """Yield the metrics of this node, each with its name."""
    view, node = desk.view, desk.node
    record = view.nodes.get(node)
    told = {
        "headway_etcd_reachable": ("Whether this daemon reaches etcd.", desk.etcd_away_s() is None),
        "headway_leader": ("Whether this daemon leads.", view.leader is not None and view.leader.node == node),
        "headway_clock_timestamp_seconds": ("This machine's clock.", time.time()),
        "headway_store_bytes": (
            "Layer files that this node holds.",
            sum(file.size_bytes for file in desk.store.contents.values()),
        ),
        "headway_store_room_bytes": (
            "Room that plans see for layer files: memory, or less where their folder has less.",
            record.memory_bytes if record is not None else 0,
        ),
        "headway_node_ailments": ("Present faults of this daemon.", len(activities.ailments)),
        "headway_node_failures": (
            "Failures of this node within the last ten minutes.",
            len(view.failures.get(node, {})),
        ),
        "headway_unreadable_keys": ("Records in etcd that are set aside.", len(view.unreadable)),
    }
    for name, (text, value) in told.items():
        yield _gauge(name, text, ("node",), {(node,): value})
    yield _gauge(
        "headway_build_info",
        "Releases with one protocol train together; nodes of one class give equal bits.",
        ("node", "version", "protocol", "arithmetic_class"),
        {
            (
                node,
                importlib.metadata.version("headway"),
                str(PROTOCOL_VERSION),
                record.arithmetic_class if record is not None else "",
            ): 1
        },
    )
    yield _gauge(
        "headway_certificate_expiry_timestamp_seconds",
        "End of this node's certificate, and of the authority that signed it.",
        ("node", "certificate"),
        {(node, whose): end for whose, end in desk.certificate_ends().items()},
    )
    yield _counter(
        "headway_activity_failures",
        "Failures of the daemon's activities; each was restarted.",
        ("node", "activity"),
        {(node, activity): number for activity, number in activities.num_failures.items()},
    )
    yield from _workers(view, node)
    yield from _transfers(node, desk.outgoing)


def _workers(view: ClusterView, node: str) -> Iterator[Metric]:
    """Yield what this node's workers did in the plans in force, and their memory on cards."""
    whose = "node", "job", "stage", "worker"
    spent: dict[tuple[str, ...], float] = {}
    replayed, resumed, peaks = {}, {}, {}
    for name, job in sorted(view.jobs.items()):
        for (holder, device_index), profile in sorted(job.profiles.items()):
            if holder == node and job.plan is not None and profile.peak_bytes:
                peaks[node, name, str(device_index)] = profile.peak_bytes
        for (generation, position), record in sorted(job.goodput.items()):
            if record.node != node or job.plan is None or generation != job.plan.generation:
                continue
            if position >= len(job.plan.workers):  # anybody may have written it
                continue
            its = (node, name, str(job.plan.stage_index(position)), str(position))
            for kind, value in record.seconds.items():
                kind = "waiting" if kind.startswith(WAITING) else kind
                spent[*its, kind] = spent.get((*its, kind), 0.0) + value
            replayed[its] = record.num_replayed
            resumed[its] = record.num_resumed
    yield _counter(
        "headway_goodput_seconds", "Seconds of this node's workers, by class of use.", (*whose, "class"), spent
    )
    yield _counter("headway_replayed_batches", "Batches that this node's workers recomputed.", whose, replayed)
    yield _counter("headway_link_resumes", "Links of this node's workers that broke and resumed.", whose, resumed)
    text = "Most memory that a worker had on its card."
    yield _gauge("headway_device_peak_bytes", text, ("node", "job", "device"), peaks)


def _transfers(node: str, outgoing: OutgoingTransfers) -> Iterator[Metric]:
    sent = outgoing.sent
    for name, text, values in (
        ("bytes", "Bytes of files that this node sent.", {kind: each.num_bytes for kind, each in sent.items()}),
        ("seconds", "Seconds that sending these files took.", {kind: each.seconds for kind, each in sent.items()}),
        (
            "held_seconds",
            "Seconds for which transfer_mbit_s held them back.",
            {kind: each.held_s for kind, each in sent.items()},
        ),
    ):
        samples = {(node, kind): value for kind, value in values.items()}
        yield _counter(f"headway_transfer_{name}", text, ("node", "kind"), samples)


def _disks(node: str, folders: dict[str, Path]) -> Iterator[Metric]:
    """Yield the file systems of this node's folders."""
    free, size = {}, {}
    for name, path in folders.items():
        try:
            usage = shutil.disk_usage(path)
        except OSError:
            continue
        free[node, name], size[node, name] = usage.free, usage.total
    yield _gauge("headway_disk_free_bytes", "Free bytes where the folder lies.", ("node", "folder"), free)
    yield _gauge("headway_disk_size_bytes", "Size of the file system where the folder lies.", ("node", "folder"), size)


def _ask_cards() -> str:
    """Return nvidia-smi's table of this machine's cards; empty: it is not there, or does not answer."""
    try:
        asked = subprocess.run(ASK_CARDS, capture_output=True, text=True, timeout=CARDS_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout


def card_metrics(node: str, table: str) -> Iterator[Metric]:
    """Yield memory and use of the cards in nvidia-smi's table: index, MiB used, MiB in all, percent; `[N/A]` is left
    out.
    """
    used: dict[tuple[str, str], float] = {}
    size, busy = used.copy(), used.copy()
    for line in table.splitlines():
        card, *cells = [cell.strip() for cell in line.split(",")]
        for found, cell, unit in zip((used, size, busy), cells, (1 << 20, 1 << 20, 0.01), strict=False):
            if cell.isdecimal():
                found[node, card] = int(cell) * unit
    labels = "node", "card"
    yield _gauge("headway_card_memory_used_bytes", "Memory of a card in use, by all processes.", labels, used)
    yield _gauge("headway_card_memory_bytes", "Memory of a card.", labels, size)
    yield _gauge("headway_card_busy_ratio", "Share of the last second in which a kernel ran.", labels, busy)


@dataclass(frozen=True, slots=True)
class _Told:
    """A job that has metrics."""

    report: JobReport
    job: JobView


_OF_JOB: Final[dict[str, tuple[str, Callable[[_Told], float | None]]]] = {
    "batch": ("Last batch whose loss is known.", lambda of: of.report.batch),
    "batches": ("Batches that the job has.", lambda of: of.report.batches),
    "last_batch_timestamp_seconds": (
        "Time at which the job last told of a batch.",
        lambda of: of.job.progress.updated_at or None if of.job.progress else None,
    ),
    "loss": ("Loss of the last batch that is known.", lambda of: of.report.loss),
    "eval_loss": ("Loss on held-out text, at the last batch with an evaluation.", lambda of: of.report.eval_loss),
    "final_eval_loss": ("Loss on held-out text after the last update.", lambda of: of.report.final_eval_loss),
    "learning_rate": (
        "Learning rate of optim.matrices in the update of that batch.",
        lambda of: rates(of.job.spec)(of.report.batch) if of.job.spec and of.report.batch is not None else None,
    ),
    "gradient_norm": (
        "Norm of that batch's gradient, before clipping.",
        lambda of: of.job.progress.gradient_norm if of.job.progress else None,
    ),
    "stopped_early_at": (
        "Boundary at which evaluations ended the job before its last batch.",
        lambda of: of.report.stopped_early_at,
    ),
    "tokens_per_second": ("Tokens a second, as measured.", lambda of: of.report.tokens_per_second),
    "batch_seconds": ("Seconds of a batch, as measured.", lambda of: _batch_s(of)),
    "predicted_batch_seconds": (
        "Seconds of a batch, as the plan in force predicts.",
        lambda of: of.job.plan.predicted_batch_seconds or None if of.job.plan else None,
    ),
    "workers": ("Workers of the plan in force.", lambda of: len(of.job.plan.workers) if of.job.plan else None),
    "generation": ("Number of the plan in force.", lambda of: of.report.generation),
    "goodput_ratio": ("Share of all workers' seconds that was useful.", lambda of: of.report.goodput.useful_share),
    "restorable_boundary": (
        "Newest boundary that survives the loss of copies - 1 nodes.",
        lambda of: of.report.safety.restorable[0] if of.report.safety.restorable else None,
    ),
    "lag_batches": ("Batches that a failure now would make the job recompute.", lambda of: of.report.safety.lag),
    "checkpoint_boundary": ("Boundary of the newest checkpoint.", lambda of: of.report.checkpoint_boundary),
    "checkpoint_timestamp_seconds": (
        "Time at which the newest checkpoint was written.",
        lambda of: of.job.checkpoint.written_at or None if of.job.checkpoint else None,
    ),
    "submitted_timestamp_seconds": ("Time at which the job was submitted.", lambda of: of.report.submitted_at or None),
    "phase_timestamp_seconds": ("Time since which the job is in its phase.", lambda of: of.report.since or None),
    "queued_timestamp_seconds": (
        "Time since which a job waits for devices; absent: it does not.",
        lambda of: (of.report.since or of.report.submitted_at) if is_queued(of.job) else None,
    ),
    "rollbacks": ("Rollbacks of the job so far.", lambda of: of.report.safety.num_rollbacks),
    "troubles": (
        "Faults that keep boundaries from being written.",
        lambda of: len(of.report.safety.troubles),
    ),
}
"""Metrics of a job by name, behind `headway_job_`; None: left out."""


def _batch_s(of: _Told) -> float | None:
    rate = of.report.tokens_per_second
    return of.job.spec.train.tokens_per_batch / rate if rate and of.job.spec is not None else None


def leader_metrics(desk: NodeDesk) -> Iterator[Metric]:
    """Yield the metrics of all nodes, users and jobs, if this node leads; unknown numbers are left out."""
    view = desk.view
    if view.leader is None or view.leader.node != desk.node:
        return
    text = "1 for the state of each node: ready, draining, quarantined, out of plans, or absent for less than a day."
    states = dict.fromkeys(sorted(node_states(view).items()), 1.0)
    yield _gauge("headway_node_state", text, ("node", "state"), states)
    yield from _users(view)
    yield _gauge("headway_jobs", "Jobs that etcd has; the newest have metrics of their own.", (), {(): len(view.jobs)})
    jobs = told_of(view.jobs_in_order())
    told = [_Told(*pair) for pair in zip(reports_in(view, jobs), jobs, strict=True)]
    phases = {(of.job.name, of.report.phase): 1.0 for of in told}
    yield _gauge("headway_job_phase", "1 for the phase that a job is in.", ("job", "phase"), phases)
    for name, (text, value_of) in _OF_JOB.items():
        found = {(of.job.name,): value_of(of) for of in told}
        known = {labels: value for labels, value in found.items() if value is not None}
        yield _gauge(f"headway_job_{name}", text, ("job",), known)


def node_states(view: ClusterView) -> dict[str, str]:
    """Return the state of each node that is there, or was within a day. Pure."""
    limit = view.leader.quarantine_after if view.leader else QUARANTINE_AFTER
    quarantined = left_out({name: found.values() for name, found in view.failures.items()}, limit=limit)
    states = dict.fromkeys(view.absent_since, "absent")
    for name, node in view.nodes.items():
        states[name] = "draining" if node.is_draining else "out" if node.stays_out else "ready"
    return states | dict.fromkeys(quarantined & view.nodes.keys(), "quarantined")


def _users(view: ClusterView) -> Iterator[Metric]:
    """Yield what users have, and what they are owed among those who have or want devices."""
    devices: dict[str, int] = {}
    for user, number in view.usage.held.values():
        devices[user] = devices.get(user, 0) + number
    devices |= {job.user: 0 for job in view.jobs.values() if is_queued(job) and job.user not in devices}
    users = list(islice(sorted(devices), MAX_USERS))
    weights = {user: view.shares.weights.get(user, 1.0) for user in users}
    owed = {(user,): weight / sum(weights.values()) for user, weight in weights.items()}
    yield _gauge("headway_user_share_ratio", "Share of a user who has or wants devices.", ("user",), owed)
    held = {(user,): devices[user] for user in users}
    yield _gauge("headway_user_devices", "Devices that the user's jobs have.", ("user",), held)


def told_of(jobs: Sequence[JobView]) -> list[JobView]:
    """Return the jobs with metrics, each a label: unfinished jobs, and the newest of the others, up to a maximum."""
    running = [job for job in jobs if job.phase.phase not in TERMINAL_PHASES]
    over = [job for job in jobs if job.phase.phase in TERMINAL_PHASES]
    kept = {job.name for job in (over + running)[-MOST_JOBS:]}
    return [job for job in jobs if job.name in kept]


Samples = Mapping[Any, float]
"""Value by a tuple of the labels' values."""


def _counter(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), samples)


def _gauge(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), samples)


def _filled(family: Metric, samples: Samples) -> Metric:
    for values, value in samples.items():
        family.add_metric(values, float(value))
    return family
