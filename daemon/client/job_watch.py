"""Follows a job to its end: its progress, its journal into `metrics.jsonl`, the output of its workers."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import ConfigError, JobFailedError, RecoveryError, StoreError
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.client.cluster_access import ClusterSession, node_client
from headway.daemon.client.job_requests import job_of, node_of
from headway.daemon.cluster.records import TERMINAL_PHASES, Desired, Phase
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.decide.boundaries import lineage_of, restorable
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.reports.metrics_file import HistoryRow, MetricsFile, rates
from headway.daemon.reports.watch_view import Display, LossHistory, snapshot
from headway.proto import control_pb2
from headway.stages.early_stop import NOT_KNOWN
from headway.stages.errors import PeerError, ProtocolError, UnavailableError

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
            return [(row.batch, row.loss) async for row in history_in(session, view, name)]
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
MOST_INTERVAL_S: Final = 5.0
"""All nodes are asked for the last rows after a pause that grows up to this."""
_COLUMNS: Final = ("batch", "loss", "tokens", "seconds", "generation", "eval_loss", "gradient_norm", "final_eval_loss")


class HistoryReader:
    """Reads the rows of a job, each once and in order, as they become final: no failure can undo them any more."""

    def __init__(self, session: ClusterSession, job: str, *, from_batch: int = 0, every: int = 1) -> None:
        """every: only batches that it divides, evaluated ones, and the last of a job that is over. Raises ConfigError
        without a certificate.
        """
        if session.identity is None:
            raise ConfigError("daemons answer only clients with a certificate; name its folder", "--certs")
        self.next_batch = from_batch
        """All rows before it have been read, or are not chosen."""
        self._shown = from_batch - 1
        self._every = every
        self._job = job
        self._session = session
        self._client = NodeClient(session.identity)
        self._written: set[tuple[int, int]] = set()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def rows(self, view: ClusterView) -> AsyncIterator[HistoryRow]:
        """Yield what the first node tells that can tell everything it knows. Raises UnavailableError when none can."""
        reasons = []
        for name in sorted(view.nodes):
            try:
                async for row in self._rows_of(view, view.nodes[name].endpoint):
                    yield row
            except (PeerError, RecoveryError) as error:
                reasons.append(str(error))
            else:
                return
        raise UnavailableError("the cluster", "; ".join(reasons) or "no node is up that could be asked")

    async def new_rows(self, view: ClusterView, job: JobView) -> AsyncIterator[HistoryRow]:
        """Yield rows if a journal was written since the last call. A node that does not answer is asked later."""
        written = set(restorable(job, view.nodes)) if job.spec is not None else set()
        if lineage_of(job) is None:
            written |= {place for place in job.state if job.holders(*place, JOURNAL)}
        if job.checkpoint is not None:
            written.add((job.checkpoint.timeline, job.checkpoint.boundary))
        if not written <= self._written:
            try:
                async for row in self.rows(view):
                    yield row
            except (PeerError, RecoveryError):
                return
            self._written |= written

    async def rest(self, num_batches: int, *, timeout_s: float = WHOLE_TIMEOUT_S) -> AsyncIterator[HistoryRow]:
        """Yield rows until `num_batches` batches are there: a daemon may not know yet that the job has ended.

        Raises TimeoutError, naming what is missing and why.

        """
        reason = "no node has more batches"
        gives_up_at, pause_s = time.monotonic() + timeout_s, WHOLE_INTERVAL_S
        while self.next_batch < num_batches:
            view = await self._session.view()
            for name in sorted(view.nodes):
                try:
                    async for row in self._rows_of(view, view.nodes[name].endpoint):
                        yield row
                except (PeerError, RecoveryError) as error:
                    reason = str(error)
            if self.next_batch < num_batches:
                if time.monotonic() > gives_up_at:
                    have = f"{self.next_batch} of {num_batches} batches"
                    raise TimeoutError(f"journal of {self._job}: {have} came within {timeout_s:g} s ({reason})")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_INTERVAL_S)

    async def _rows_of(self, view: ClusterView, endpoint: NodeEndpoint) -> AsyncIterator[HistoryRow]:
        """Yield what a daemon knows of the job's journal. Raises PeerError, RecoveryError."""
        job = job_of(view, self._job)
        if job.spec is None:
            return
        rate = rates(job.spec)
        async for row in self._told(endpoint, rate, every=self._every):
            yield row
        if self._shown < self.next_batch - 1 and self._is_whole(job):  # the last row is shown, whichever are chosen
            self.next_batch -= 1
            async for row in self._told(endpoint, rate, every=1):
                yield row

    def _is_whole(self, job: JobView) -> bool:
        """Return whether a job is over and its last row has been reached."""
        if job.phase.phase not in TERMINAL_PHASES or is_resumed(job):
            return False
        is_short = job.checkpoint is not None and self.next_batch < job.checkpoint.boundary
        return job.phase.phase is not Phase.FINISHED or not is_short

    async def _told(
        self, endpoint: NodeEndpoint, rate: Callable[[int], float], *, every: int
    ) -> AsyncIterator[HistoryRow]:
        told = self._client.journal(endpoint, self._job, from_batch=self.next_batch, every=every)
        async for columns in told:
            if len({len(getattr(columns, name)) for name in _COLUMNS}) > 1:
                raise ProtocolError(str(endpoint), "sent columns of a history that differ in length")
            for row in _rows_in(columns, rate):
                yield row
                self._shown = row.batch
            self.next_batch = columns.next_batch


