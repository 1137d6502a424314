"""Writes encoded documents to their split: as one stream, or packed into rows. Counts what a summary says."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from headway.stages.data.shard_index import BEGINS_DOCUMENT, IS_TARGET
from headway.stages.data.shard_writer import ShardWriter, SplitState, SplitWriter

# Packs documents into rows of a fixed length: best fit, among a bounded number of rows that have room. Pure.
#
# A document that fits into a row stays whole. A longer one is cut; each further part begins with the last token of the
# part before it, so that every token but the document's first is predicted exactly once. Parts in which nothing is
# trained on are left out. The rest of a row is padding, which is not trained on.

MAX_OPEN_ROWS: Final = 256
"""Rows that wait for a document that fits. With more of them padding shrinks little, and memory grows."""
_MIN_PART: Final = 2
"""The shortest part with something to predict."""

Numbers = npt.NDArray[Any]
Piece = tuple[Numbers, Numbers]
"""Tokens with their flags."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPiece:
    """Some tokens of one document."""

    tokens: Numbers
    flags: Numbers
    begins: bool
    """A document begins with it."""
    is_held_out: bool
    """Its document belongs to the validation split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCounts:
    """What one split holds."""

    documents: int
    tokens: int
    """Including padding."""
    cut_documents: int = 0
    padding: int = 0
    left_out: int = 0
    """Tokens of documents, or of their parts, in which nothing is trained on."""


DestinationState = tuple[int, list[tuple[int, RowPacker | None, SplitState]]]
"""Tokens taken; of each split the documents, the rows that wait, and what is durable."""


class Destination:
    """Both splits of a data folder that is being written."""

    def __init__(self, writer: ShardWriter, *, padding: int, max_tokens: int = 0) -> None:
        """padding: the token that fills rows. max_tokens: of documents; 0: no limit."""
        self._splits = (_Split(writer, padding), _Split(writer.validation, padding))
        self._max_tokens = max_tokens
        self._num_taken = 0

    @property
    def num_taken(self) -> int:
        """Return the number of the documents' tokens so far."""
        return self._num_taken

    @property
    def is_full(self) -> bool:
        """Return whether no token is wanted any more."""
        return 0 < self._max_tokens <= self._num_taken

    def add(self, piece: EncodedPiece) -> None:
        """Write a piece, or its beginning if the rest is too much."""
        room = self._max_tokens - self._num_taken if self._max_tokens else len(piece.tokens)
        tokens, flags = piece.tokens[:room], piece.flags[:room]
        self._num_taken += len(tokens)
        self._splits[piece.is_held_out].add(tokens, flags, begins=piece.begins)

    def state(self) -> "DestinationState":
        """Make all that is written durable. Returns what `resume` takes, to be pickled before the next `add`."""
        return self._num_taken, [split.state() for split in self._splits]

    def resume(self, state: "DestinationState") -> None:
        """Go on after another destination's state in this folder. Raises DataError when a file is not as it was."""
        self._num_taken, of_splits = state
        for split, of_split in zip(self._splits, of_splits, strict=True):
            split.resume(*of_split)

    def finish(self) -> tuple[SplitCounts, SplitCounts]:
        """Write what is held back. Returns the counts of training and of validation."""
        train, validation = (split.finish() for split in self._splits)
        return train, validation


class _Split:
    def __init__(self, writer: SplitWriter, padding: int) -> None:
        form = writer.form
        self._writer = writer
        self._packer = (
            RowPacker(form.row_tokens, padding=padding, are_whole=form.holds_pairs) if form.row_tokens else None
        )
        self._num_documents = 0

    def add(self, tokens: Numbers, flags: Numbers, *, begins: bool) -> None:
        self._num_documents += begins
        if self._packer is None:
            self._writer.append(tokens, flags if self._writer.form.has_flags else None)
        else:
            self._write(self._packer.add(tokens, flags, begins=begins))

    def state(self) -> tuple[int, RowPacker | None, SplitState]:
        return self._num_documents, self._packer, self._writer.state()

    def resume(self, num_documents: int, packer: RowPacker | None, written: SplitState) -> None:
        self._num_documents, self._packer = num_documents, packer
        self._writer.resume(written)

    def finish(self) -> SplitCounts:
        packer = self._packer
        if packer is None:
            return SplitCounts(documents=self._num_documents, tokens=self._writer.num_tokens)
        self._write(packer.finish())
        return SplitCounts(
            documents=self._num_documents,
            tokens=self._writer.num_tokens,
            cut_documents=packer.num_cut_documents,
            padding=packer.num_padding,
            left_out=packer.num_left_out,
        )

    def _write(self, rows: Iterator[tuple[Numbers, Numbers]]) -> None:
        for tokens, flags in rows:
            self._writer.append(tokens, flags)
