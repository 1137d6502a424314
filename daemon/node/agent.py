"""Carries out what agent_orders.py says is due, again at every change of the cluster or of a worker.

Orders go out at once. Everything that waits (etcd, transfers, files) is a task of its own, one per step at a time; a
step that failed rests a little and is due again, and one that keeps failing is the failure of its worker's generation.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.coordination.cluster_view import ClusterView
from headway.daemon.data.library import DataLibrary
from headway.daemon.errors import ConfigError, ConflictError, LeaseLostError, RecoveryError, StoreError
from headway.daemon.etcd.client import EtcdClient
from headway.daemon.etcd.transaction import Compare, Delete, Put
from headway.daemon.jobs.job import JobSpec
from headway.daemon.node.agent_orders import NodeState, is_over, next_steps
from headway.daemon.node.agent_steps import (
    AnswerStop,
    CopyToCheckpoint,
    DeleteState,
    FetchState,
    GiveUp,
    OpenData,
    RegisterState,
    RegisterWorker,
    Step,
)
from headway.daemon.node.peer_client import NodeClient
from headway.daemon.node.progress_reports import ProgressReports
from headway.daemon.records import Keys, encode
from headway.daemon.storage.checkpoint import copy_to_checkpoint, resolve_checkpoint_dir
from headway.daemon.storage.checkpoint_names import boundary_url
from headway.daemon.storage.state_key import StateKey
from headway.daemon.storage.state_store import StateStore
from headway.daemon.storage.transfer import fetch_checkpointed, fetch_from_nodes
from headway.daemon.supervision.supervisor import Supervisor
from headway.daemon.supervision.worker_orders import OrderStep, order_message
from headway.proto import control_pb2
from headway.stages.errors import PeerError

log = structlog.get_logger()

MAX_ATTEMPTS: Final = 5
"""Failures in a row of a transfer before the worker's generation is given up."""
MAX_DATA_ATTEMPTS: Final = 2
"""The same for data: each attempt asks every node already."""
REST_S: Final = 0.2
"""After a first failure; doubles with each further one, up to REST_S * 2**MAX_ATTEMPTS."""
TRANSACTION_REST_S: Final = 0.02
"""After a comparison that did not hold: the view is about to catch up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What an agent works with."""

    node: str
    incarnation: str
    lease_id: Callable[[], int]
    """The node's lease now: it is another one after one was lost."""
    etcd: EtcdClient
    view: ClusterView
    store: StateStore
    library: DataLibrary
    client: NodeClient
    checkpoint_root: Path | None


