"""Writes a node's own records while their inputs are unchanged, and knows which writes the view shows."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from headway.daemon.agent.steps import Register, Step, record_key
from headway.daemon.errors import ConflictError
from headway.daemon.etcd import transaction
from headway.daemon.etcd.client import EtcdClient
from headway.daemon.etcd.transaction import Compare
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
        if not isinstance(step, Register):
            return []
        keys = (Keys.of(step.job, leaf) for leaf in step.rests_on)
        return [Compare.unchanged(key, self._around.view.revision_of(key)) for key in keys]

    async def write(self, step: Register, conditions: list[Compare]) -> None:
        """Write a record. Raises ConflictError when what it rests on has changed."""
        around, key = self._around, step.key
        change: transaction.Change = transaction.Delete(key)
        if step.job not in around.view.jobs:
            raise ConflictError(key, "was removed")
        if step.record is not None:
            lease_id = around.lease_id() if step.is_leased else 0
            change = transaction.Put(key, encode(step.record), lease_id)
        self._remember(key, await around.etcd.transaction(conditions, [change]))
        log.info("record_written", key=key)

    def is_under_way(self, step: Step) -> bool:
        """Return whether the watch has not yet shown our last write to the step's key."""
        key = record_key(step, self._around.node)
        return bool(key) and self._around.view.last_revision_of(key) < self._written.get(key, 0)

    def _remember(self, key: str, revision: int) -> None:
        """Remember a write, so that no step relies on a view that does not show it yet."""

        def forget() -> None:
            if self._written.get(key) == revision:
                self._written.pop(key)
                self._on_change()

        self._written[key] = revision
        asyncio.get_running_loop().call_later(WATCH_S, forget)
