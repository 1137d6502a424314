"""Stands for leader, and does the leader's work: runs the coordinator and writes its decisions.

Every daemon runs one. etcd accepts at most one leader at a time: every transaction of a leader compares the revision
of its own leader key. So a deposed leader that does not know it yet writes nothing.
"""

import asyncio
import random
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from headway.daemon.base.errors import (
    ConflictError,
    DamagedCopyError,
    LeaseLostError,
    NoAccessError,
    RecoveryError,
    StoreError,
    StoreUnreachableError,
    in_one_line,
)
from headway.daemon.base.fault_points import fault_point, is_armed
from headway.daemon.base.restart_policy import Health
from headway.daemon.blobs.checkpoint import (
    copy_part,
    delete_checkpoint,
    read_manifest,
    resolve_checkpoint_dir,
    set_aside,
    write_manifest,
)
from headway.daemon.blobs.file_threads import Beat, FileThreads
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.lease import Lease
from headway.daemon.cluster.records import CheckpointRecord, PhaseRecord
from headway.daemon.cluster.transaction import Compare, Delete, Put
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.decide.commands import (
    BrokenJob,
    Command,
    Decision,
    DeleteCheckpoints,
    SetAside,
    Transaction,
    WriteManifest,
    parts,
)
from headway.daemon.decide.plans import PlanCache
from headway.daemon.leader.plan_runner import AT_ONCE_S, PlanRunner
from headway.daemon.plan.planner_pool import PlannerPool

_log = structlog.get_logger()


NOT_DUE_S: Final = 60.0
"""Seconds after a pause without another attempt: then a decision is not due any more, and its failure is no trouble."""


