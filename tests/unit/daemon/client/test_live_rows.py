"""What a page that follows a long job keeps of its rows."""

from headway.daemon.client import live_state
from headway.daemon.reports.metrics_file import HistoryRow


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
