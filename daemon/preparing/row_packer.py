"""Packs documents into rows of a fixed length: best fit, among a bounded number of rows that have room. Pure.

A document that fits into a row stays whole. A longer one is cut; each further part begins with the last token of the
part before it, so that every token but the document's first is predicted exactly once. Parts in which nothing is
trained on are left out. The rest of a row is padding, which is not trained on.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from headway.stages.data.shard_index import BEGINS_DOCUMENT, IS_TARGET

MAX_OPEN_ROWS: Final = 256
"""Rows that wait for a document that fits. With more of them padding shrinks little, and memory grows."""
_MIN_PART: Final = 2
"""The shortest part with something to predict."""

Numbers = npt.NDArray[Any]
Piece = tuple[Numbers, Numbers]
"""Tokens with their flags."""
NOTHING: Final = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint8))


class RowPacker:
    """Documents in, whole rows out. The rows are a function of the documents in their order."""

    def __init__(
        self, row_tokens: int, *, padding: int, max_open_rows: int = MAX_OPEN_ROWS, are_whole: bool = False
    ) -> None:
        """padding: the token that fills rows. are_whole: what is longer than a row is left out, not cut."""
        self.num_cut_documents = 0
        self.num_padding = 0
        self.num_left_out = 0
        """Tokens of parts in which nothing is trained on, and of documents that are too long to stay whole."""
        self._row_tokens = row_tokens
        self._padding = padding
        self._are_whole = are_whole
        self._max_open_rows = max_open_rows
        self._document: list[Piece] = []
        self._num_held = 0
        self._was_cut = False
        self._open: list[tuple[int, int]] = []  # (free tokens, number of the row), sorted
        self._rows: dict[int, list[Piece]] = {}
        self._next_row = 0

    def add(self, tokens: Numbers, flags: Numbers, *, begins: bool) -> Iterator[Piece]:
        """Take a piece of a document, and yield complete rows. A piece that begins a document ends the last."""
        if begins:
            yield from self._end_document()
        if self._are_whole and len(tokens) > self._row_tokens:
            self.num_left_out += len(tokens)
            return
        if len(tokens):
            self._document.append((tokens, flags))
            self._num_held += len(tokens)
        if self._num_held > self._row_tokens:
            yield from self._cut()

    def finish(self) -> Iterator[Piece]:
        """End the last document, and yield the open rows in the order in which they began."""
        yield from self._end_document()
        self._open.clear()
        for number in sorted(self._rows):
            yield self._close(number)

    def state(self) -> tuple[dict[str, Any], Piece]:
        """Return what `resume` takes: numbers for JSON, and all tokens that wait, the document's before the rows'."""
        numbers = sorted(self._rows)
        rows = [_joined(self._rows[number]) for number in numbers]
        fields = {
            "num_cut_documents": self.num_cut_documents,
            "num_padding": self.num_padding,
            "num_left_out": self.num_left_out,
            "num_held": self._num_held,
            "was_cut": self._was_cut,
            "open": self._open,
            "rows": [(number, len(tokens)) for number, (tokens, _) in zip(numbers, rows, strict=True)],
            "next_row": self._next_row,
        }
        return fields, _joined([NOTHING, *self._document, *rows])

    def resume(self, fields: dict[str, Any], waiting: Piece) -> None:
        """Go on after another packer's state."""
        self.num_cut_documents = fields["num_cut_documents"]
        self.num_padding = fields["num_padding"]
        self.num_left_out = fields["num_left_out"]
        self._num_held = fields["num_held"]
        self._was_cut = fields["was_cut"]
        self._open = [(free, number) for free, number in fields["open"]]
        self._next_row = fields["next_row"]
        tokens, flags = waiting
        end = self._num_held
        self._document = [(tokens[:end], flags[:end])] if end else []
        self._rows = {}
        for number, length in fields["rows"]:
            start, end = end, end + length
            self._rows[number] = [(tokens[start:end], flags[start:end])]

    def _end_document(self) -> Iterator[Piece]:
        if self._document:
            yield from self._place(*_joined(self._document))
        self._document, self._num_held, self._was_cut = [], 0, False

    def _cut(self) -> Iterator[Piece]:
        """Place whole rows of the document in progress, and hold the rest."""
        tokens, flags = _joined(self._document)
        start = 0
        while len(tokens) - start > self._row_tokens:
            end = start + self._row_tokens
            yield from self._place(tokens[start:end], flags[start:end])
            start = end - 1
            flags[start] = 0  # it was a target of the part that ends with it
        self.num_cut_documents += not self._was_cut
        self._document, self._num_held, self._was_cut = [(tokens[start:], flags[start:])], len(tokens) - start, True

    def _place(self, tokens: Numbers, flags: Numbers) -> Iterator[Piece]:
        """Put a part into the open row that it fills best, or into a new one."""
        if not (flags[1:] & IS_TARGET).any():
            self.num_left_out += len(tokens)
            return
        flags = flags.copy()
        flags[0] |= BEGINS_DOCUMENT
        place = bisect_left(self._open, (len(tokens), -1))
        if place < len(self._open):
            free, number = self._open.pop(place)
        else:
            free, number = self._row_tokens, self._next_row
            self._next_row += 1
            self._rows[number] = []
        self._rows[number].append((tokens, flags))
        if free - len(tokens) < _MIN_PART:
            yield self._close(number)
        else:
            insort(self._open, (free - len(tokens), number))
        if len(self._open) > self._max_open_rows:
            yield self._close(self._open.pop(0)[1])

    def _close(self, number: int) -> Piece:
        tokens, flags = _joined(self._rows.pop(number))
        num_padding = self._row_tokens - len(tokens)
        self.num_padding += num_padding
        return (
            np.concatenate((tokens, np.full(num_padding, self._padding, dtype=tokens.dtype))),
            np.concatenate((flags, np.zeros(num_padding, dtype=flags.dtype))),
        )


def _joined(pieces: list[Piece]) -> Piece:
    return np.concatenate([tokens for tokens, _ in pieces]), np.concatenate([flags for _, flags in pieces])
