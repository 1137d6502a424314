"""etcd refuses what is only noted beside a decision: the decision is in force, and the job is not held up."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.daemon.base.errors import ConflictError, LeaseLostError, StoreError, StoreUnreachableError
from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.transaction import Compare, Delete, Put
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.commands import Decision, Transaction
from headway.daemon.leader.leadership import CheckpointFolders, JobTroubles, Leadership

KEY, NOTE = Keys.of("j", "desired"), Keys.failure("a", 0)
REFUSALS = (
    StoreError("etcd", "has no space"),
    StoreUnreachableError("etcd", "is away"),
    ConflictError("leader", "changed"),
    LeaseLostError("leader", "is gone"),
)


class Etcd:
    """Takes the decision, and not the notes."""

    def __init__(self, refusal: StoreError, *, grants: bool) -> None:
        self.refusal, self.grants = refusal, grants
        self.written: list[str] = []

    async def grant_passing_lease(self, _ttl_s: int) -> int:
        if not self.grants:
            raise self.refusal
        return 1

    async def transaction(self, _conditions: Sequence[Compare], changes: Sequence[Put | Delete]) -> int:
        if any(change.key == NOTE for change in changes):
            raise self.refusal
        self.written += [change.key for change in changes]
        return 7


@pytest.mark.parametrize("grants", [True, False])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__)
async def test_a_refused_note_holds_no_job_up(refusal: StoreError, grants: bool) -> None:
    """Whatever keeps a note from etcd: the leader goes on as after a decision that is written."""
    told: list[tuple[str, str]] = []
    shown: list[int] = []

    async def caught_up(revision: int, *, timeout_s: float) -> None:
        shown.append(revision)

    def decide(view: ClusterView, *, now: float) -> Decision:
        return Decision()

    cluster = SimpleNamespace(version=1, view=ClusterView(), caught_up=caught_up)
    etcd = Etcd(refusal, grants=grants)
    leadership = Leadership(
        cast(Any, etcd),
        cast(Any, cluster),
        record=LeaderRecord(node="a", incarnation="1"),
        ttl_s=1,
        decide=decide,
        folders=CheckpointFolders(None),
        troubles=JobTroubles(tell=lambda job, reason: told.append((job, reason))),
    )
    command = Transaction(job="j", reason="test", compare={}, puts={KEY: b"{}"}, leased={NOTE: (b"{}", 60)})
    await leadership._execute(command)
    assert etcd.written == [KEY]
    assert shown == [7]
    assert not [reason for _, reason in told if reason]
