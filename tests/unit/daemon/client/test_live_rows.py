"""What a page that follows a long job keeps of its rows."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from headway.daemon.client import live_state
from headway.daemon.cluster.records import Phase
from headway.daemon.reports.metrics_file import HistoryRow
from headway.stages.errors import UnavailableError


def test_a_spike_stays_when_rows_are_thinned() -> None:
    """More rows than are kept, each with a held-out loss, and one spike early on → fewer rows, the spike among them."""
    rows = [_row(batch) for batch in range(live_state.MOST_ROWS + 1)]
    live_state._thin(rows)
    assert len(rows) < 0.75 * live_state.MOST_ROWS
    assert max(row.loss for row in rows) == 9.0
    assert [row.batch for row in rows] == sorted(row.batch for row in rows)


def test_old_batches_are_as_dense_as_new_ones() -> None:
    """Ten times as many rows as are kept come one by one: each tenth of the job has its share, the spike too."""
    rows: list[HistoryRow] = []
    for batch in range(10 * live_state.MOST_ROWS):
        rows.append(_row(batch))
        live_state._thin(rows)
    tenths = [sum(each.batch // live_state.MOST_ROWS == tenth for each in rows) for tenth in range(10)]
    assert min(tenths) >= live_state.NUM_STRETCHES // 5
    assert max(row.loss for row in rows) == 9.0


def test_who_comes_later_gets_rows_that_changed_since_the_picture() -> None:
    """Batches 8 and 9 became final after the picture was drawn: a new page gets their held-out losses too."""
    nothing: Any = None
    follower = live_state.JobFollower(nothing, "a")
    follower._put([_row(batch) for batch in range(10)], until=9)
    follower._drawn_to = 9
    follower._put([_row(8), _row(9)], until=9)
    with follower.viewer() as viewer:
        told = follower.unsent_rows(viewer).decode()
    assert ['"batch":7' in told, '"batch":8' in told, '"batch":9' in told] == [False, True, True]


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
    """A row with a held-out loss, and a spike early on."""
    loss = 9.0 if batch == 777 else 1.0
    return HistoryRow(
        batch=batch, loss=loss, learning_rate=0.1, tokens=8, seconds=0.5, generation=1, eval_loss=1.0 + batch % 7
    )
