"""Changes that arrive in a row lead to one decision, and a row without end delays no decision for long."""

import asyncio
from types import SimpleNamespace
from typing import Any

from headway.daemon.coordination.commands import Decision
from headway.daemon.leader.leadership import GATHER_S, Leadership
from headway.daemon.records.cluster_records import LeaderRecord


class Clock:
    """Moves by a fixed step at each look."""

    def __init__(self, step_s: float) -> None:
        self.now, self._step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self._step_s
        return self.now


def leadership(cluster: Any, clock: Clock) -> Leadership:
    around: dict[str, Any] = {"decide": lambda *_, **__: Decision(), "write_manifest": lambda *_: None}
    return Leadership(
        None,  # type: ignore[arg-type]
        cluster,
        record=LeaderRecord(node="a", incarnation="a-1"),
        ttl_s=5,
        clock=clock,
        **around,
    )


class Row:
    """A cluster whose version rises with each of so many looks."""

    def __init__(self, num_changes: int) -> None:
        self._left, self._version = num_changes, 0

    @property
    def version(self) -> int:
        if self._left:
            self._left -= 1
            self._version += 1
        return self._version


async def test_a_row_of_changes_is_awaited_to_its_end() -> None:
    cluster = Row(20)
    await leadership(cluster, Clock(1e-6))._gather(GATHER_S)
    assert cluster.version == 20


async def test_a_row_without_end_delays_a_decision_by_the_limit() -> None:
    """The clock moves by a tenth of the limit at each look."""
    cluster, clock = Row(10**9), Clock(GATHER_S / 10)
    async with asyncio.timeout(10.0):
        await leadership(cluster, clock)._gather(GATHER_S)
    assert clock.now <= 1.3 * GATHER_S


async def test_a_single_change_is_decided_about_at_once() -> None:
    clock = Clock(1e-6)
    await leadership(SimpleNamespace(version=7), clock)._gather(GATHER_S)
    assert clock.now <= 4e-6, "one pause without a change ends the wait"
