"""Moves the files of a node's store: taken in from workers, fetched, copied to durable storage, deleted."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary
from zlib import crc32

import structlog

from headway.daemon.agent.state_steps import is_welcome
from headway.daemon.agent.steps import Delete, Fetch, Upload
from headway.daemon.base.errors import ConfigError, NoAccessError, RecoveryError, StorageAwayError
from headway.daemon.base.file_system import file_system_of
from headway.daemon.base.places import is_store
from headway.daemon.blobs.checkpoint import copy_to_checkpoint, layer_at, probe, resolve_checkpoint_dir
from headway.daemon.blobs.checkpoint_names import boundary_url
from headway.daemon.blobs.fetch import Source, source_at
from headway.daemon.blobs.file_threads import Beat, FileThreads
from headway.daemon.blobs.peer_client import NodeClient, holder
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.measurements import ReadingRecord
from headway.daemon.cluster.records import Save
from headway.daemon.cluster.state_key import StateKey, StoredFile
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import JobSpec
from headway.daemon.models.origin_parts import read_part
from headway.daemon.net.rate_limit import OutgoingTransfers
from headway.daemon.worker.goal import Wrote

log = structlog.get_logger()

SWEEP_PERIOD_S: Final = 60.0
STRAY_AFTER_S: Final = 600.0
"""Age after which an unknown file counts as stray; before, a worker may still be writing it."""
LEFT_AFTER_S: Final = 120.0
"""The same age on timelines where no worker writes: a worker died while writing the file."""
NUM_COPIES: Final = 2
"""Number of files copied to one file system at once."""
NUM_READS: Final = 4
"""Number of files read from one file system at once."""
NUM_FETCHES: Final = 4
"""Number of awaited files requested from other nodes at once: the others follow in order."""
NUM_AT_ONCE: Final = 4
"""Number of copies requested from other nodes at once."""
SILENT_STEP_S: Final = 5.0
"""Silence is told in steps of this length; a shorter one is none."""
Clock = Callable[[], float]
"""Returns seconds."""
LOOK_S: Final = 1.0
LOOKING_S: Final = 30.0
"""Time of a file system to answer; the others are looked at meanwhile."""
AGAIN_S: Final = 60.0
"""Pause before an unusable folder is tried again: longer than a look lasts."""


class StateKeeper:
    """The agent's work on files, and what it knows about them beyond the store."""

    def __init__(
        self,
        *,
        node: str,
        view: ClusterView,
        store: StateStore,
        client: NodeClient,
        checkpoint_root: Path | None,
        outgoing: OutgoingTransfers,
        wrote_late: Callable[[str], None] = lambda _: None,
    ) -> None:
        """wrote_late: is called with the job when a copy to its checkpoint folder ends after it was given up."""
        self._node = node
        self._view = view
        self._store = store
        self._client = client
        self._checkpoint_root = checkpoint_root
        self._outgoing = outgoing
        self._wrote_late = wrote_late
        self.access = CheckpointAccess(node=node, view=view, checkpoint_root=checkpoint_root)
        self._copies = FileThreads("copies", num_at_once=NUM_COPIES)
        self._fetches = asyncio.Semaphore(NUM_FETCHES)
        self._copying = asyncio.Semaphore(NUM_AT_ONCE)
        self._reads = FileThreads("reads", num_at_once=NUM_READS)
        self._reading: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Turns of the files that are read from each file system, while any is."""
        self.reads = OriginReads()
        self.durable: set[StateKey] = set()
        """Held files that are also in the checkpoint folder."""
        self.troubles: dict[StateKey, str] = {}
        """Held files that could not be copied to the checkpoint folder, with the reason."""

    # --- From workers -----------------------------------------------------------------------------------------------

    async def wrote(self, wrote: Wrote) -> str:
        """Take in files that a worker wrote. Return why they cannot be kept, or an empty text.

        Files outside the job's own past are deleted, and so is a snapshot that exceeds the quota. A stop's files are
        kept even beyond the quota: without them, the work since the last boundary would be lost.
        """
        job = self._view.jobs.get(wrote.job)
        timeline = wrote.timeline
        paths = [Path(file.path) for file in wrote.files]
        if job is None or not is_welcome(job, timeline, wrote.boundary):
            log.warning("state_not_wanted", job=wrote.job, generation=wrote.generation, boundary=wrote.boundary)
            await self._discard(paths)
            return ""
        try:
            await self._store.require_written({Path(file.path): file.size_bytes for file in wrote.files})
            for file in wrote.files:
                self._store.hold(
                    StateKey(wrote.job, timeline, wrote.boundary, file.layer),
                    StoredFile(
                        path=Path(file.path),
                        size_bytes=file.size_bytes,
                        checksum=file.checksum,
                        generation=wrote.generation,
                        uid=_uid(job),
                    ),
                    has_quota=wrote.is_snapshot,
                )
        except RecoveryError as error:
            if wrote.is_snapshot:
                self._store.delete(*(StateKey(wrote.job, timeline, wrote.boundary, file.layer) for file in wrote.files))
                await self._discard(paths)
            return str(error)
        return ""

    def refused_file(self, path: Path) -> None:
        """Stop holding a file that a worker found damaged."""
        for key, file in list(self._store.contents.items()):
            if file.path == path:
                self._store.drop_damaged(key)

    async def _discard(self, paths: Iterable[Path]) -> None:
        """Delete files that a worker wrote and no job needs, except those that the store holds."""
        with contextlib.suppress(RecoveryError):
            await self._store.discard(paths)

    # --- Steps ------------------------------------------------------------------------------------------------------

    async def fetch(self, step: Fetch) -> None:
        """Fetch one file. Raises RecoveryError or ConfigError."""
        if step.device_index is None:
            async with self._copying:
                await self._bring(step, lambda: self._nodes(step, step.holders, unhurried=True))
        elif step.checkpoint_url:
            await self._fetch_stored(step)
        else:
            async with self._fetches:
                holders = _spread(step.holders, f"{self._node}/{step.key.layer}")
                await self._bring(step, lambda: self._nodes(step, holders))

    async def _fetch_stored(self, step: Fetch) -> None:
        """Fetch from the checkpoint or the model's folder; else through a node that reads the file for this one. Damage
        counts only if nobody else finds it sound: it may be in this node's memory, or on its way there.
        """
        key, job, url = step.key, self._job(step.run_key.job), step.checkpoint_url
        if not key.is_of_origin:
            url = resolve_checkpoint_dir(url, self._checkpoint_root)
        place = self._place(step, url)

        def sources() -> Iterator[Source]:
            yield place
            yield from self._nodes(step, self._others, is_forwarded=True)

        async with self._reading.setdefault(file_system_of(url), asyncio.Semaphore(NUM_READS)):
            if not key.is_of_origin:
                await self._bring(step, sources)
                return
            with self.reads.reading(job.name, key, url=url, size_bytes=step.expected.size_bytes) as read:
                try:
                    await self._bring(step, sources, tell=read.reached)
                except RecoveryError as error:
                    if error.item.startswith(str(self._store.directory)):
                        raise
                    raise type(error)(error.item, f"{error.reason}; {_asked_too(self._others, key)}") from error

    def _place(self, step: Fetch, url: str) -> Source:
        """Return the file in the checkpoint or in the model's folder."""
        layer, job = step.key.layer, step.run_key.job

        async def note(error: RecoveryError) -> None:
            if isinstance(error, NoAccessError):
                self.access.lacks(job, error)

        if not step.key.is_of_origin:
            return replace(layer_at(url, layer, step.expected, self._reads), doubt=note)
        spec = self._spec(job)
        return source_at(
            url,
            f"{url} ({layer})",
            self._reads,
            lambda offset, beat: read_part(spec, layer, offset=offset, beat=beat),
        )

    @property
    def _others(self) -> tuple[str, ...]:
        return tuple(sorted(self._view.nodes.keys() - {self._node}))

    def _nodes(
        self, step: Fetch, names: Iterable[str], *, unhurried: bool = False, is_forwarded: bool = False
    ) -> list[Source]:
        """Return nodes as sources, of which this node reaches some; else those that hand the file on to it."""
        names = [name for name in names if name in self._view.nodes]
        blocked = self._view.blocked
        reached = [name for name in names if not blocked.cannot_ask(self._node, name)]
        if names and not reached and (relays := blocked.relays(self._node, names, self._view.nodes)):
            reached, is_forwarded = list(relays), True
        return [
            holder(
                self._client,
                self._view.nodes[name].endpoint,
                step.key,
                step.expected,
                unhurried=unhurried,
                is_forwarded=is_forwarded,
            )
            for name in reached or names
        ]

    async def _bring(
        self, step: Fetch, sources: Callable[[], Iterable[Source]], *, tell: Callable[[int], None] = lambda _: None
    ) -> None:
        generation, uid = step.run_key.generation, _uid(self._job(step.key.job))
        await self._store.bring(step.key, sources, expected=step.expected, generation=generation, uid=uid, tell=tell)

    async def copy_to_checkpoint(self, step: Upload) -> None:
        """Copy one file to durable storage; an error is kept as its trouble. Raises RecoveryError, ConfigError.

        Two copies run at once per file system: that uses the network better and leaves the processor to training.

        """
        key = step.key
        spec = self._spec(key.job)
        uid = _uid(self._job(key.job))
        file = self._store.get(key)
        if file is None:
            raise RecoveryError(str(key), "is not held any more")
        try:
            folder = resolve_checkpoint_dir(spec.fault.checkpoint_dir, self._checkpoint_root)
            url = boundary_url(folder, key.job, uid=uid, timeline=key.timeline, boundary=key.boundary)
            await self._copy(file.path, url, key)
        except Exception as error:
            if isinstance(error, NoAccessError):
                self.access.lacks(key.job, error)
            self.troubles[key] = _by_folder(error, f"/{key.job}/{uid}/")
            raise
        self.troubles.pop(key, None)
        self.durable.add(key)

    async def _copy(self, path: Path, url: str, key: StateKey) -> None:
        with self._outgoing.checkpointing(lambda: self._is_stopping(key.job)) as before:

            def copy(beat: Beat) -> None:
                def step(num_bytes: int) -> None:
                    beat()
                    before(num_bytes)
                    beat()

                copy_to_checkpoint(path, url, key.layer, before=step, beat=beat)

            copying = self._copies.run(url, copy, on_late=lambda: self._wrote_late(key.job))
            await self._naming_what_hangs(copying)

    async def _naming_what_hangs(self, work: Awaitable[None]) -> None:
        """Wait for work between the store and another file system. Raises what it raises; of two that may hang, the
        error names the store if that does not answer.
        """
        try:
            await work
        except StorageAwayError as error:
            try:
                await self._store.check()
            except StorageAwayError as own:
                raise own from error
            raise

    async def delete(self, step: Delete) -> None:
        """Forget files at once, and wait until they are deleted."""
        self._store.delete(*step.keys)
        await self._store.removed()

    def abandon(self, keys: Iterable[StateKey]) -> None:
        """Drop the bytes fetched so far of files that are no longer wanted."""
        for key in keys:
            self._store.abandon(key)

    def forget_what_is_gone(self) -> None:
        """Forget everything about files that are not held."""
        held = self._store.contents.keys()
        self.durable &= held
        self.troubles = {key: why for key, why in self.troubles.items() if key in held}

    async def sweep(self) -> None:
        """Delete unknown files in the store's folder from time to time, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            try:
                await self._sweep_once()
            except RecoveryError as error:
                log.warning("sweep_failed", reason=str(error))

    async def _sweep_once(self) -> None:
        known, written, now = self._store.known_paths(), self._written(), time.time()

        def sweep(beat: Beat) -> int:
            num_bytes = self._store.sweep(known, older_than=now - LEFT_AFTER_S, spared=written, beat=beat)
            return num_bytes + self._store.sweep(known, older_than=now - STRAY_AFTER_S, beat=beat)

        num_bytes = await self._store.in_thread(sweep)
        if num_bytes:
            log.warning("stray_files_deleted", size_bytes=num_bytes)

    def _is_stopping(self, name: str) -> bool:
        """Return whether a stop waits for a job's checkpoint, or no worker of the job runs any more."""
        job = self._view.jobs.get(name)
        return job is None or job.plan is None or (job.stop is not None and job.stop.save is Save.CHECKPOINT)

    def _written(self) -> frozenset[Path]:
        """Return the folders of the timelines on which workers may write."""
        return frozenset(
            self._store.timeline_directory_of(job.name, plan.timeline)
            for job in self._view.jobs.values()
            for plan in (job.plan, job.next)
            if plan is not None
        )

    def _job(self, name: str) -> JobView:
        """Return a job. Raises RecoveryError when it was removed after the step became due."""
        job = self._view.jobs.get(name)
        if job is None or job.spec is None:
            raise RecoveryError(name, "was removed")
        return job

    def _spec(self, name: str) -> JobSpec:
        """Return a job's spec. Raises as `_job`."""
        spec = self._job(name).spec
        assert spec is not None, "a job that is known has its spec"
        return spec


