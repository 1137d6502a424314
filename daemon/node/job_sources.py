"""Answers about a job from all nodes: the rows of its journal, and the last operations of its workers.

The newest written journal is in this node's store, on another node or in the checkpoint. Its old rows may lie in the
checkpoint's journal parts: they are read only for who asks for them.

Each node's times of operations are of its own clock. A few short calls measure its offset. The peer read its clock
between question and answer, so the middle is wrong by half the round trip at most. A smaller offset cannot be
distinguished from none, as between two daemons of one machine: then it counts as zero.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import DamagedCopyError, RecoveryError
from headway.daemon.blobs.checkpoint import is_there, layer_at, part_at, resolve_checkpoint_dir
from headway.daemon.blobs.checkpoint_names import part_name, parts_url
from headway.daemon.blobs.fetch import PartialFile, Source, fetch
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.blobs.peer_client import NodeClient, holder
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.lineage import JournalPart, own_parts
from headway.daemon.cluster.records import CheckpointRecord, PlanRecord
from headway.daemon.cluster.state_key import JOURNAL, StateKey
from headway.daemon.decide.boundaries import lineage_of, restorable
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView, Place
from headway.proto.control_pb2 import JournalRows, RecentOperations, WorkerTrace
from headway.stages.errors import DamagedFileError, PeerError, UnavailableError
from headway.stages.ids import Boundary, Timeline
from headway.stages.state.file_digest import FileDigest
from headway.stages.state.journal import Journal
from headway.stages.state.layer_file import read_journal

log = structlog.get_logger()

ROWS_A_MESSAGE: Final = 8192
"""Number of rows of one message: half a mebibyte."""


class JournalSource:
    """Finds, fetches and reads journals. A journal ends at a boundary, so its content is final on its timeline."""

    def __init__(
        self, *, node: str, view: ClusterView, store: StateStore, client: NodeClient, checkpoint_root: Path | None
    ) -> None:
        self._node = node
        self._view = view
        self._store = store
        self._client = client
        self._checkpoint_root = checkpoint_root
        self._reads = FileThreads("journals")

    async def rows(self, job_name: str, *, from_batch: int = 0, every: int = 1) -> AsyncIterator[JournalRows]:
        """Yield the batches of the newest available journal, from one on; none when no journal was written yet.

        every: only the batches that it divides, and those that were evaluated. Rows of lost parts are left out, with a
        warning. At most two parts are in memory.

        Raises RecoveryError when there is no such job, or no journal of it is available.
        """
        job = self._view.jobs.get(job_name)
        if job is None:
            raise RecoveryError(job_name, "there is no such job")
        newest = await self._newest(job)
        if newest is None:
            return
        async for journal, below in self._in_order(job, newest, from_batch):
            for message in _messages(journal, from_batch, below, max(1, every)):
                from_batch = message.next_batch
                yield message
                await asyncio.sleep(0)  # other calls of this node come between

    async def _newest(self, job: JobView) -> Journal | None:
        """Return the newest journal that can be read; None: none was written. Raises RecoveryError."""
        reasons = []
        for key in sorted(self._known(job), key=lambda key: (key.boundary, key.timeline), reverse=True):
            try:
                return await self._read(job, key)
            except (RecoveryError, PeerError, DamagedFileError, OSError) as error:
                log.warning("journal_not_read", key=str(key), error=str(error))
                reasons.append(str(error))
        if reasons:
            raise RecoveryError(f"journal of {job.name}", "; ".join(reasons))
        return None

    def _known(self, job: JobView) -> set[StateKey]:
        """Return the journals of this submission's own past.

        Journals on nodes count when their boundary is restorable, or when the job has no past on nodes any more:
        batches that a failure could still undo are not reported as final.
        """
        own = lineage_of(job)
        places = set(restorable(job, self._view.nodes)) if own is not None else self._last(job)
        if job.checkpoint is not None and JOURNAL in job.checkpoint.files:
            places.add((job.checkpoint.timeline, job.checkpoint.boundary))
        return {StateKey(job.name, *place, JOURNAL) for place in places}

    def _last(self, job: JobView) -> set[Place]:
        uid = job.submission.uid if job.submission is not None else ""
        held = {
            (key.timeline, key.boundary)
            for key, file in self._store.contents.items()
            if key.job == job.name and key.layer == JOURNAL and file.uid == uid
        }
        return held | {place for place in job.state if job.holders(*place, JOURNAL)}

    async def _in_order(
        self, job: JobView, newest: Journal, from_batch: int
    ) -> AsyncIterator[tuple[Journal, int | None]]:
        """Yield the checkpoint's parts and then the newest journal, each with the batch where the next one begins.

        Of a batch in two of them, the newer one counts. Parts without rows from `from_batch` on are not read.
        """
        last: Journal | None = None
        checkpoint, first = job.checkpoint, newest.first_batch
        if checkpoint is not None and first is not None and from_batch < first:
            for part in own_parts(checkpoint.journal_parts, lineage_of(job)):
                journal = await self._read_part(checkpoint, part) if from_batch < part.boundary else None
                if journal is None or journal.first_batch is None:
                    continue
                if last is not None:
                    yield last, journal.first_batch
                last = journal
        if last is not None:
            yield last, first
        yield newest, None

    async def _read_part(self, checkpoint: CheckpointRecord, part: JournalPart) -> Journal | None:
        """Return a part's rows; None, and a warning, when the part is gone or damaged."""
        url = parts_url(resolve_checkpoint_dir(checkpoint.url, self._checkpoint_root))
        with tempfile.TemporaryDirectory(prefix="headway-journal-") as folder:
            path = Path(folder) / f"{JOURNAL}.safetensors"
            try:
                if await self._reads.run(url, lambda _: is_there(f"{url}/{part_name(*part.place)}")):
                    await self._bring(path, part, [part_at(url, part, self._reads)])
                    end, timeline = Boundary(part.boundary), Timeline(part.timeline)
                    return await asyncio.to_thread(read_journal, path, boundary=end, timeline=timeline)
                reason = "it does not exist"
            except (DamagedCopyError, DamagedFileError) as error:
                reason = error.reason
        log.warning("journal_part_lost", url=url, boundary=part.boundary, reason=reason)
        return None

    async def _read(self, job: JobView, key: StateKey) -> Journal:
        written = _as_written(job, key)
        if (file := self._store.get(key)) is not None:
            path = file.path
            return await self._store.in_thread(lambda _: _journal_in(path, written))
        sources: dict[FileDigest, list[Source]] = {}
        for name, held in sorted(job.holders(key.timeline, key.boundary, JOURNAL).items()):
            if name in self._view.nodes and name != self._node:
                node = holder(self._client, self._view.nodes[name].endpoint, key, held.digest)
                sources.setdefault(held.digest, []).append(node)
        checkpoint = job.checkpoint
        if checkpoint is not None and (checkpoint.timeline, checkpoint.boundary) == (key.timeline, key.boundary):
            url, expected = resolve_checkpoint_dir(checkpoint.url, self._checkpoint_root), checkpoint.files[JOURNAL]
            sources.setdefault(expected.digest, []).append(layer_at(url, JOURNAL, expected, self._reads))
        failure = RecoveryError(str(key), "the nodes that held it are gone")
        with tempfile.TemporaryDirectory(prefix="headway-journal-") as folder:
            path = Path(folder) / f"{JOURNAL}.safetensors"
            for expected, those in sources.items():
                try:
                    await self._bring(path, expected, those)
                except RecoveryError as error:
                    failure = error
                    continue
                return await asyncio.to_thread(_journal_in, path, written)
        raise failure

    async def _bring(self, path: Path, expected: FileDigest, sources: list[Source]) -> None:
        arriving = PartialFile(path, expected, what=sources[0].name)
        await fetch(arriving, sources.copy, in_thread=partial(self._reads.run, str(path.parent)))


