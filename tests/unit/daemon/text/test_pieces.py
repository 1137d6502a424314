"""Texts are cut into pieces of bounded length that together are the text; ordinary lines are never cut."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.daemon.text import file_content
from headway.daemon.text.file_content import pieces_from, pieces_of


@given(st.text(st.sampled_from("aé€😀 \n")), st.integers(8, 20))
def test_pieces_are_the_text_and_bounded(text: str, size: int) -> None:
    """Of any text: nothing is lost, none is longer than allowed, no character is cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_content, "PIECE_BYTES", size)
        patch.setattr(file_content, "MAX_PIECE_BYTES", 2 * size)
        raw = text.encode()
        for found in (list(pieces_of(raw)), list(pieces_from(io.BytesIO(raw)))):
            assert b"".join(found) == raw
            assert all(len(piece) <= 2 * size for piece in found)
            for piece in found:
                piece.decode()


def test_lines_of_ordinary_length_stay_whole() -> None:
    """3 MB of short lines: pieces end where a line ends that goes beyond a mebibyte, as readlines has it."""
    raw = "".join(f"line {number}\n" for number in range(250_000)).encode()
    stream = io.BytesIO(raw)
    expected = []
    while lines := stream.readlines(1 << 20):
        expected.append(b"".join(lines))
    assert list(pieces_from(io.BytesIO(raw))) == expected


def test_forty_megabytes_on_one_line_are_cut_at_spaces() -> None:
    """No piece is longer than 2 MiB, and each but the first begins with the space that it was cut at."""
    raw = b"word " * (8 << 20)
    for found in (list(pieces_of(raw)), list(pieces_from(io.BytesIO(raw)))):
        assert b"".join(found) == raw
        assert max(map(len, found)) <= 2 << 20
        assert all(piece.startswith(b" ") for piece in found[1:])
