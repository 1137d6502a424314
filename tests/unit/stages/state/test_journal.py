"""The journal in memory: rows come at its end, and old ones go when durable storage has them."""

import pytest

from headway.stages.ids import Batch, Boundary, Generation
from headway.stages.state.journal import Journal, JournalRow


def row(batch: int, *, width: int = 3) -> JournalRow:
    losses = tuple(float(batch + i) for i in range(width))
    return JournalRow(batch=Batch(batch), microbatch_losses=losses, tokens=8, seconds=0.5, generation=Generation(1))


def test_rows_below_a_batch_go_and_the_rest_stays() -> None:
    """1000 rows, those below 990 go: ten rows are left, in memory for little more, and the journal goes on."""
    journal = Journal(row(batch) for batch in range(1000))
    journal.drop_below(Batch(990))
    journal.append(row(1000))
    assert [found.batch for found in journal.rows] == list(range(990, 1001))
    assert journal.rows[0] == row(990)
    assert (journal.first_batch, journal.next_batch) == (990, 1001)
    assert sum(tensor.untyped_storage().nbytes() for tensor in journal.tensors().values()) < 64 * 100


def test_columns_that_are_being_written_keep_their_rows() -> None:
    """A snapshot's writer still reads the columns while rows go and others come."""
    journal = Journal(row(batch) for batch in range(100))
    tensors = journal.tensors(below=Boundary(80))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    journal.drop_below(Batch(60))
    for batch in range(100, 200):
        journal.append(row(batch))
    assert all(tensors[name].equal(tensor) for name, tensor in before.items())
    assert journal.tensors(below=Boundary(80))["batch"].tolist() == list(range(60, 80))


@pytest.mark.parametrize("below", [0, 5])
def test_rows_that_are_gone_already_or_none_at_all(below: int) -> None:
    """Nothing happens."""
    journal = Journal(row(batch) for batch in range(5, 8))
    journal.drop_below(Batch(below))
    assert [found.batch for found in journal.rows] == [5, 6, 7]
    Journal().drop_below(Batch(below))


def test_the_newest_row_stays() -> None:
    """It says which batch is next: the boundary of a stop may be a checkpoint's."""
    journal = Journal(row(batch) for batch in range(8))
    journal.drop_below(Batch(8))
    assert journal.next_batch == 8
    with pytest.raises(ValueError, match="batch 8, not 9"):
        journal.append(row(9))


def test_a_cut_after_rows_have_gone() -> None:
    """A boundary counts batches, not rows."""
    journal = Journal(row(batch) for batch in range(100))
    journal.drop_below(Batch(50))
    journal.truncate(Boundary(60))
    assert [found.batch for found in journal.rows] == list(range(50, 60))
    assert [found.batch for found in Journal.from_tensors(journal.tensors()).rows] == list(range(50, 60))
