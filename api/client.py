"""What `import headway` gives: a cluster, the plain loop and the planner, as the commands of these names have them."""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

from headway.daemon.base.errors import (
    EXIT_CONFIG,
    EXIT_UNREACHABLE,
    ConfigError,
    JobFailedError,
    RecoveryError,
    StoreError,
    StoreUnreachableError,
)
from headway.daemon.client.cluster_access import ClusterSession, find_cluster
from headway.daemon.cluster.records import TERMINAL_PHASES, EventRecord
from headway.daemon.reports.job_report import JobReport, report_in, reports_in
from headway.daemon.reports.metrics_file import METRICS_NAME, HistoryRow, read_rows
from headway.daemon.reports.node_list import NodeReport, report_nodes
from headway.stages.errors import DataError, MissingPackageError, PeerError, check_installed

if TYPE_CHECKING:
    from headway.daemon.client.export import ExportReport
    from headway.daemon.client.preview import PlanPreview
    from headway.daemon.client.submission import Link, SubmitReport

__all__ = (
    "Client",
    "ConfigError",
    "DataError",
    "EventRecord",
    "HistoryRow",
    "JobFailedError",
    "JobReport",
    "MissingPackageError",
    "NodeReport",
    "PeerError",
    "RecoveryError",
    "StoreError",
    "StoreUnreachableError",
    "plan",
    "reference",
)

AnswerT = TypeVar("AnswerT")

SENDING_TIMEOUT_S: Final = 3600.0
"""Default deadline of calls that move a job's data or its model."""
GIB: Final = 1 << 30
_STARTING: Final = threading.Lock()


