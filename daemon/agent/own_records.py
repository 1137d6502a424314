"""Writes a node's own records while their inputs are unchanged, and knows which writes the view shows."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.agent.steps import (
    AnswerStop,
    DeleteState,
    RegisterState,
    RegisterWorker,
    Step,
    UnregisterState,
    etcd_key,
    job_of_step,
)
from headway.daemon.errors import ConflictError
from headway.daemon.etcd.client import EtcdClient
from headway.daemon.etcd.transaction import Compare, Delete, Put
from headway.daemon.reach.reach_target import Reach
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.rpc.peer_client import NodeClient
from headway.daemon.rpc.rate_limit import OutgoingTransfers
from headway.daemon.runtime.activities import Activities
from headway.daemon.shards.library import DataLibrary
from headway.daemon.storage.state_store import StateStore
from headway.daemon.view.cluster_view import ClusterView

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The collaborators of one node's agent, during one incarnation."""

    node: str
    incarnation: str
    lease_id: Callable[[], int]
    """The node's present lease: after a lost lease the node takes another."""
    etcd: EtcdClient
    view: ClusterView
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


RecordStep = RegisterWorker | RegisterState | UnregisterState | AnswerStop
WATCH_S: Final = 5.0
"""If the watch does not show our own write within this time, the write was undone: its lease ended, or etcd was
replaced.
"""


class OwnRecords:
    """The records of one incarnation of a daemon."""

    def __init__(self, around: Surroundings, on_change: Callable[[], None]) -> None:
        """on_change: called when a write is forgotten, so that its step may be due again."""
        self._around = around
        self._on_change = on_change
        self._written: dict[str, int] = {}
        """Key to the revision of our own last write, which the view may not show yet."""
        self._epoch = around.view.epoch

    def look_at_epoch(self) -> None:
        """Forget earlier writes if etcd was restored from a backup: their revisions mean nothing then."""
        if self._around.view.epoch != self._epoch:
            self._epoch = self._around.view.epoch
            self._written.clear()

    def conditions(self, step: Step) -> list[Compare]:
        """Return conditions that no input of a record has changed since the decision."""
        if not isinstance(step, RecordStep):
            return []
        view = self._around.view
        job = view.jobs[job_of_step(step)]
        match step:
            case RegisterWorker():
                leaves = ["plan" if job.plan is not None and job.plan.generation == step.run_key.generation else "next"]
            case RegisterState():
                leaves = ["plan"] if job.plan is not None else ["plan", "phase"]
            case UnregisterState():
                leaves = ["plan", "next", "phase"]
            case AnswerStop():
                leaves = ["plan", "stop"]
        keys = (Keys.of(job.name, leaf) for leaf in leaves)
        return [Compare.unchanged(key, view.revision_of(key)) for key in keys]

    async def write(self, step: RecordStep, conditions: list[Compare]) -> None:
        """Write a record. Raises ConflictError when the job's plan is no longer the one for which it was decided."""
        around = self._around
        key = etcd_key(step, around.node)
        job = around.view.jobs.get(job_of_step(step))
        if job is None or (isinstance(step, AnswerStop) and job.stop is None):
            raise ConflictError(key, "was removed")
        change: Put | Delete
        match step:
            case RegisterWorker() | RegisterState():
                change = Put(key, encode(step.record), around.lease_id())
            case UnregisterState():
                change = Delete(key)
            case AnswerStop():
                assert job.stop is not None, "checked above"
                change = Put(key, encode(replace(job.stop, boundary=step.boundary)))
        self._remember(key, await around.etcd.transaction(conditions, [change]))
        log.info("record_written", key=key)

    def is_under_way(self, step: Step) -> bool:
        """Return whether the watch has not yet shown our last write to the step's key."""
        if not isinstance(step, RecordStep | DeleteState):
            return False
        key = etcd_key(step, self._around.node)
        return self._around.view.last_revision_of(key) < self._written.get(key, 0)

    def _remember(self, key: str, revision: int) -> None:
        """Remember a write, so that no step relies on a view that does not show it yet."""

        def forget() -> None:
            if self._written.get(key) == revision:
                self._written.pop(key)
                self._on_change()

        self._written[key] = revision
        asyncio.get_running_loop().call_later(WATCH_S, forget)