class JobTroubles:
    """A leader's troubles with jobs, by job."""

    def __init__(
        self,
        *,
        tell: Callable[[str, str], None] = lambda _job, _reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """tell(job, reason) is called when a trouble begins, and with an empty reason when it ends."""
        self._tell = tell
        self._clock = clock
        self._broken: dict[str, str] = {}
        self._unwritten: dict[str, dict[str, Health]] = {}
        """Job to kind of decision to what becomes of it."""

    def not_decided(self, broken: Iterable[BrokenJob]) -> None:
        """Note the jobs that the last decision left out. Each new error is logged once with its traceback."""
        found = {job.job: job for job in broken}
        for name in self._broken.keys() - found.keys():
            del self._broken[name]
            self._say(name)
        for name, job in found.items():
            if self._broken.get(name) != job.reason:
                _log.error("job_not_decided", job=name, reason=job.reason, traceback=job.traceback)
                self._broken[name] = job.reason
                self._say(name)

    def not_carried_out(self, job: str, reason: str, *, kind: str = "") -> float:
        """Record that a decision about a job cannot be carried out. Return the seconds until the next attempt."""
        now, of_job = self._clock(), self._unwritten.setdefault(job, {})
        of_job[kind] = of_job.get(kind, Health()).failed(reason, began_at=now, now=now, chance=random.random())
        self._say(job)
        return of_job[kind].resumes_at - now

    def carried_out(self, job: str, *, kind: str = "") -> None:
        """Note that a decision about a job was written. Another kind still fails, unless nobody has tried it lately."""
        now, of_job = self._clock(), self._unwritten.get(job)
        if of_job is None:
            return
        left = {other: each for other, each in of_job.items() if other != kind and now < each.resumes_at + NOT_DUE_S}
        if left:
            self._unwritten[job] = left
        else:
            del self._unwritten[job]
        self._say(job)

    def keep_only(self, jobs: Collection[str]) -> None:
        """Forget jobs that are gone: nothing more is tried or reported about them."""
        for name in self._unwritten.keys() - jobs:
            del self._unwritten[name]
            self._say(name)

    def clear(self) -> None:
        """Forget everything, because another daemon leads."""
        names = self._broken.keys() | self._unwritten.keys()
        self._broken.clear()
        self._unwritten.clear()
        for name in names:
            self._tell(name, "")

    def _say(self, job: str) -> None:
        unwritten = max(self._unwritten.get(job, {}).values(), key=lambda each: each.num_in_a_row, default=None)
        reason = self._broken.get(job, "")
        if reason:
            reason = f"the coordinator cannot decide about this job: {reason}"
        elif unwritten is not None:
            number = unwritten.num_in_a_row
            times = "" if number == 1 else f" {number} times in a row"
            reason = f"a decision was not carried out{times}: {unwritten.reason}"
        self._tell(job, reason)


RETRY_PAUSE_S = 1.0
CATCH_UP_S = 5.0
STAND_BACK_S = 5.0
"""Time in which a leader without access to a checkpoint folder lets other daemons take the leader key first…"""
STOOD_BACK_S = 300.0
"""…and the minimum interval between two such retreats, because perhaps no node has access."""
MANIFEST_TIMEOUT_S = 60.0
LEAST_PERIOD_S = 0.02
"""Least time from one decision to the next, so that one is about all changes that arrive in a row…"""
PERIOD_PER_DECISION = 5.0
"""…and in decisions' own time, so that the view takes in changes for most of it when many nodes are lost at once…"""
MOST_PERIOD_S = 0.5
"""…but never longer than this."""
SLOW_DECISION_S = 0.05
"""A slower decision is logged, because a decision delays everything else in the daemon."""

TaskKey = tuple[str, bool]
"""(job, whether files are written or deleted first): a slow file system delays no other decision about the job."""


class CheckpointFolders:
    """The files that decisions write and delete in checkpoint folders, before their transaction.

    Each call may block, and runs in a thread. `wrote_late` is told the job when the write of a manifest ends after it
    was given up.
    """

    def __init__(
        self,
        root: Path | None,
        *,
        wrote_late: Callable[[str], None] = lambda _: None,
        silence_s: float = MANIFEST_TIMEOUT_S,
    ) -> None:
        """root: where relative folders lie. silence_s: after so long without progress a call is given up."""
        self._root = root
        self._wrote_late = wrote_late
        self._manifests = FileThreads("manifests", silence_s=silence_s)
        self._deletions = FileThreads("deletions", silence_s=silence_s)

    async def carry_out(self, command: WriteManifest | DeleteCheckpoints | SetAside) -> Transaction:
        """Write or delete the command's files, and return what to write to etcd then. Raises RecoveryError."""
        match command:
            case WriteManifest():
                late = partial(self._wrote_late, command.job)
                await self._manifests.run(command.url, lambda beat: self.write(command, beat), on_late=late)
                _log.info("manifest_written", job=command.job, url=command.url)
                return command.then
            case SetAside():
                older = await self._manifests.run(command.url, lambda beat: self._take_older(command, beat))
                told = {"job": command.job, "url": command.url, "reason": command.reason}
                _log.warning("checkpoint_set_aside", **told, older=older.url if older is not None else "")
                return command.then(older)
        for url in command.urls:
            await self._deletions.run(url, partial(self._delete, url))
            _log.info("checkpoint_deleted", job=command.job, url=url)
        return command.then

    def write(self, command: WriteManifest, beat: Beat) -> None:
        """Copy the parts that the manifest names, then write it."""
        for part in command.parts:
            source, target = self._resolved(part.source), self._resolved(part.target)
            copy_part(source, target, is_inherited=part.is_inherited, beat=beat)
        write_manifest(self._resolved(command.url), command.manifest, beat=beat)

    def _take_older(self, command: SetAside, beat: Beat) -> CheckpointRecord | None:
        """Set a damaged checkpoint aside, and return the newest older one whose manifest is sound; None: there is none.

        Raises RecoveryError while the folder cannot be read or written.
        """
        set_aside(self._resolved(command.url), command.reason)
        for url in command.older:
            try:
                return replace(read_manifest(self._resolved(url), beat=beat), url=url)
            except DamagedCopyError as error:
                _log.warning("older_checkpoint_passed_over", url=url, reason=str(error))
        return None

    def _delete(self, url: str, _: Beat) -> None:
        delete_checkpoint(self._resolved(url))

    def _resolved(self, url: str) -> str:
        return resolve_checkpoint_dir(url, self._root)


class Decide(Protocol):
    """The coordinator: a pure function of etcd's content and of the time by a monotonic clock."""

    def __call__(self, view: ClusterView, *, now: float) -> Decision: ...


class Leadership:
    """The candidacy of one daemon. `run` until cancelled; then it resigns."""

    def __init__(
        self,
        client: EtcdClient,
        cluster: ClusterWatch,
        *,
        record: LeaderRecord,
        ttl_s: int,
        decide: Decide,
        folders: CheckpointFolders,
        plans: PlanCache | None = None,
        troubles: JobTroubles | None = None,
    ) -> None:
        """plans: the source of `decide`'s plans; missing plans are computed here. troubles: receives what blocks
        decisions about single jobs.
        """
        self._client = client
        self._cluster = cluster
        self._record = record
        self._ttl_s = ttl_s
        self._decide = decide
        self._folders = folders
        self._plans = plans if plans is not None else PlanCache()
        self._troubles = troubles if troubles is not None else JobTroubles()
        self._leader_revision = 0
        self._period_s = LEAST_PERIOD_S
        """Time from the last decision to the next one, at least."""
        self._stood_back_at: float | None = None
        self._log = _log.bind(node=record.node)

    @property
    def is_leading(self) -> bool:
        """Return whether this daemon believes that it holds the leader key."""
        return self._leader_revision > 0

    async def run(self) -> None:
        """Stand for leader again and again; lead while elected. If cancelled, resign: the key is deleted at once."""
        while True:
            try:
                async with await self._client.grant_lease(self._ttl_s, is_strict=True) as lease:
                    await self._hold(lease)
            except StoreError as error:
                self._log.warning("candidacy_interrupted", reason=str(error))
            # The longer pause lets a node that may have access win the election.
            has_just_stood_back = (
                self._stood_back_at is not None and time.monotonic() - self._stood_back_at < STAND_BACK_S
            )
            await asyncio.sleep(STAND_BACK_S if has_just_stood_back else RETRY_PAUSE_S)

    async def _hold(self, lease: Lease) -> None:
        """Stand and lead under a lease. Raises LeaseLostError as soon as the lease is lost."""
        standing = asyncio.create_task(self._stand(lease), name="leadership")
        lost = asyncio.create_task(lease.lost.wait(), name="leader's lease")
        try:
            # Whichever ends first ends the lead: without the lease, another daemon may already be leading.
            await asyncio.wait({standing, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(standing, lost)
            if self.is_leading:
                self._leader_revision = 0
                self._log.info("leadership_ended", reason=lease.reason or "resigned")
        if not standing.cancelled():
            standing.result()
        lease.check()

    async def _stand(self, lease: Lease) -> None:
        while True:
            seen = self._cluster.version
            if self._cluster.revision > 0 and (condition := self._vacancy()) is not None:
                try:
                    put = Put(Keys.LEADER, encode(self._record), lease.id)
                    self._leader_revision = await self._client.transaction([condition], [put])
                    break
                except ConflictError:
                    self._log.debug("election_lost")
            await self._cluster.changed(seen)
        self._log.info("leadership_won", revision=self._leader_revision)
        await self._lead()

    def _vacancy(self) -> Compare | None:
        """Return the condition under which this daemon may take the leader key; None: a leader exists.

        An unreadable key names no leader: it is replaced, unless a newer release wrote it. So is that of a revoked
        node, which might keep it for ever.
        """
        view = self._cluster.view
        if view.leader is not None and view.is_revoked(view.leader.node) and not view.is_revoked(self._record.node):
            return Compare.unchanged(Keys.LEADER, view.revision_of(Keys.LEADER))
        garbage = view.unreadable.get(Keys.LEADER)
        if garbage is not None and not garbage.is_newer:
            return Compare.unchanged(Keys.LEADER, view.last_revision_of(Keys.LEADER))
        return Compare.absent(Keys.LEADER) if view.revision_of(Keys.LEADER) == 0 else None

    async def _lead(self) -> None:
        """Decide on every change and at every deadline, until this daemon no longer holds the leader key."""
        while not await self._cluster.probes_seen(timeout_s=CATCH_UP_S):
            self._log.warning("waiting_for_measured_ways", reason="etcd has not listed them")
        # An older view than our own election still shows the last leader's unfinished writes.
        await self._cluster.caught_up(self._leader_revision, timeout_s=CATCH_UP_S)
        busy: dict[TaskKey, asyncio.Task[None]] = {}
        self._plans.clear()
        planners = PlannerPool()
        runner = PlanRunner(self._plans, compute=planners.answer, clock=time.monotonic)
        try:
            while True:
                seen = self._cluster.version
                # Only a view that has seen our election can tell that the key changed after it.
                if self._cluster.revision >= self._leader_revision and self._is_deposed():
                    raise LeaseLostError(Keys.LEADER, "another process took or deleted it")
                for key in [key for key, task in busy.items() if task.done()]:
                    busy.pop(key).result()  # a lost lease ends the lead here
                runner.collect()
                began_at = time.monotonic()
                # Results come before the decision, so that a plan that has just finished is used in this round.
                decision = self._decided(runner)
                self._troubles.not_decided(decision.broken)
                self._troubles.keep_only({"", *self._cluster.view.jobs})
                for command in decision.commands:
                    # One transaction and one file command of a job may run side by side: see TaskKey.
                    key = (command.job, not isinstance(command, Transaction))
                    # A decision that is still being written is skipped: the next look decides again, if it must.
                    if key not in busy:
                        name = f"decision about {command.job}"
                        busy[key] = asyncio.create_task(self._execute(command), name=name)
                # A deadline may pass without any change in etcd, so the pause ends at the first of them.
                deadlines = [at for at in (decision.wake_at, runner.wake_at) if at is not None]
                wake_at = min(deadlines, default=None)
                await self._pause(seen, {*busy.values(), *runner.under_way}, wake_at=wake_at)
                await asyncio.sleep(began_at + self._period_s - time.monotonic())
        finally:
            planners.close()
            self._troubles.clear()
            await _end(*busy.values())

    def _decided(self, runner: PlanRunner) -> Decision:
        """Decide with the plans that exist or are computed within AT_ONCE_S; start the computation of others."""
        until = time.monotonic() + AT_ONCE_S
        while True:
            began = time.perf_counter()
            # The clock is read in each round: computing a plan takes time, and a deadline may have passed meanwhile.
            now, view = time.monotonic(), self._cluster.view
            decision = self._decide(view, now=now)
            self._plans.decided(decision.missing, jobs=view.jobs, now=now)
            seconds = time.perf_counter() - began
            self._period_s = min(max(LEAST_PERIOD_S, PERIOD_PER_DECISION * seconds), MOST_PERIOD_S)
            if seconds > SLOW_DECISION_S:
                self._log.warning("decision_slow", seconds=round(seconds, 3), num_jobs=len(view.jobs))
            if not runner.take_up(decision.missing, decision.stale, until=until):
                return decision

    def _is_deposed(self) -> bool:
        return self._cluster.view.revision_of(Keys.LEADER) != self._leader_revision

    async def _pause(self, seen: int, busy: set[asyncio.Future[Any]], *, wake_at: float | None) -> None:
        """Return at the first of these: the view changes, a command or a plan is done, the deadline passes."""
        timeout_s = None if wake_at is None else max(wake_at - time.monotonic(), 0.0)
        changed = asyncio.create_task(self._cluster.changed(seen))
        try:
            await asyncio.wait({changed, *busy}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(changed)

    async def _execute(self, command: Command) -> None:
        """Carry out one command. Return when the view shows it, so that the next decision about the job sees it."""
        seen, kind = self._cluster.version, type(command).__name__
        log = self._log.bind(job=command.job)
        try:
            if not isinstance(command, Transaction):
                command = await self._folders.carry_out(command)
            revision = await self._write(command)
            log.info("decision_written", reason=command.reason, revision=revision)
            self._troubles.carried_out(command.job, kind=kind)
            # Until the view shows our write, another decision would compare old revisions and be refused.
            await self._cluster.caught_up(revision, timeout_s=CATCH_UP_S)
        # A compared key changed after the decision; the change itself is about to arrive.
        except ConflictError as error:
            log.info("decision_overtaken", keys=error.target)
            await self._wait_for_change(seen)
        except (StoreUnreachableError, LeaseLostError) as error:
            log.error("decision_failed", reason=str(error))
            await asyncio.sleep(RETRY_PAUSE_S)
        except RecoveryError as error:  # the checkpoint folder is full, read-only or gone: the job says so
            log.error("decision_failed", reason=str(error))
            if isinstance(error, NoAccessError) and self._may_stand_back():
                self._stood_back_at = time.monotonic()
                raise LeaseLostError(
                    Keys.LEADER, f"leaving the lead to a node that may have access: {error}"
                ) from error
            await asyncio.sleep(self._troubles.not_carried_out(command.job, str(error), kind=kind))
        except Exception as error:  # etcd refuses this transaction, or we have a bug: either concerns this job alone
            is_refused = isinstance(error, StoreError)
            reason = f"etcd refuses the decision: {error}" if is_refused else in_one_line(error)
            log.error("decision_failed", reason=reason, **({} if is_refused else {"exc_info": error}))
            await asyncio.sleep(self._troubles.not_carried_out(command.job, reason, kind=kind))

    def _may_stand_back(self) -> bool:
        """Return whether to leave the lead to another node, because this node lacks credentials for the command."""
        is_alone = len(self._cluster.view.nodes) < 2
        return not is_alone and not self._stood_back_within(STOOD_BACK_S)

    def _stood_back_within(self, seconds: float) -> bool:
        return self._stood_back_at is not None and time.monotonic() - self._stood_back_at < seconds

    async def _write(self, decided: Transaction) -> int:
        """Write the transaction, if this daemon still leads. A deleted name that ends in a slash stands for all keys
        below it.
        """
        phases = self._phases(decided) if is_armed() else {}
        fault_point("leader.before_write", **phases)
        # The decision goes first and alone: leases for notes cost round trips that a recovery should not wait for.
        first, *notes = parts(decided)
        revision = await self._write_part(first, {})
        try:
            revision = await self._write_notes(notes) or revision
        except StoreError as error:  # the decision holds without its notes
            self._log.warning("notes_not_written", job=decided.job, reason=str(error))
        fault_point("leader.wrote", **phases)
        return revision

    async def _write_notes(self, notes: Iterable[Transaction]) -> int:
        """Write the notes; return the revision of the last one; 0: there are no notes."""
        revision, leases = 0, dict[int, int]()
        for note in notes:
            for ttl_s in sorted({ttl_s for _, ttl_s in note.leased.values()} - leases.keys()):
                leases[ttl_s] = await self._client.grant_passing_lease(ttl_s)
            revision = await self._write_part(note, leases)
        return revision

    async def _write_part(self, part: Transaction, leases: dict[int, int]) -> int:
        """Write one transaction. leases: seconds to lease; keys of one lifetime share a lease."""
        compare = [Compare.unchanged(key, revision) for key, revision in part.compare.items()]
        compare.append(Compare.unchanged(Keys.LEADER, self._leader_revision))
        puts = [Put(key, value) for key, value in part.puts.items()]
        puts += [Put(key, value, leases[ttl_s]) for key, (value, ttl_s) in part.leased.items()]
        deletes = [Delete(key, is_prefix=key.endswith("/")) for key in part.deletes]
        return await self._client.transaction(compare, [*puts, *deletes])

    def _phases(self, decided: Transaction) -> dict[str, str]:
        """Return the phases for fault points."""
        job = self._cluster.view.jobs.get(decided.job)
        written = decided.puts.get(Keys.of(decided.job, "phase"))
        return {
            "job": decided.job,
            "phase_before": job.phase.phase if job is not None else "",
            "phase": decode(written, PhaseRecord).phase if written is not None else "",
            "node": self._record.node,
        }

    async def _wait_for_change(self, seen: int) -> None:
        try:
            async with asyncio.timeout(RETRY_PAUSE_S):
                await self._cluster.changed(seen)
        except TimeoutError:
            self._log.debug("no_change_followed_conflict")


async def _end(*tasks: asyncio.Task[object]) -> None:
    """Cancel tasks and wait until they are over."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