def _as_written(job: JobView, key: StateKey) -> StateKey:
    """Return the key under which a file was written: the parent's, in a checkpoint from which a job started."""
    checkpoint = job.checkpoint
    if checkpoint is None or (checkpoint.timeline, checkpoint.boundary) != (key.timeline, key.boundary):
        return key
    return replace(key, job=checkpoint.origin_job or key.job)


def _journal_in(path: Path, key: StateKey) -> Journal:
    return read_journal(path, job=key.job, boundary=Boundary(key.boundary))


def _messages(journal: Journal, first: int, below: int | None, every: int) -> Iterator[JournalRows]:
    """Yield the chosen rows from one batch to before another, and how far the journal goes in between."""
    next_batch = first
    for columns in journal.chosen(first, below, every=every, num_rows=ROWS_A_MESSAGE):
        next_batch = int(columns["batch"][-1]) + 1
        yield JournalRows(next_batch=next_batch, **{name: column.tolist() for name, column in columns.items()})
    end = int(journal.next_batch or 0)
    end = end if below is None else min(end, below)
    if end > next_batch:
        yield JournalRows(next_batch=end)


NUM_PINGS: Final = 6
"""Number of pings; the shortest counts: the others waited for something, the first for the connection."""
PING_TIMEOUT_S: Final = 5.0


