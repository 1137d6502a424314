"""Carries out the steps that steps_due.py finds, at every change of the cluster or of a worker.

Goals go out at once. A step that waits (for etcd, transfers, files) becomes a task; each step has at most one task.
A failed step is due again after a pause. A step that keeps failing fails its worker's generation.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.agent.files import StateKeeper
from headway.daemon.agent.goals import HEARD_AFTER_S
from headway.daemon.agent.goodput import WorkerReports
from headway.daemon.agent.link_steps import ProvenLinks
from headway.daemon.agent.local_state import NodeState, is_over
from headway.daemon.agent.node_reports import ProgressReports, ReadingReports
from headway.daemon.agent.steps import (
    Delete,
    Fetch,
    GiveUp,
    OpenData,
    ProveLink,
    Register,
    SetGoal,
    Step,
    StepFailures,
    Upload,
    claims,
    is_still_wanted,
    name_of,
    record_key,
    wanted_fetches,
)
from headway.daemon.agent.steps_due import next_steps
from headway.daemon.base.activities import Activities, Run
from headway.daemon.base.errors import (
    ConfigError,
    ConflictError,
    DamagedCopyError,
    LeaseLostError,
    RecoveryError,
    StorageAwayError,
    StoreError,
    in_one_line,
)
from headway.daemon.base.fault_points import fault_point
from headway.daemon.blobs.library import DataLibrary
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster import transaction
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import TERMINAL_PHASES, checkpoint_ailment, data_ailment, seen_key
from headway.daemon.cluster.state_key import StateKey
from headway.daemon.cluster.transaction import Compare
from headway.daemon.decide.cluster_watch import Member
from headway.daemon.jobs.job import JobSpec
from headway.daemon.net.rate_limit import OutgoingTransfers
from headway.daemon.net.reach_target import Reach
from headway.daemon.worker.goal import JobGeneration, Progress, SnapshotMissed, Wrote
from headway.daemon.worker.supervisor import Supervisor
from headway.stages.errors import PeerError

log = structlog.get_logger()

WorkersStep = OpenData | Fetch
"""Steps without which a worker cannot do its part of a generation."""
EXPECTED: Final = (StoreError, PeerError, RecoveryError, ConfigError, OSError)
"""Errors that explain themselves; for any other the traceback is logged."""
MAX_ATTEMPTS: Final = 5
"""Number of failures after which the worker's generation is given up. An outage of storage does not count."""
REST_S: Final = 0.2
"""Pause after a first failure; it doubles with each further one, up to REST_S * 2**MAX_ATTEMPTS."""
TRANSACTION_REST_S: Final = 0.02
"""Pause after a failed comparison: the view is about to catch up."""
NUM_MISSED_REMEMBERED: Final = 8
"""Number of boundaries of a generation whose missing snapshots are remembered."""
WATCH_S: Final = 5.0
"""If the watch does not show our own write within this time, the write was undone: its lease ended, or etcd was
replaced.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The collaborators of one node's agent, during one incarnation."""

    member: Member
    store: StateStore
    library: DataLibrary
    client: NodeClient
    checkpoint_root: Path | None
    reach: Reach
    """Finds out whether ports of other nodes answer."""
    outgoing: OutgoingTransfers = field(default_factory=OutgoingTransfers)
    activities: Activities = field(default_factory=Activities)
    wrote_late: Callable[[str], None] = lambda _: None
    """Called with the job when a copy to its checkpoint folder ends after it was given up."""
    remembered: Callable[[], Mapping[str, int] | None] = lambda: None
    """Generations that this node has persisted, as in NodeState."""
    allow_plugins: tuple[str, ...] = ()
    """As in NodeConfig: what etcd says of this node does not count here."""


