"""Follows a job to its end: its progress, its journal into `metrics.jsonl`, the output of its workers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import ConfigError, JobFailedError, RecoveryError
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.client.cluster_access import ClusterSession, first_answer, node_client
from headway.daemon.client.job_requests import job_of, node_of
from headway.daemon.cluster.records import TERMINAL_PHASES, Desired, Phase
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.decide.boundaries import lineage_of, restorable
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.reports.metrics_file import HistoryRow, MetricsFile, rates
from headway.daemon.reports.watch_view import Display, LossHistory, snapshot
from headway.proto import control_pb2
from headway.stages.errors import PeerError, UnavailableError

PAST_TIMEOUT_S: Final = 3.0
"""Wait at most so long for the past of a job before its present is shown."""
OnView = Callable[[ClusterView, JobView], Awaitable[None]]


async def follow_job(
    session: ClusterSession,
    name: str,
    *,
    display: Display,
    on_view: OnView | None = None,
) -> JobView:
    """Show a job until it has ended; return it.

    on_view is awaited with every state of the cluster, including the last, before it is shown. Raises ConfigError when
    the job does not exist or is removed while it is watched.
    """
    history: LossHistory | None = None
    views = session.follow()
    try:
        async for view in views:
            job = job_of(view, name)
            if history is None:
                history = LossHistory(dict(await _past(session, view, name)))
            if on_view is not None:
                await on_view(view, job)
            if (shown := snapshot(view, name, history)) is not None:
                display.show(shown)
            if job.phase.phase in TERMINAL_PHASES and not is_resumed(job):
                return job
    finally:
        await views.aclose()
    raise AssertionError("a cluster is followed for ever")


async def _past(session: ClusterSession, view: ClusterView, name: str) -> list[tuple[int, float]]:
    """Return (batch, loss) of a job from its beginning; none if nobody tells them soon: then its picture begins now."""
    with suppress(PeerError, RecoveryError, ConfigError, TimeoutError):
        async with asyncio.timeout(PAST_TIMEOUT_S):
            return [(row.batch, row.loss) for row in await history_in(session, view, name)]
    return []


async def wait_for_phase(session: ClusterSession, name: str, phases: frozenset[Phase], *, timeout_s: float) -> JobView:
    """Wait until a job has one of some phases, or has ended. Raises TimeoutError with its present phase."""
    job: JobView | None = None
    views = session.follow()
    try:
        async with asyncio.timeout(timeout_s):
            async for view in views:
                job = job_of(view, name)
                if job.phase.phase in phases | TERMINAL_PHASES and not is_resumed(job):
                    return job
    except TimeoutError as error:
        now = job.phase.phase if job else "unknown"
        raise TimeoutError(f"job {name}: still {now} after {timeout_s:g} s") from error
    finally:
        await views.aclose()
    raise AssertionError("a cluster is followed for ever")


def is_resumed(job: JobView) -> bool:
    """Return whether a failed job was asked to continue and the leader has not answered yet."""
    wanted = job.desired
    return job.phase.phase is Phase.FAILED and wanted.state is Desired.RUNNING and wanted.request > job.phase.request


def check_finished(job: JobView, *, where: str) -> None:
    """Raise JobFailedError unless the job has finished. where: the file or command that shows more."""
    if job.phase.phase is Phase.FINISHED:
        return
    lines = job.phase.error.strip().splitlines()
    raise JobFailedError(
        job.name, job.phase.phase.value, job.phase.reason, last_line=traceback_line(lines), where=where
    )


def traceback_line(lines: list[str]) -> str:
    """Return the line of a failed worker's text that names the exception: the first line after the last traceback.

    Without a traceback it is the first line, which says how the worker ended; its log follows.

    """
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
    for line in lines[starts[-1] + 1 :] if starts else []:
        if line and not line[0].isspace():
            return line
    return lines[0] if lines else ""


WHOLE_TIMEOUT_S: Final = 30.0
WHOLE_INTERVAL_S: Final = 0.1


class JournalCopy:
    """The metrics file of one job, and the source of its journal. An existing file is continued."""

    def __init__(self, session: ClusterSession, job: str, path: Path) -> None:
        if session.identity is None:
            raise ConfigError("daemons answer only clients with a certificate; name its folder", "--certs")
        self.file = MetricsFile(path, is_resumed=True)
        self._job = job
        self._session = session
        self._client = NodeClient(session.identity)
        self._written: set[tuple[int, int]] = set()

    async def close(self) -> None:
        """Close the file and the connections."""
        self.file.close()
        await self._client.close()

    async def on_view(self, view: ClusterView, job: JobView) -> None:
        """Copy new lines if a journal was written since the last call. A node that does not answer is asked later."""
        written = set(restorable(job, view.nodes)) if job.spec is not None else set()
        if lineage_of(job) is None:
            written |= {place for place in job.state if job.holders(*place, JOURNAL)}
        if job.checkpoint is not None:
            written.add((job.checkpoint.timeline, job.checkpoint.boundary))
        if not written <= self._written:
            try:
                await self.copy(view)
            except (PeerError, RecoveryError):
                return
            self._written |= written

    async def copy_whole(self, num_batches: int, *, timeout_s: float = WHOLE_TIMEOUT_S) -> None:
        """Copy until `num_batches` batches are there: a daemon may not know yet that the job has ended.

        Raises TimeoutError, naming what is missing and why.

        """
        reason = "no node has more batches"
        try:
            async with asyncio.timeout(timeout_s):
                while self.file.last_batch < num_batches - 1:
                    view = await self._session.view()
                    for name in sorted(view.nodes):
                        try:
                            await self._copy_from(view, view.nodes[name].endpoint)
                        except (PeerError, RecoveryError) as error:
                            reason = str(error)
                    if self.file.last_batch < num_batches - 1:
                        await asyncio.sleep(WHOLE_INTERVAL_S)
        except TimeoutError as error:
            have = self.file.last_batch + 1
            raise TimeoutError(
                f"journal of {self._job}: {have} of {num_batches} batches came within {timeout_s:g} s ({reason})"
            ) from error

    async def copy(self, view: ClusterView) -> int:
        """Append the batches that the file lacks; return their number. Raises UnavailableError."""
        return await first_answer(_endpoints(view), partial(self._copy_from, view))

    async def _copy_from(self, view: ClusterView, endpoint: NodeEndpoint) -> int:
        before = self.file.last_batch
        async for row in _rows(self._client, endpoint, job_of(view, self._job), from_batch=before + 1):
            self.file.append(row)
        return self.file.last_batch - before


async def read_history(session: ClusterSession, name: str, *, from_batch: int = 0) -> list[HistoryRow]:
    """Return the rows of a job that no failure can undo any more, from a batch on; also of one that is over.

    Raises ConfigError for an unknown job, UnavailableError when no node answers.
    """
    return await history_in(session, await session.view(), name, from_batch=from_batch)


async def history_in(session: ClusterSession, view: ClusterView, name: str, *, from_batch: int = 0) -> list[HistoryRow]:
    """Return the same, by a view."""
    job = job_of(view, name)

    async def asked(endpoint: NodeEndpoint) -> list[HistoryRow]:
        return [row async for row in _rows(client, endpoint, job, from_batch=from_batch)]

    async with node_client(session.identity) as client:
        return await first_answer(_endpoints(view), asked)


async def _rows(
    client: NodeClient, endpoint: NodeEndpoint, job: JobView, *, from_batch: int
) -> AsyncIterator[HistoryRow]:
    """Yield what a daemon knows of a job's journal. Raises PeerError, RecoveryError."""
    if job.spec is None:
        return
    rate = rates(job.spec)
    async for entry in client.journal(endpoint, job.name, from_batch=from_batch):
        yield HistoryRow(
            batch=entry.batch,
            loss=entry.loss,
            learning_rate=rate(entry.batch),
            tokens=entry.tokens,
            seconds=entry.seconds,
            generation=entry.generation,
            eval_loss=entry.eval_loss if entry.HasField("eval_loss") else None,
        )


def _endpoints(view: ClusterView) -> list[NodeEndpoint]:
    return [view.nodes[name].endpoint for name in sorted(view.nodes)]


async def read_logs(
    session: ClusterSession, job: str, *, node: str = "", follow: bool = False, last_lines: int = 0
) -> AsyncIterator[control_pb2.LogLine]:
    """Yield the lines of every node, or of one. Raises ConfigError for an unknown name, UnavailableError."""
    view = await session.view()
    job_of(view, job)
    if node:
        node_of(view, node)
    request = control_pb2.LogsRequest(job=job, node=node, follow=follow, last_lines=last_lines)
    reasons: list[str] = []
    async with node_client(session.identity) as client:
        for name in sorted(view.nodes, key=lambda name: name != node):
            has_begun = False
            try:
                async for line in client.logs(view.nodes[name].endpoint, request):
                    has_begun = True
                    yield line
                return
            except PeerError as error:
                if has_begun:
                    raise
                reasons.append(str(error))
    raise UnavailableError("the cluster", "; ".join(reasons) or "no node is up that could send logs")
