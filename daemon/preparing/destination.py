"""Writes encoded documents to their split: as one stream, or packed into rows. Counts what a summary says."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy.typing as npt

from headway.daemon.preparing.row_packer import NOTHING, Piece, RowPacker
from headway.stages.data.shard_writer import ShardWriter, SplitState, SplitWriter

Numbers = npt.NDArray[Any]


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

    def state(self) -> tuple[dict[str, Any], list[Piece]]:
        """Make all that is written durable. Returns what `resume` takes: fields for JSON, and the tokens that wait."""
        states = [split.state() for split in self._splits]
        fields = {"num_taken": self._num_taken, "splits": [fields for fields, _ in states]}
        return fields, [waiting for _, waiting in states]

    def resume(self, fields: dict[str, Any], waiting: list[Piece]) -> None:
        """Go on after another destination's state in this folder. Raises DataError when a file is not as it was."""
        self._num_taken = fields["num_taken"]
        for split, of_split, held in zip(self._splits, fields["splits"], waiting, strict=True):
            split.resume(of_split, held)

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

    def state(self) -> tuple[dict[str, Any], Piece]:
        packed, waiting = self._packer.state() if self._packer else ({}, NOTHING)
        written = asdict(self._writer.state())
        return {"num_documents": self._num_documents, "written": written, "packed": packed}, waiting

    def resume(self, fields: dict[str, Any], waiting: Piece) -> None:
        self._num_documents = fields["num_documents"]
        self._writer.resume(msgspec.convert(fields["written"], SplitState))
        if self._packer:
            self._packer.resume(fields["packed"], waiting)

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