class OwnRecords:
    """The records of one incarnation of a daemon."""

    def __init__(self, around: Surroundings, on_change: Callable[[], None]) -> None:
        """on_change: called when a write is forgotten, so that its step may be due again."""
        self._around = around
        self._on_change = on_change
        self._written: dict[str, int] = {}
        """Key to the revision of our own last write, which the view may not show yet."""
        self._epoch = around.member.view.epoch

    def look_at_epoch(self) -> None:
        """Forget earlier writes if etcd was restored from a backup: their revisions mean nothing then."""
        if self._around.member.view.epoch != self._epoch:
            self._epoch = self._around.member.view.epoch
            self._written.clear()

    def conditions(self, step: Step) -> list[Compare]:
        """Return conditions that no input of a record has changed since the decision."""
        if not isinstance(step, Register):
            return []
        keys = (Keys.of(step.job, leaf) for leaf in step.rests_on)
        return [Compare.unchanged(key, self._around.member.view.revision_of(key)) for key in keys]

    async def write(self, step: Register, conditions: list[Compare]) -> None:
        """Write a record. Raises ConflictError when what it rests on has changed."""
        around, key = self._around, step.key
        change: transaction.Change = transaction.Delete(key)
        if step.job not in around.member.view.jobs:
            raise ConflictError(key, "was removed")
        if step.record is not None:
            lease_id = around.member.lease_id() if step.is_leased else 0
            change = transaction.Put(key, encode(step.record), lease_id)
        self._remember(key, await around.member.etcd.transaction(conditions, [change]))
        log.info("record_written", key=key)

    def is_under_way(self, step: Step) -> bool:
        """Return whether the watch has not yet shown our last write to the step's key."""
        key = record_key(step, self._around.member.node)
        return bool(key) and self._around.member.view.last_revision_of(key) < self._written.get(key, 0)

    def _remember(self, key: str, revision: int) -> None:
        """Remember a write, so that no step relies on a view that does not show it yet."""

        def forget() -> None:
            if self._written.get(key) == revision:
                self._written.pop(key)
                self._on_change()

        self._written[key] = revision
        asyncio.get_running_loop().call_later(WATCH_S, forget)


