"""What a page that follows a long job keeps of its rows."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from headway.daemon.client import live_state
from headway.daemon.cluster.records import Phase
from headway.daemon.reports.metrics_file import HistoryRow
from headway.stages.errors import UnavailableError


def test_a_spike_stays_when_older_rows_are_thinned() -> None:
    """More rows than are kept, each with a held-out loss, and one spike early on → fewer rows, the spike among them."""
    rows = [
        HistoryRow(
            batch=b,
            loss=9.0 if b == 777 else 1.0,
            learning_rate=0.1,
            tokens=8,
            seconds=0.5,
            generation=1,
            eval_loss=1.0,
        )
        for b in range(2 * live_state.MOST_ROWS + 1)
    ]
    live_state._thin(rows)
    assert len(rows) < 1.5 * live_state.MOST_ROWS
    assert max(row.loss for row in rows) == 9.0
    assert [row.batch for row in rows] == sorted(row.batch for row in rows)


def test_rows_before_a_node_dies_in_the_middle_of_the_last_ones_are_kept() -> None:
    """The reader asks for them no more: a page would never show them."""

    class Reader:
        next_batch = 0

        async def new_rows(self, *_: object) -> AsyncIterator[HistoryRow]:
            for batch in range(2):
                yield _row(batch)

        async def rows(self, _: object) -> AsyncIterator[HistoryRow]:
            yield _row(2)
            self.next_batch = 3
            raise UnavailableError("the cluster", "died")

    over = SimpleNamespace(phase=Phase.FINISHED)
    job: Any = SimpleNamespace(spec="", checkpoint=SimpleNamespace(boundary=9), phase=over, progress=None)
    nothing: Any = None
    follower, reader = live_state.JobFollower(nothing, "a"), Reader()
    asyncio.run(follower._read(reader, nothing, job))  # type: ignore[arg-type]
    assert [row.batch for row in follower._rows] == [0, 1, 2]


def _row(batch: int) -> HistoryRow:
    return HistoryRow(batch=batch, loss=1.0, learning_rate=0.1, tokens=8, seconds=0.5, generation=1)
