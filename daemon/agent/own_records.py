"""Writes a node's own records, each only while its inputs are unchanged, and knows which writes the view shows."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import structlog

from headway.daemon.agent.step_claims import etcd_key, job_of_step
from headway.daemon.agent.steps import (
    AnswerStop,
    DeleteState,
    RegisterState,
    RegisterWorker,
    Step,
    UnregisterState,
)
from headway.daemon.agent.surroundings import Surroundings
from headway.daemon.errors import ConflictError
from headway.daemon.etcd.transaction import Compare, Delete, Put
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys

log = structlog.get_logger()

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