class Agent:
    """One node's part in every plan, for the time of one incarnation."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._due = asyncio.Event()
        self._tasks: dict[Step, asyncio.Task[None]] = {}
        self._attempts: dict[Step, int] = {}
        self._resting: set[Step] = set()
        self._durable: set[StateKey] = set()
        self._data_paths: dict[str, str] = {}
        self._written: dict[str, int] = {}
        """Key to the revision of our own last write, which the view may not show yet."""
        self.progress = ProgressReports(around.view, around.etcd)

    # --- What wakes it ----------------------------------------------------------------------------------------------

    def cluster_changed(self) -> None:
        """The view is another."""
        self._due.set()

    def worker_changed(self) -> None:
        """Some worker's status is another."""
        self.progress.hurry()
        self._due.set()

    def worker_progressed(self, progress: control_pb2.Progress) -> None:
        """The last stage's worker finished batches."""
        self.progress.add(progress)

    def worker_wrote(self, wrote: control_pb2.Wrote) -> str:
        """A worker wrote layer files: they belong to the store now. Returns why not, if they cannot."""
        job = self._around.view.jobs.get(wrote.job)
        plans = [plan for plan in (job.plan, job.next) if plan is not None] if job is not None else []
        timeline = next((plan.timeline for plan in plans if plan.generation == wrote.generation), None)
        if timeline is None:
            log.warning("state_not_wanted", job=wrote.job, generation=wrote.generation, boundary=wrote.boundary)
            return ""
        for file in wrote.files:
            key = StateKey(wrote.job, timeline, wrote.boundary, file.layer)
            try:
                self._around.store.adopt(key, Path(file.path), size_bytes=file.size_bytes, sha256=file.sha256)
            except RecoveryError as error:
                return str(error)
        return ""

    def worker_refused_file(self, path: str) -> None:
        """A worker found a file damaged."""
        log.error("file_damaged", path=path)

    def worker_missed_snapshot(self, missed: control_pb2.SnapshotMissed) -> None:
        """A periodic snapshot was not written, or late."""
        log.warning("snapshot_missed", job=missed.job, boundary=missed.boundary, reason=missed.reason)

    # --- The loop ---------------------------------------------------------------------------------------------------

    async def run(self, supervisor: Supervisor) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.progress.run(), name="progress")
            while True:
                while self._take_steps(supervisor, group):
                    pass
                await self._due.wait()
                self._due.clear()

    def _take_steps(self, supervisor: Supervisor, group: asyncio.TaskGroup) -> bool:
        """Start everything that is due. Returns whether a worker's status changed by that, so that more may be due."""
        view = self._around.view
        supervisor.forget(lambda of: is_over(view, of))
        has_changed = False
        for step in next_steps(view, self._node_state(supervisor)):
            if isinstance(step, OrderStep):
                order = order_message(step, self._spec, self._around.store, supervisor.log_path)
                has_changed |= supervisor.order(step.device_index, order.kind, order.of, order.message)
            elif isinstance(step, GiveUp):
                supervisor.fail(step.device_index, step.of, step.reason)
                has_changed = True
            elif step not in self._tasks and step not in self._resting and not self._is_under_way(step):
                self._tasks[step] = group.create_task(self._carry_out(step, supervisor), name=type(step).__name__)
        return has_changed

    def _node_state(self, supervisor: Supervisor) -> NodeState:
        held = self._around.store.contents
        self._durable &= held.keys()
        return NodeState(
            name=self._around.node,
            incarnation=self._around.incarnation,
            workers=supervisor.statuses,
            held=held,
            durable=self._durable,
            data_paths=self._data_paths,
        )

    def _spec(self, job: str) -> JobSpec:
        """Raises RecoveryError when the job was removed since the step was due."""
        view = self._around.view.jobs.get(job)
        if view is None or view.spec is None:
            raise RecoveryError(job, "was removed")
        return view.spec

    # --- Steps that wait --------------------------------------------------------------------------------------------

    async def _carry_out(self, step: Step, supervisor: Supervisor) -> None:
        try:
            await self._do(step)
            self._attempts.pop(step, None)
        except (ConflictError, LeaseLostError):
            self._rest(step, TRANSACTION_REST_S)
        except (StoreError, PeerError, RecoveryError, ConfigError, OSError) as error:
            self._failed(step, error, supervisor)
        finally:
            self._tasks.pop(step, None)
            self._due.set()

    def _failed(self, step: Step, error: Exception, supervisor: Supervisor) -> None:
        attempts = self._attempts[step] = self._attempts.get(step, 0) + 1
        log.warning("step_failed", step=type(step).__name__, attempts=attempts, error=str(error))
        most = MAX_DATA_ATTEMPTS if isinstance(step, OpenData) else MAX_ATTEMPTS
        is_hopeless = attempts >= most or isinstance(error, ConfigError)
        if is_hopeless and isinstance(step, OpenData | CopyToCheckpoint | FetchState):
            self._attempts.pop(step)
            supervisor.fail(step.device_index, step.of, f"node {self._around.node}: {error}")
        else:
            self._rest(step, REST_S * 2 ** min(attempts, MAX_ATTEMPTS))

    def _rest(self, step: Step, seconds: float) -> None:
        def wake() -> None:
            self._resting.discard(step)
            self._due.set()

        self._resting.add(step)
        asyncio.get_running_loop().call_later(seconds, wake)

    async def _do(self, step: Step) -> None:
        around = self._around
        match step:
            case OpenData():
                data = self._spec(step.of.job).data
                self._data_paths[data.sha256] = str(await around.library.open(data))
            case FetchState():
                await self._fetch(step)
            case CopyToCheckpoint():
                file = around.store.get(step.key)
                if file is None:
                    raise RecoveryError(str(step.key), "is not held any more")
                await asyncio.to_thread(copy_to_checkpoint, file.path, self._boundary_url(step.key), step.key.layer)
                self._durable.add(step.key)
            case RegisterWorker() | RegisterState() | AnswerStop():
                await self._register(step)
            case DeleteState():
                key = _etcd_key(step, around.node)
                if around.view.revision_of(key) or key in self._written:
                    await around.etcd.transaction([], [Delete(key)])
                    self._written.pop(key, None)  # the same boundary may be written again
                around.store.delete(step.key)

    async def _fetch(self, step: FetchState) -> None:
        around = self._around
        if step.checkpoint_url:
            await fetch_checkpointed(
                around.store,
                step.key,
                url=resolve_checkpoint_dir(step.checkpoint_url, around.checkpoint_root),
                expected=step.expected,
            )
            return
        addresses = [around.view.nodes[name].address for name in step.holders if name in around.view.nodes]
        await fetch_from_nodes(around.store, around.client, step.key, addresses=addresses, expected=step.expected)

    async def _register(self, step: RegisterWorker | RegisterState | AnswerStop) -> None:
        """Write a record, provided that the plan it belongs to is still as we know it."""
        around, view = self._around, self._around.view
        key = _etcd_key(step, around.node)
        job = view.jobs.get(_job_of(step))
        if job is None or (isinstance(step, AnswerStop) and job.stop is None):
            raise ConflictError(key, "was removed")
        leaf, lease_id = "plan", around.lease_id()
        match step:
            case RegisterWorker():
                value = encode(step.record)
                leaf = "plan" if job.plan is not None and job.plan.generation == step.of.generation else "next"
            case RegisterState():
                value = encode(step.record)
            case AnswerStop():
                assert job.stop is not None, "checked above"
                value, lease_id = encode(replace(job.stop, boundary=step.boundary)), 0
        plan_key = Keys.of(job.name, leaf)
        conditions = [Compare.unchanged(plan_key, view.revision_of(plan_key))]
        if isinstance(step, AnswerStop):
            conditions.append(Compare.unchanged(key, view.revision_of(key)))
        self._written[key] = await around.etcd.transaction(conditions, [Put(key, value, lease_id)])
        log.info("record_written", key=key)

    def _is_under_way(self, step: Step) -> bool:
        """Whether our last write of the step's key has not come back by the watch yet."""
        if not isinstance(step, RegisterWorker | RegisterState | AnswerStop):
            return False
        key = _etcd_key(step, self._around.node)
        return self._around.view.revision_of(key) < self._written.get(key, 0)

    def _boundary_url(self, key: StateKey) -> str:
        folder = resolve_checkpoint_dir(self._spec(key.job).fault.checkpoint_dir, self._around.checkpoint_root)
        return boundary_url(folder, key.job, timeline=key.timeline, boundary=key.boundary)


def _job_of(step: RegisterWorker | RegisterState | AnswerStop) -> str:
    return step.key.job if isinstance(step, RegisterState) else step.of.job


def _etcd_key(step: RegisterWorker | RegisterState | AnswerStop | DeleteState, node: str) -> str:
    match step:
        case RegisterWorker():
            return Keys.worker(step.of.job, step.of.generation, step.stage_index)
        case AnswerStop():
            return Keys.of(step.of.job, "stop")
        case RegisterState() | DeleteState():
            key = step.key
            return Keys.state(key.job, key.timeline, key.boundary, key.layer, node)