def _asked_too(others: tuple[str, ...], key: StateKey) -> str:
    """Return who else could have sent a part of the folder with the initial weights."""
    if not others:
        return f"no other node is up that could send {key.layer}"
    return f"{', '.join(others)} cannot send {key.layer} either"


def _by_folder(error: Exception, run: str) -> str:
    """Return what people are told of a failed copy below the folder of a run: not its file, so that it stays the same
    from one attempt to the next.
    """
    folder, within, _ = error.item.partition(run) if isinstance(error, RecoveryError) else ("", "", "")
    return f"{folder}: {error.reason}" if within and isinstance(error, RecoveryError) else str(error)


def _uid(job: JobView) -> str:
    return job.submission.uid if job.submission is not None else ""


def _spread(holders: tuple[str, ...], reader: str) -> tuple[str, ...]:
    """Return the holders in an order that differs by reader, so that replicas do not all ask the same holder."""
    first = crc32(reader.encode()) % len(holders) if holders else 0
    return holders[first:] + holders[:first]


@dataclass(slots=True)
class OriginRead:
    """The read of one part. Threads write it, and the event loop reads it."""

    size_bytes: int
    moved_at: float
    clock: Clock
    num_bytes: int = 0
    has_ended: bool = False

    def reached(self, num_bytes: int) -> None:
        """Note how many bytes are there."""
        self.num_bytes, self.moved_at = num_bytes, self.clock()