class TraceSource:
    """Answers the Trace calls of one node."""

    def __init__(
        self,
        *,
        node: str,
        view: ClusterView,
        client: NodeClient,
        ask_worker: Callable[[int], Awaitable[RecentOperations]],
        clock: Callable[[], float],
    ) -> None:
        """ask_worker: returns the last operations of a device's worker; raises UnavailableError. clock: the workers',
        seconds.
        """
        self._node = node
        self._view = view
        self._client = client
        self._ask_worker = ask_worker
        self._clock = clock

    async def own(self, job: str) -> AsyncIterator[WorkerTrace]:
        """Yield the operations of this node's workers. Raises RecoveryError when the job has no plan in force."""
        plan = self._plan(job)
        for position, worker in enumerate(plan.workers):
            if worker.node == self._node:
                yield await self._of_worker(job, plan, position)

    async def all(self, job: str) -> AsyncIterator[WorkerTrace]:
        """Yield the operations of all workers of the plan in force; a silent node is the trouble of its workers.

        Raises RecoveryError when there is no plan.
        """
        plan = self._plan(job)
        nodes = sorted({worker.node for worker in plan.workers})
        for found in await asyncio.gather(*(self._of_node(job, plan, node) for node in nodes)):
            for trace in found:
                yield trace

    async def _of_node(self, job: str, plan: PlanRecord, node: str) -> list[WorkerTrace]:
        if node == self._node:
            return [trace async for trace in self.own(job)]
        try:
            if node not in self._view.nodes:
                raise UnavailableError(f"node {node}", "is gone")
            endpoint = self._view.nodes[node].endpoint
            ahead_s, error_s = await measure_clock(self._client, endpoint, clock=self._clock)
            traces = [trace async for trace in self._client.trace(endpoint, job, forwarded=True)]
        except (PeerError, RecoveryError) as error:
            mine = [position for position, worker in enumerate(plan.workers) if worker.node == node]
            return [WorkerTrace(node=node, worker=position, trouble=str(error)) for position in mine]
        for trace in traces:
            trace.clock_ahead_s, trace.clock_error_s = ahead_s, error_s
        return traces

    async def _of_worker(self, job: str, plan: PlanRecord, position: int) -> WorkerTrace:
        trace = WorkerTrace(node=self._node, worker=position)
        try:
            told = await self._ask_worker(plan.workers[position].device_index)
        except UnavailableError as error:
            trace.trouble = str(error)
            return trace
        if (told.job, told.generation, told.worker) != (job, plan.generation, position):
            trace.trouble = f"the worker on node {self._node} has not begun generation {plan.generation}"
        elif not told.kinds:
            trace.trouble = f"the worker on node {self._node} has done nothing yet"
        else:
            trace.operations.CopyFrom(told)
        return trace

    def _plan(self, job: str) -> PlanRecord:
        found = self._view.jobs.get(job)
        if found is None:
            raise RecoveryError(f"job {job}", "there is no such job")
        if found.plan is None:
            raise RecoveryError(f"job {job}", f"is {found.phase.phase}: no worker runs, so there is nothing to trace")
        return found.plan


async def measure_clock(
    client: NodeClient, endpoint: NodeEndpoint, *, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return (seconds by which the clock there is ahead, maximum error); (0, 0): one clock.

    Raises PeerError and RecoveryError.
    """
    best: tuple[float, float] | None = None
    for _ in range(NUM_PINGS):
        asked = clock()
        reply = await client.describe(endpoint, timeout_s=PING_TIMEOUT_S)
        answered = clock()
        half_s = (answered - asked) / 2
        if best is None or half_s < best[1]:
            best = reply.clock_s - (asked + half_s), half_s
    assert best is not None, "at least one ping"
    return best if abs(best[0]) > best[1] else (0.0, 0.0)
