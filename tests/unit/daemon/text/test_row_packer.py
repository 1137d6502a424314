"""Documents are packed whole into rows; what is longer is cut so that each token is predicted once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.daemon.text.destination import RowPacker
from headway.stages.data.shard_index import BEGINS_DOCUMENT, IS_TARGET

PAD = 0
ROW = 8
Documents = list[list[int]]


def packed(documents: Documents, *, max_open_rows: int = 256, piece: int = 100) -> tuple[list[list[int]], RowPacker]:
    """The rows, as tokens + 1000 · flags, of documents that arrive in pieces."""
    packer = RowPacker(ROW, padding=PAD, max_open_rows=max_open_rows)
    rows = []
    for document in documents:
        for start in range(0, len(document), piece):
            tokens = np.array(document[start : start + piece])
            rows += list(packer.add(tokens, np.full(len(tokens), IS_TARGET, np.uint8), begins=start == 0))
    rows += list(packer.finish())
    return [(tokens + 1000 * flags.astype(int)).tolist() for tokens, flags in rows], packer


def test_a_document_goes_where_it_leaves_the_least_room() -> None:
    """Of rows with 3 and 2 free tokens, two tokens go into the second; the rest is padding without flags."""
    rows, packer = packed([[11] * 5, [12] * 6, [13] * 2])
    assert rows == [
        [3012] + [1012] * 5 + [3013, 1013],
        [3011] + [1011] * 4 + [0, 0, 0],
    ]
    assert (packer.num_padding, packer.num_cut_documents) == (3, 0)


def test_a_longer_document_is_cut_and_its_parts_share_a_token() -> None:
    """18 tokens: parts of 8, 8 and 4, each beginning with the last of the part before, which is no target there."""
    rows, packer = packed([list(range(10, 28))])
    assert [[token % 1000 for token in row] for row in rows] == [
        list(range(10, 18)),
        list(range(17, 25)),
        [24, 25, 26, 27, 0, 0, 0, 0],
    ]
    assert [row[0] // 1000 for row in rows] == [3, BEGINS_DOCUMENT, BEGINS_DOCUMENT]
    assert packer.num_cut_documents == 1


def test_of_too_many_open_rows_the_fullest_is_closed() -> None:
    """Three documents that do not fit together, and room for two open rows."""
    rows, _ = packed([[11] * 5, [12] * 6, [13] * 5, [14] * 3], max_open_rows=2)
    assert [row[0] % 1000 for row in rows] == [12, 11, 13]
    assert 3014 in rows[1]


def test_what_trains_nothing_is_left_out() -> None:
    """One token has no target; a document whose flags name none has none either."""
    packer = RowPacker(ROW, padding=PAD)
    assert not list(packer.add(np.array([5]), np.array([IS_TARGET], np.uint8), begins=True))
    assert not list(packer.add(np.array([6, 7]), np.zeros(2, np.uint8), begins=True))
    assert not list(packer.finish())
    assert packer.num_left_out == 3


@given(st.lists(st.integers(2, 30), max_size=30), st.integers(1, 5), st.integers(1, 9))
def test_every_token_is_predicted_exactly_once(lengths: list[int], max_open_rows: int, piece: int) -> None:
    """Of any documents, in any pieces: rows are whole, and the targets are all tokens but each document's first."""
    documents = [[100 * number + at for at in range(length)] for number, length in enumerate(lengths, 1)]
    packer = RowPacker(ROW, padding=PAD, max_open_rows=max_open_rows)
    targets: list[int] = []
    for document in documents:
        for start in range(0, len(document), piece):
            tokens = np.array(document[start : start + piece])
            flags = np.full(len(tokens), IS_TARGET, np.uint8)
            targets += _targets(packer.add(tokens, flags, begins=start == 0))
    targets += _targets(packer.finish())
    assert sorted(targets) == [token for document in documents for token in document[1:]]


def _targets(rows: object) -> list[int]:
    """What is predicted, each from the token before it in the same document."""
    found = []
    for tokens, flags in rows:  # type: ignore[attr-defined]
        assert len(tokens) == len(flags) == ROW
        for before, token, flag in zip(tokens, tokens[1:], flags[1:], strict=False):
            if flag & IS_TARGET and not flag & BEGINS_DOCUMENT:
                assert token == before + 1
                found.append(int(token))
    return found