class Agent:
    """One node's part in every plan, for one incarnation of its daemon."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._due = asyncio.Event()
        self._tasks: dict[object, tuple[Step, asyncio.Task[None]]] = {}
        """Running steps, by `name_of`."""
        self._failures = StepFailures()
        self._resting: set[object] = set()
        self._broken: dict[str, str] = {}
        """Jobs whose records raised an error at the last look, with that error."""
        self._storage_troubles: set[str] = set()
        """Ailments of storage that could not be read at the last attempt."""
        self._refused_plugins: set[str] = set()
        """Ailments: code that could not be imported here, as long as a job has it."""
        self._data_paths: dict[str, str] = {}
        self._in_force: dict[str, int] = {}
        self._missed: dict[JobGeneration, tuple[int, ...]] = {}
        self._links = ProvenLinks(around.member.view, around.reach)
        self._records = OwnRecords(around, self._due.set)
        self._steady_since: float | None = None
        self._keeper = StateKeeper(
            node=around.member.node,
            view=around.member.view,
            store=around.store,
            client=around.client,
            checkpoint_root=around.checkpoint_root,
            outgoing=around.outgoing,
            wrote_late=around.wrote_late,
        )
        around.store.on_change = self._due.set
        self.progress = ProgressReports(around.member)
        self.reports = WorkerReports(around.member)
        self._readings = ReadingReports(around.library, around.member)
        self._keeper.access.on_change = self._access_changed
        self.reports.on_silence = self._links.is_silent

    # --- Triggers ---------------------------------------------------------------------------------------------------

    def cluster_changed(self) -> None:
        """Note that the view has changed."""
        self._due.set()

    def worker_changed(self) -> None:
        """Note that a worker's status has changed."""
        self.progress.hurry()
        self._due.set()

    def worker_progressed(self, progress: Progress) -> None:
        """Note a batch that the last stage's worker finished."""
        self.progress.add(progress)

    async def worker_wrote(self, wrote: Wrote) -> str:
        """Take layer files that a worker wrote into the store. Returns why they cannot be kept, or an empty text."""
        return await self._keeper.wrote(wrote)

    def worker_refused_file(self, path: str) -> None:
        """Drop a damaged file; another is fetched before the worker starts."""
        self._keeper.refused_file(Path(path))
        self._due.set()

    def worker_missed_snapshot(self, missed: SnapshotMissed) -> None:
        """Note a periodic snapshot that was not written, or late."""
        self.reports.book.missed_snapshot(missed)
        run_key = JobGeneration(missed.job, missed.generation)
        if missed.written:
            log.warning("snapshot_late", job=missed.job, boundary=missed.boundary, reason=missed.reason)
        else:
            log.warning("snapshot_missed", job=missed.job, boundary=missed.boundary, reason=missed.reason)
            self._missed[run_key] = (*self._missed.get(run_key, ()), missed.boundary)[-NUM_MISSED_REMEMBERED:]
        self._due.set()

    def _access_changed(self) -> None:
        self.reports.book.lacking = dict(self._keeper.access.lacking)
        self._due.set()

    # --- The loop ---------------------------------------------------------------------------------------------------

    def activities(self, supervisor: Supervisor) -> dict[str, Run]:
        """Return an agent's permanent activities, by name."""
        return {
            "agent": lambda: self._carry_out_steps(supervisor),
            "progress reports": self.progress.run,
            "worker reports": lambda: self.reports.run(lambda: supervisor.heartbeats),
            "state sweep": self._keeper.sweep,
            "access to checkpoint folders": self._keeper.access.run,
            "data ahead": self._readings.run_ahead,
        }

    async def run(self, supervisor: Supervisor) -> None:
        """Run all activities until cancelled."""
        await self._around.activities.run(self.activities(supervisor))

    async def _carry_out_steps(self, supervisor: Supervisor) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                while self._take_steps(supervisor, group):
                    pass
                await self._due.wait()
                self._due.clear()

    def _take_steps(self, supervisor: Supervisor, group: asyncio.TaskGroup) -> bool:
        """Start everything that is due. Return whether a worker has failed by it, so that more may be due."""
        view = self._around.member.view
        self._records.look_at_epoch()
        # After an outage some steps wait until every node has registered again: look again then.
        if view.steady_since is not None and view.steady_since != self._steady_since:
            wait_s = view.steady_since + HEARD_AFTER_S - time.monotonic()
            asyncio.get_running_loop().call_later(max(wait_s, 0.0) + REST_S, self._due.set)
        self._steady_since = view.steady_since
        # Failures are kept while a record names their generation; without this they would pile up.
        supervisor.forget(lambda run_key: is_over(view, run_key))
        has_changed = False
        broken: dict[str, Exception] = {}
        node = self._node_state(supervisor)
        steps = next_steps(view, node, broken=broken)
        # A step that is no longer due starts with a clean record when it is due again.
        self._failures.keep_only({*map(name_of, steps), *self._resting, *self._tasks} if self._failures else ())
        self._give_up_broken(broken, node, supervisor)
        # An unwanted fetch keeps its claim until it ends; then this loop runs again.
        wanted = wanted_fetches(steps)
        self._end_unwanted_fetches(steps, wanted)
        self._forget_storage_that_answers(steps)
        for step in steps:
            # A failed step stays due; its timer wakes this loop when the pause is over.
            if name_of(step) in self._resting:
                continue
            try:
                has_changed |= self._begin(step, wanted, supervisor, group)
            except Exception as error:  # an error of one step concerns one job
                self._failed(step, error, supervisor)
        return has_changed

    def _begin(
        self, step: Step, wanted: dict[StateKey, Fetch], supervisor: Supervisor, group: asyncio.TaskGroup
    ) -> bool:
        """Set a goal, or start a task. Return whether a worker has failed by it. Raises the step's errors."""
        # A goal only enters the worker's queue, so it needs no task: what becomes of it is a change of status.
        if isinstance(step, SetGoal):
            fault_point("agent.step", kind=type(step).__name__, node=self._around.member.node)
            before, prepare = supervisor.statuses[step.device_index].goal, step.goal.prepare
            supervisor.set_goal(step.device_index, step.goal)
            if prepare is not None and prepare != before.prepare and prepare.data_paths:
                for part in self._spec(step.goal.job).data_sets:
                    # the next preparation verifies the data again
                    self._data_paths.pop(part.sha256, None)
            return False
        if isinstance(step, GiveUp):
            supervisor.fail(step.device_index, step.run_key, step.reason)
            return True
        is_replaced = isinstance(step, Fetch) and not is_still_wanted(step, wanted)
        if self._may_begin(step) and not is_replaced:
            # The conditions are taken now, together with the decision: the view may change before the task runs.
            working = self._carry_out(step, supervisor, self._records.conditions(step))
            task = group.create_task(working, name=type(step).__name__)
            self._tasks[name_of(step)] = (step, task)
            task.add_done_callback(lambda _: self._ended(step))
        return False

    def _ended(self, step: Step) -> None:
        """Forget the task. This also runs if the task was cancelled before it began."""
        self._tasks.pop(name_of(step), None)
        self._due.set()

    def _give_up_broken(self, broken: Mapping[str, Exception], node: NodeState, supervisor: Supervisor) -> None:
        """Fail the workers of jobs whose records raise an error. Other jobs are not affected."""
        told, self._broken = self._broken, {name: in_one_line(error) for name, error in broken.items()}
        for name, reason in self._broken.items():
            if told.get(name) != reason:
                log.error("job_not_served", job=name, exc_info=broken[name])
            job = self._around.member.view.jobs.get(name)
            for plan in filter(None, (job.plan, job.next) if job is not None else ()):
                run_key = JobGeneration(name, plan.generation)
                for worker in filter(None, map(node.worker_of, plan.workers)):
                    if run_key in worker.failures:
                        continue
                    text = f"node {self._around.member.node} cannot serve this job: {reason}"
                    supervisor.fail(worker.device_index, run_key, text)

    def _may_begin(self, step: Step) -> bool:
        """Return whether no running step claims an object of this step, and the pause after its last failure
        is over.
        """
        claimed = claims(step, self._around.member.node)
        is_free = all(claimed.isdisjoint(claims(other, self._around.member.node)) for other, _ in self._tasks.values())
        return is_free and name_of(step) not in self._resting and not self._records.is_under_way(step)

    def _end_unwanted_fetches(self, steps: list[Step], wanted: dict[StateKey, Fetch]) -> None:
        """End fetches that are no longer due, whose file is being deleted, or whose holder is gone.

        A slow copy also ends when a worker now waits for its file. Bytes that were already fetched stay: the next step
        continues from them.

        """
        due = {step for step in steps if isinstance(step, OpenData)}
        fetching = set()
        for step, task in self._tasks.values():
            if isinstance(step, Fetch):
                fetching.add(step.key)
                if not is_still_wanted(step, wanted):
                    task.cancel()
            elif isinstance(step, OpenData) and step not in due and not task.cancelling():
                task.cancel()
        self._keeper.abandon(self._around.store.awaited - wanted.keys() - fetching)

    def _node_state(self, supervisor: Supervisor) -> NodeState:
        self._keeper.forget_what_is_gone()
        self._links.look_again(supervisor.statuses)
        self._missed = {
            run_key: places
            for run_key, places in self._missed.items()
            if not is_over(self._around.member.view, run_key)
        }
        self._look_at_jobs()
        self._tell_refused_plugins(supervisor)
        return NodeState(
            name=self._around.member.node,
            incarnation=self._around.member.incarnation,
            workers=supervisor.statuses,
            allow_plugins=self._around.allow_plugins,
            held=self._around.store.contents,
            durable=self._keeper.durable,
            troubles=self._keeper.troubles,
            no_access=self._keeper.access.lacking.keys(),
            data_paths=self._data_paths,
            data_state=self._data_state,
            state_dir=self._state_dir,
            log_path=lambda job: str(supervisor.log_path(job)),
            in_force=self._in_force,
            missed=self._missed,
            remembered=self._around.remembered(),
            proven=self._links.proven,
            now=time.monotonic(),
        )

    def _tell_refused_plugins(self, supervisor: Supervisor) -> None:
        """Say in the node's record which code cannot be imported here, so that plans of its jobs leave it out."""
        jobs = [job for job in self._around.member.view.jobs.values() if job.phase.phase not in TERMINAL_PHASES]
        known = {job.name: job.spec.plugins.ailment for job in jobs if job.spec is not None}
        for status in supervisor.statuses:
            for run_key, failure in status.failures.items():
                is_known = failure.refuses_plugins and not is_over(self._around.member.view, run_key)
                what = known.get(run_key.job, "") if is_known else ""
                if what and what not in self._refused_plugins:
                    self._refused_plugins.add(what)
                    self._around.activities.trouble(what, f"{failure.text}; when it is mended, restart this daemon")
        for what in self._refused_plugins - {*known.values()}:
            self._refused_plugins.discard(what)
            self._around.activities.trouble(what, "")

    def _data_state(self, folder: str) -> str:
        return self._around.library.state_of(folder)

    def _state_dir(self, job: str, timeline: int) -> str:
        return str(self._around.store.timeline_directory_of(job, timeline))

    def _look_at_jobs(self) -> None:
        """Record all jobs' plans in force, and the data that they may open."""
        jobs = self._around.member.view.jobs.values()
        kept = {seen_key(job.name, job.uid) for job in jobs} | (self._around.remembered() or {}).keys()
        self._in_force = {key: generation for key, generation in self._in_force.items() if key in kept}
        for job in jobs:
            if job.plan is not None:
                key = seen_key(job.name, job.uid)
                self._in_force[key] = max(job.plan.generation, self._in_force.get(key, 0))
        wanted = {part.sha256 for job in jobs if job.spec is not None for part in job.spec.data_sets}
        self._data_paths = {sha256: path for sha256, path in self._data_paths.items() if sha256 in wanted}

    def _spec(self, job: str) -> JobSpec:
        """Return a job's spec. Raises RecoveryError when the job was removed after the step became due."""
        view = self._around.member.view.jobs.get(job)
        if view is None or view.spec is None:
            raise RecoveryError(job, "was removed")
        return view.spec

    # --- Steps that wait --------------------------------------------------------------------------------------------

    async def _carry_out(self, step: Step, supervisor: Supervisor, conditions: list[Compare]) -> None:
        try:
            fault_point("agent.step", kind=type(step).__name__, node=self._around.member.node)
            await self._do(step, conditions)
            self._failures.succeeded(name_of(step))
        except (ConflictError, LeaseLostError):
            self._rest(step, TRANSACTION_REST_S)
        except Exception as error:
            self._failed(step, error, supervisor)

    def _failed(self, step: Step, error: Exception, supervisor: Supervisor) -> None:
        name = name_of(step)
        is_expected = isinstance(error, EXPECTED)
        reason = str(error) if is_expected else in_one_line(error)
        ailment = _storage_ailment(step)
        is_outage = bool(ailment) and isinstance(error, StorageAwayError)
        attempts, is_news = self._failures.failed(name, reason, is_outage=is_outage)
        if is_news:
            told = {} if is_expected else {"exc_info": error}
            log.warning("step_failed", step=type(step).__name__, attempts=attempts, error=reason, **told)
        if is_outage:
            self._storage_troubles.add(ailment)
            self._around.activities.trouble(ailment, str(error))
        is_hopeless = isinstance(error, ConfigError | DamagedCopyError) or self._failures.charged(name) >= MAX_ATTEMPTS
        if is_hopeless and isinstance(step, WorkersStep) and step.device_index is not None:
            self._failures.start_over(name)
            damaged = ""
            if isinstance(step, Fetch) and isinstance(error, DamagedCopyError) and not step.key.is_of_origin:
                damaged = step.checkpoint_url
            supervisor.fail(
                step.device_index, step.run_key, f"node {self._around.member.node}: {reason}", damaged=damaged
            )
        else:
            self._rest(step, REST_S * 2 ** min(attempts, MAX_ATTEMPTS))

    def _forget_storage_that_answers(self, steps: list[Step]) -> None:
        """Forget storage that answers again. While storage is away no worker runs to report it, so the node's record
        does.
        """
        for ailment in self._storage_troubles - {_storage_ailment(step) for step in steps}:
            self._around.activities.trouble(ailment, "")
            self._storage_troubles.discard(ailment)

    def _rest(self, step: Step, seconds: float) -> None:
        def wake() -> None:
            self._resting.discard(name_of(step))
            self._due.set()

        self._resting.add(name_of(step))
        asyncio.get_running_loop().call_later(seconds, wake)

    async def _do(self, step: Step, conditions: list[Compare]) -> None:
        around, keeper = self._around, self._keeper
        match step:
            case OpenData():
                spec = self._spec(step.run_key.job)
                for part in spec.data_sets:
                    if part.sha256 not in self._data_paths:  # sources that were opened before another one failed
                        async with self._readings.telling(step.run_key.job, self._readings.of_data(part.sha256)):
                            folder = await around.library.open(part)
                            around.library.read_again_soon(folder)
                            self._data_paths[part.sha256] = str(folder)
            case ProveLink():
                await self._links.prove(step)
            case Fetch() if step.key.is_of_origin:
                async with self._readings.telling(step.run_key.job, lambda: keeper.reads.of(step.run_key.job)):
                    await keeper.fetch(step)
            case Fetch():
                await keeper.fetch(step)
            case Upload():
                await keeper.copy_to_checkpoint(step)
            case Register():
                await self._records.write(step, conditions)
            case Delete():
                await keeper.delete(step)


def _storage_ailment(step: Step) -> str:
    """Return the ailment to report for a start's step that waits for storage; empty: it is another step."""
    if isinstance(step, OpenData):
        return data_ailment(step.run_key.job)
    return checkpoint_ailment(step.run_key.job) if isinstance(step, Fetch) and step.checkpoint_url else ""
