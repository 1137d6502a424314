"""The journal in memory: rows come at its end, and old ones go when durable storage has them."""

import math
from dataclasses import replace

import pytest
import torch

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


def test_evaluations_are_a_column_only_where_there_are_some() -> None:
    """A journal without them has the columns of an older one, and those are read; others keep them to the bit."""
    plain = Journal(row(batch) for batch in range(3))
    assert not {"held_out_loss", "final_eval_loss"} & plain.tensors().keys()
    assert Journal.from_tensors(plain.tensors()).rows == plain.rows
    evaluated = Journal(replace(row(batch), eval_loss=0.1 * batch if batch % 2 else None) for batch in range(70))
    assert Journal.from_tensors(evaluated.tensors()).rows == evaluated.rows
    assert [found.eval_loss for found in evaluated.rows[:4]] == [None, 0.1, None, 0.1 * 3]
    assert "held_out_loss" not in evaluated.tensors(below=Boundary(1))
    evaluated.drop_below(Batch(61))
    assert [found.eval_loss for found in evaluated.rows[:2]] == [0.1 * 61, None]


def test_the_last_row_is_completed() -> None:
    """The loss of the last weights comes after the row: kept in files and by trimming, and chosen by any stride."""
    journal = Journal(row(batch) for batch in range(10))
    assert journal.last is not None
    journal.complete(replace(journal.last, final_eval_loss=0.3))
    journal = Journal.from_tensors(journal.tensors())
    journal.drop_below(Batch(5))
    assert [found.final_eval_loss for found in journal.rows] == [None] * 4 + [0.3]
    (columns,) = journal.chosen(0, every=100, num_rows=8)
    assert (columns["batch"].tolist(), columns["final_eval_loss"].tolist()) == ([9], [0.3])
    assert Journal().last is None


@pytest.mark.parametrize("loss", [math.nan, math.inf, 0.0, -1.0])
def test_any_loss_on_held_out_text_is_kept(loss: float) -> None:
    """Also that of weights that have diverged, or a plug-in's own of -1: it is no missing evaluation."""
    kept = Journal.from_tensors(Journal([replace(row(0), eval_loss=loss), row(1)]).tensors()).rows
    assert [found.eval_loss for found in kept] == pytest.approx([loss, None], nan_ok=True)


def test_an_evaluation_column_of_another_length_is_refused() -> None:
    tensors = Journal([replace(row(0), eval_loss=1.0)]).tensors()
    tensors["held_out_loss"] = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="eval_loss does not fit the others"):
        Journal.from_tensors(tensors)


def test_a_file_with_minus_one_for_no_evaluation_is_read() -> None:
    """As files had it when no loss could be below 0."""
    tensors = Journal([row(0), replace(row(1), eval_loss=1.5)]).tensors()
    del tensors["held_out_loss"]
    tensors["eval_loss"] = torch.tensor([-1.0, 1.5], dtype=torch.float64)
    assert [found.eval_loss for found in Journal.from_tensors(tensors).rows] == [None, 1.5]