def _rows_in(columns: control_pb2.JournalRows, rate: Callable[[int], float]) -> Iterator[HistoryRow]:
    numbers = (getattr(columns, name) for name in _COLUMNS)
    for batch, loss, tokens, seconds, generation, eval_loss, norm, final in zip(*numbers, strict=True):
        yield HistoryRow(
            batch=batch,
            loss=loss,
            learning_rate=rate(batch),
            tokens=tokens,
            seconds=seconds,
            generation=generation,
            eval_loss=None if eval_loss == NOT_KNOWN else eval_loss,
            gradient_norm=None if norm < 0 else norm,
            final_eval_loss=None if final == NOT_KNOWN else final,
        )


class JournalCopy:
    """The metrics file of one job, and the source of its rows. An existing file is continued."""

    def __init__(self, session: ClusterSession, job: str, path: Path) -> None:
        self.reader = HistoryReader(session, job)
        self.file = MetricsFile(path, is_resumed=True)
        self.reader.next_batch = self.file.last_batch + 1

    async def close(self) -> None:
        """Close the file and the connections."""
        self.file.close()
        await self.reader.close()

    async def on_view(self, view: ClusterView, job: JobView) -> None:
        """Copy new lines, see `HistoryReader.new_rows`."""
        async for row in self.reader.new_rows(view, job):
            self.file.append(row)

    async def copy_whole(self, num_batches: int, *, timeout_s: float = WHOLE_TIMEOUT_S) -> None:
        """Copy until `num_batches` batches are there, see `HistoryReader.rest`."""
        async for row in self.reader.rest(num_batches, timeout_s=timeout_s):
            self.file.append(row)

    async def copy(self, view: ClusterView) -> None:
        """Append the batches that the file lacks. Raises UnavailableError."""
        async for row in self.reader.rows(view):
            self.file.append(row)


async def read_history(
    session: ClusterSession, name: str, *, from_batch: int = 0, every: int = 1
) -> AsyncIterator[HistoryRow]:
    """Yield the rows of a job that no failure can undo any more, from a batch on; also of one that is over.

    every: as of HistoryReader. Raises ConfigError for an unknown job, UnavailableError
    when no node answers.
    """
    async for row in history_in(session, await session.view(), name, from_batch=from_batch, every=every):
        yield row


async def history_in(
    session: ClusterSession, view: ClusterView, name: str, *, from_batch: int = 0, every: int = 1
) -> AsyncIterator[HistoryRow]:
    """Yield the same, by a view."""
    job_of(view, name)
    reader = HistoryReader(session, name, from_batch=from_batch, every=every)
    try:
        async for row in reader.rows(view):
            yield row
    finally:
        await reader.close()


async def last_row(session: ClusterSession, job: JobView) -> HistoryRow | None:
    """Return the row of the last batch of a finished job; None: nobody tells it soon."""
    end = job.checkpoint.boundary if job.checkpoint is not None else 0
    last = None
    with suppress(ConfigError, StoreError, TimeoutError):
        reader = HistoryReader(session, job.name, from_batch=end - 1)
        try:
            async with asyncio.timeout(PAST_TIMEOUT_S):
                async for row in reader.rest(end):
                    last = row
        finally:
            await reader.close()
    return last


async def write_history(session: ClusterSession, name: str, path: Path, *, below: int) -> HistoryRow | None:
    """Write the rows before a boundary as a metrics file, in place of an earlier one; return the last of them.

    Raises ConfigError when the file is another one, UnavailableError when no node answers.
    """
    if path.exists():
        MetricsFile(path, is_resumed=True).close()  # nothing of a user's is replaced
    last = None
    draft = path.with_name(f"{path.name}.partial")  # an earlier file stays until all rows are here
    try:
        with MetricsFile(draft) as metrics:
            async for row in read_history(session, name):
                if row.batch < below:
                    metrics.append(last := row)
        draft.replace(path)
        return last
    finally:
        draft.unlink(missing_ok=True)


async def follow_history(
    session: ClusterSession, name: str, *, from_batch: int = 0, every: int = 1
) -> AsyncIterator[HistoryRow]:
    """Yield the same rows and, until the job is over, each further one as soon as it is final.

    Raises ConfigError when the job does not exist or is removed meanwhile, TimeoutError when nobody tells the last
    rows.
    """
    reader, views = HistoryReader(session, name, from_batch=from_batch, every=every), session.follow()
    try:
        async for view in views:
            job = job_of(view, name)
            async for row in reader.new_rows(view, job):
                yield row
            if job.phase.phase in TERMINAL_PHASES and not is_resumed(job):
                break
        if job.phase.phase is Phase.FINISHED:
            async for row in reader.rest(job.checkpoint.boundary if job.checkpoint is not None else 0):
                yield row
        else:
            with suppress(PeerError, RecoveryError):
                async for row in reader.rows(await session.view()):
                    yield row
    finally:
        await views.aclose()
        await reader.close()


async def read_logs(
    session: ClusterSession, job: str, *, node: str = "", follow: bool = False, last_lines: int = 0
) -> AsyncGenerator[control_pb2.LogLine, None]:
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