class Client:
    """A cluster. A context manager; its calls block, may come from any thread, and work in a notebook.

    Each call does what the command of its name does. What it returns is what the command prints with `--json`.

    Errors, with the exit code of the commands in brackets:

    - ConfigError, DataError, MissingPackageError: a name, a file or an argument is wrong, and the text says what to
      do (2).
    - StoreUnreachableError, another StoreError, PeerError, RecoveryError, TimeoutError: who does not answer, or what
      cannot be read (3).
    - JobFailedError: a watched job has ended without finishing (4).
    """

    def __init__(
        self,
        *,
        etcd: str | None = None,
        certs: str | Path | None = None,
        cluster: str | Path | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Find a cluster, as the commands do: the arguments, then HEADWAY_ETCD and HEADWAY_CERTS, then HEADWAY_CLUSTER
        or the folder `.headway`, in which `headway up` runs.

        etcd: its members, HOST:PORT[,HOST:PORT…]. certs: a folder with ca.pem, cert.pem and key.pem. cluster: the state
        folder of a local cluster. timeout_s: deadline of the cluster's answer to a call that names no other. Raises
        ConfigError, and StoreUnreachableError when no cluster runs.
        """
        folders = [None if each is None else Path(each) for each in (certs, cluster)]
        address = find_cluster(etcd=etcd, certs=folders[0], cluster=folders[1])
        self._etcd = ", ".join(address.etcd)
        self._timeout_s = timeout_s

        async def opened() -> ClusterSession:
            return ClusterSession(address)

        self._session = _result(opened())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Jobs go on."""
        _result(self._session.client.close())

    def jobs(self) -> list[JobReport]:
        """Return all jobs, in the order of their submission."""

        async def work(session: ClusterSession) -> list[JobReport]:
            view = await session.view()
            return reports_in(view, view.jobs_in_order())

        return self._do("jobs", work)

    def nodes(self) -> list[NodeReport]:
        """Return the nodes that are up or have failed, by name."""

        async def work(session: ClusterSession) -> list[NodeReport]:
            return report_nodes(await session.view())

        return self._do("nodes", work)

    def status(self, job: str) -> JobReport:
        """Return a job's phase, plan and loss, what a failure would cost, and why it is slow."""
        from headway.daemon.client.job_requests import job_of

        async def work(session: ClusterSession) -> JobReport:
            view = await session.view()
            return report_in(view, job_of(view, job))

        return self._do("status", work)

    def watch(self, job: str) -> Iterator[JobReport]:
        """Yield the job's report now and after each change, until the job is over.

        Changes while the caller is busy come as one. Raises JobFailedError at the end of a job that has not finished,
        StoreUnreachableError when etcd is away for 20 s.
        """
        reports = _reports(self._session, job)
        try:
            while (report := _result(self._session.while_reachable(_next(reports)))) is not None:
                yield report
        finally:
            _result(reports.aclose())

    def history(
        self, job: str, *, from_batch: int = 0, every: int = 1, timeout_s: float = SENDING_TIMEOUT_S
    ) -> list[HistoryRow]:
        """Return the rows of a job's batches from one on, also of a job that is over; `loss` is in nats per token.

        Batches that a failure could still undo are left out. every: only batches that this number divides, and those
        with a held-out loss.
        """
        from headway.daemon.client.job_watch import read_history

        async def work(session: ClusterSession) -> list[HistoryRow]:
            return [row async for row in read_history(session, job, from_batch=from_batch, every=every)]

        return self._do("history", work, timeout_s=timeout_s)

    def events(self, job: str) -> list[EventRecord]:
        """Return why each plan of a job changed, in sentences, oldest first."""
        from headway.daemon.client.job_requests import find_job

        async def work(session: ClusterSession) -> list[EventRecord]:
            found = await find_job(session, job)
            return [found.events[number] for number in sorted(found.events)]

        return self._do("events", work)

    def submit(
        self,
        job: str | Path | None,
        *,
        origin: str | None = None,
        model: str | None = None,
        change: bool = False,
        link: "Link | None" = None,
        priority: int | None = None,
        timeout_s: float = SENDING_TIMEOUT_S,
    ) -> "SubmitReport":
        """Put the job of a file in the queue, and send data that no node has.

        origin: a checkpoint to start from; without a file, its own job. model: folder or URL of the weights at the
        start. change: rates, data and the like may differ from the checkpoint's. link: kind of link between workers,
        and priority (-10 … 10): instead of the file's.
        """
        from headway.daemon.client import submission

        told: list[str] = []
        path = None if job is None else Path(job)
        options: dict[str, Any] = {"checkpoint": origin, "model": model, "are_changes_meant": change}
        draft = _aside(lambda: submission.read_draft(path, **options, link=link, priority=priority))
        done = self._do(
            "submit",
            lambda session: submission.submit(session, draft, tell=lambda *_: None, warn=told.append),
            timeout_s=timeout_s,
        )
        done.warnings[:0] = told
        return done.report

    def pause(self, job: str) -> str:
        """Stop a job after the batches that it has begun, with a checkpoint; return the answer for people."""
        return self._asked("pause", job)

    def resume(self, job: str) -> str:
        """Let a paused or failed job continue; return the answer for people."""
        return self._asked("resume", job)

    def cancel(self, job: str) -> str:
        """End a job now, without a checkpoint; return the answer for people."""
        return self._asked("cancel", job)

    def drain(self, node: str) -> str:
        """Move a node's layers elsewhere, without losing a batch; return the answer for people.

        The node takes no work until `headway nodes release NODE`, or until its daemon is restarted.
        """
        from headway.daemon.client import node_requests

        return self._do("drain", lambda session: node_requests.drain(session, node))

    def export(
        self,
        job: str,
        out: str | Path,
        *,
        force: bool = False,
        dtype: Literal["float32", "bfloat16"] | None = None,
        merge: bool = False,
        timeout_s: float = SENDING_TIMEOUT_S,
    ) -> "ExportReport":
        """Write the model of a job's newest boundary into the folder `out`, for AutoModelForCausalLM or PEFT, and
        metrics.jsonl beside it.

        force: replace a model that no export wrote. dtype: None: that of the folder from which the job started, else
        float32. merge: add adapters to the weights beside them. Needs torch. Remarks are warnings of Python.
        """
        check_installed("torch", "node", "headway.Client.export")
        from headway.daemon.client.export import ExportReport, export_with_history

        told: list[str] = []
        options: dict[str, Any] = {"force": force, "dtype": dtype, "merge": merge, "on_warning": told.append}
        boundary = self._do(
            "export", lambda session: export_with_history(session, job, Path(out), **options), timeout_s=timeout_s
        )
        for text in told:
            warnings.warn(text, stacklevel=2)
        return ExportReport(job=job, boundary=boundary.number, out=str(out))

    def _asked(self, request: str, job: str) -> str:
        from headway.daemon.client import job_requests

        answer: str = self._do(request, lambda session: getattr(job_requests, request)(session, job))
        return answer

    def _do(
        self,
        what: str,
        work: Callable[[ClusterSession], Coroutine[Any, Any, AnswerT]],
        *,
        timeout_s: float | None = None,
    ) -> AnswerT:
        """Return the result of work in the session. Raises TimeoutError, which names the call and the cluster."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s

        async def within() -> AnswerT:
            try:
                async with asyncio.timeout(limit_s) as deadline:
                    return await work(self._session)
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                where = f"headway.Client.{what}"
                raise TimeoutError(f"{where}: not done within {limit_s:g} s by the cluster of {self._etcd}") from error

        return _result(within())


def plan(job: str | Path, nodes: int | str | Path, *, memory_gib: float = 0.0) -> "PlanPreview":
    """Return which node would hold which layers of a job, and why: a dry run without a cluster or a GPU.

    nodes: a number of CPU nodes that share this machine, with `memory_gib` of memory each (0: enough), or a file of
    nodes as of `headway plan --nodes-file`. `lines` of the answer is its text for people. Raises ConfigError, also for
    a job that does not fit, with the arithmetic.
    """
    from headway.daemon.base.machine_share import num_cores
    from headway.daemon.client.planned_job import nodes_in, read_planned
    from headway.daemon.client.preview import equal_nodes, preview

    told: list[str] = []

    def work() -> "PlanPreview":
        spec, named, has_data = read_planned(Path(job), warn=told.append)
        if isinstance(nodes, int):
            equal = equal_nodes(nodes, memory_bytes=round(memory_gib * GIB), num_cores=num_cores())
            return preview(spec, equal, named=named, is_simulated=False, has_data=has_data)[0]
        records, links, assumed = nodes_in(Path(nodes), spec, named)
        found, _ = preview(spec, records, named=named, links=links, is_simulated=False, has_data=has_data)
        told.extend(assumed)
        return found

    found = _aside(work)
    for text in told:
        warnings.warn(text, stacklevel=2)
    return found


def reference(
    job: str | Path, out: str | Path | None = None, *, device: Literal["auto", "cpu", "cuda"] = "auto"
) -> list[HistoryRow]:
    """Train a job in one plain loop, without a cluster; return the rows that every run of the job has, bit for bit.

    It computes in a process of its own, because exact arithmetic needs settings of torch that are not the caller's.
    Seconds, and the generation, which is 0, are the loop's own. out: folder for metrics.jsonl and the model; None: they
    are not kept. Needs torch. Raises ConfigError, MissingPackageError, RecoveryError, JobFailedError.
    """
    check_installed("torch", "node", "headway.reference")
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        written = Path(folder if out is None else out)
        words = ["reference", str(job), "--out", str(written), "--device", device]
        command = [sys.executable, "-P", "-m", "headway.daemon.cli.main", *words]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        told = done.stderr.strip().removeprefix("headway: ")
        if done.returncode == EXIT_CONFIG:
            raise ConfigError(told)
        if done.returncode == EXIT_UNREACHABLE:
            raise RecoveryError(str(job), told)
        if done.returncode != 0:
            raise JobFailedError(job=str(job), phase="failed", reason=told or f"it ended with {done.returncode}")
        return read_rows(written / METRICS_NAME)


async def _reports(session: ClusterSession, name: str) -> AsyncGenerator[JobReport, None]:
    """Yield each other report of a job, until it is over. Raises as `Client.watch`."""
    from headway.daemon.client.job_requests import job_of
    from headway.daemon.client.job_watch import check_finished, is_resumed

    last: JobReport | None = None
    views = session.follow()
    try:
        async for view in views:
            job = job_of(view, name)
            if (report := report_in(view, job)) != last:
                yield report
            last = report
            if job.phase.phase in TERMINAL_PHASES and not is_resumed(job):
                check_finished(job, where=f"`headway logs {name}`")
                return
    finally:
        await views.aclose()


async def _next(reports: AsyncGenerator[JobReport, None]) -> JobReport | None:
    return await anext(reports, None)


def _aside(work: Callable[[], AnswerT]) -> AnswerT:
    """Return the result of work in a thread of its own: the caller's may be a notebook's, with a running event loop."""
    with ThreadPoolExecutor(1, thread_name_prefix="headway") as pool:
        return pool.submit(work).result()


def _result(work: Coroutine[Any, Any, AnswerT]) -> AnswerT:
    """Return the result of work in the event loop of all clients; an interrupted caller's work is cancelled.

    Raises ConfigError in a process that was forked after the first client: neither the loop nor gRPC runs there.
    """
    loop, process = _loop()
    if process != os.getpid():
        work.close()
        what = "was forked from one that has a Client, whose threads are missing here"
        raise ConfigError(f'{what}; start it with multiprocessing\'s "spawn"', "this process")
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _loop() -> tuple[asyncio.AbstractEventLoop, int]:
    """Return the one event loop, to which all connections belong, and the process in which it runs."""
    with _STARTING:
        return _started()


@cache
def _started() -> tuple[asyncio.AbstractEventLoop, int]:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="headway", daemon=True).start()
    return loop, os.getpid()