class OriginReads:
    """The reads of all jobs."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._reads: dict[str, dict[StateKey, OriginRead]] = {}
        """By job, until the last one of the job has ended."""
        self._urls: dict[str, str] = {}

    @contextmanager
    def reading(self, job: str, key: StateKey, *, url: str, size_bytes: int) -> Iterator[OriginRead]:
        """Count a read while the body makes it."""
        read = OriginRead(size_bytes, self._clock(), self._clock)
        self._reads.setdefault(job, {})[key] = read
        self._urls[job] = url
        try:
            yield read
        finally:
            read.has_ended = True
            if all(each.has_ended for each in self._reads[job].values()):
                del self._reads[job], self._urls[job]

    def of(self, job: str) -> ReadingRecord | None:
        """Return how far the reads of a job are, together; None: there is none."""
        reads = self._reads.get(job, {}).values()
        if not reads:
            return None
        silent_s = self._clock() - max(read.moved_at for read in reads)
        return ReadingRecord(
            num_bytes=sum(read.num_bytes for read in reads),
            total_bytes=sum(read.size_bytes for read in reads),
            url=self._urls[job],
            silent_s=silent_s // SILENT_STEP_S * SILENT_STEP_S,
        )


class CheckpointAccess:
    """Which folders in stores this node can use. A folder in the tree of files is the same for all processes."""

    def __init__(self, *, node: str, view: ClusterView, checkpoint_root: Path | None) -> None:
        self._node = node
        self._view = view
        self._checkpoint_root = checkpoint_root
        self._threads = FileThreads("access to checkpoint folders", num_at_once=1, silence_s=LOOKING_S, most_hung=1)
        self._looked_at: dict[str, float] = {}
        """Time of each job's next check."""
        self.lacking: dict[str, str] = {}
        """Reason why a job's folder cannot be used here, by job."""
        self.on_change: Callable[[], None] = lambda: None

    def lacks(self, job: str, error: NoAccessError) -> None:
        """Record that a file could not be read or written because access is missing."""
        if job not in self.lacking:
            log.warning("no_access_to_checkpoints", job=job, reason=str(error))
            self.lacking[job] = str(error)
            self._looked_at[job] = time.monotonic() + AGAIN_S
            self.on_change()

    async def run(self) -> None:
        """Check the folder of each job whose plan names this node, until cancelled."""
        async with asyncio.TaskGroup() as looks:
            while True:
                for job in self._view.jobs.values():
                    if self._is_due(job):
                        looks.create_task(self._look(job), name=f"access to the checkpoints of {job.name}")
                self._forget_jobs_that_are_gone()
                await asyncio.sleep(LOOK_S)

    def _is_due(self, job: JobView) -> bool:
        plans = [plan for plan in (job.plan, job.next) if plan is not None]
        is_named = any(stage.node == self._node for plan in plans for stage in plan.workers)
        needs_access = job.spec is not None and is_store(job.spec.fault.checkpoint_dir)
        return is_named and needs_access and time.monotonic() >= self._looked_at.get(job.name, 0.0)

    async def _look(self, job: JobView) -> None:
        assert job.spec is not None, "asked by _is_due"
        name = job.name
        self._looked_at[name] = time.monotonic() + AGAIN_S
        try:
            url = resolve_checkpoint_dir(job.spec.fault.checkpoint_dir, self._checkpoint_root)
            await self._threads.run(url, lambda _: probe(url))
        except NoAccessError as error:
            self.lacks(name, error)
        except (RecoveryError, ConfigError) as error:
            # a step that needs the folder reports the error
            log.info("checkpoint_folder_not_reached", job=name, reason=str(error))
        else:
            self._looked_at[name] = float("inf")
            if self.lacking.pop(name, None) is not None:
                self.on_change()

    def _forget_jobs_that_are_gone(self) -> None:
        for name in self._looked_at.keys() - self._view.jobs.keys():
            del self._looked_at[name]
            self.lacking.pop(name, None)
