"""One row of a data folder as text: what is trained in it, which tokens are special, and how many targets it has."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.terminal import console
from headway.daemon.text.data_tokenizer import BYTES, read_config, special_names, special_tokens
from headway.daemon.text.documents import library
from headway.stages.data.shard_index import BEGINS_DOCUMENT, IS_TARGET
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import DataError

if TYPE_CHECKING:
    from rich.text import Text


WINDOW_TOKENS: Final = 512
"""Tokens of a row of a stream in which no documents are marked."""
MAX_COUNTED: Final = 3
"""Documents of a row, and answers of a document, whose counts are told to people; JSON has all."""
MAX_TOKENS: Final = 1 << 16
"""Most tokens that are shown of a document in a stream."""

Numbers = npt.NDArray[np.int64]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens that follow each other and are alike."""

    text: str
    num_tokens: int
    is_target: bool
    is_special: bool
    is_padding: bool


@dataclass(frozen=True, slots=True)
class DocumentCounts:
    """What one document of a row, or its part in it, holds."""

    num_tokens: int
    targets: list[int]
    """Of each answer, or run of targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """A row of a data folder."""

    kind: str
    """row, document or window."""
    number: int
    """From 1."""
    num_rows: int
    parts: list[Part]
    documents: list[DocumentCounts]

    @property
    def table(self) -> dict[str, Any]:
        """Return the row for programs."""
        return asdict(self)


def read_row(folder: Path, number: int, *, is_validation: bool = False) -> ShownRow:
    """Return a row of packed data, a document of a stream that marks them, or a window of one that does not.

    number: from 1. Raises ConfigError: no data folder, no such row, no tokenizer in it.
    """
    try:
        shards = TokenShards.open(folder, verify=False, is_validation=is_validation)
    except DataError as error:
        raise ConfigError(f"{error.reason}; make data with `headway data prepare`", error.path) from error
    kind, num_rows, start, end = _place(shards, number)
    if not 1 <= number <= num_rows:
        raise ConfigError(f"there is no {kind} {number}: it has {num_rows:,}", str(folder))
    tokens = _slice(shards.maps, start, end)
    flags = _slice(shards.flag_maps, start, end) if shards.index.has_flags else np.full_like(tokens, IS_TARGET)
    at_end = num_padding(tokens, flags) if shards.index.row_tokens else 0
    decode, special = _tokenizer(folder, shards.index.tokenizer)
    parts = list(_parts(tokens, flags, at_end, decode, special))
    documents = list(_documents(flags[: len(flags) - at_end]))
    return ShownRow(kind=kind, number=number, num_rows=num_rows, parts=parts, documents=documents)


def _place(shards: TokenShards, number: int) -> tuple[str, int, int, int]:
    """Return the kind of rows, how many there are, and where this one begins and ends."""
    length, total = shards.index.row_tokens, sum(len(each) for each in shards.maps)
    if length:
        return "row", total // length, (number - 1) * length, number * length
    if not shards.index.has_flags:
        start = (number - 1) * WINDOW_TOKENS
        return "window", -(-total // WINDOW_TOKENS), start, min(total, start + WINDOW_TOKENS)
    starts, offset = [np.zeros(0, dtype=np.int64)], 0
    for flags in shards.flag_maps:
        starts.append(np.flatnonzero(flags & BEGINS_DOCUMENT) + offset)
        offset += len(flags)
    begins = [*(int(each) for each in np.concatenate(starts)[max(0, number - 1) : number + 1]), total, total]
    return "document", sum(len(each) for each in starts), begins[0], min(begins[1], begins[0] + MAX_TOKENS)


def _slice(maps: Sequence[npt.NDArray[Any]], start: int, end: int) -> Numbers:
    pieces, offset = [np.zeros(0, dtype=np.int64)], 0
    for each in maps:
        pieces.append(each[max(0, start - offset) : max(0, end - offset)].astype(np.int64))
        offset += len(each)
    return np.concatenate(pieces)


def num_padding(tokens: Numbers, flags: Numbers) -> int:
    """Return how many equal tokens without flags a row ends with, but for one, which may be a document's own end."""
    filling = (tokens == tokens[-1]) & (flags == 0)
    return max(0, len(tokens) - 1 - int(np.flatnonzero(~filling)[-1]) - 1) if not filling.all() else len(tokens)


def _documents(flags: Numbers) -> Iterator[DocumentCounts]:
    starts = [0, *(int(at) for at in np.flatnonzero(flags & BEGINS_DOCUMENT) if at), len(flags)]
    for start, end in pairwise(starts):
        runs = [len(list(run)) for is_target, run in groupby((flags[start:end] & IS_TARGET) != 0) if is_target]
        if end > start:
            yield DocumentCounts(end - start, runs)


def _parts(tokens: Numbers, flags: Numbers, num_padding: int, decode: Decode, special: set[int]) -> Iterator[Part]:
    def kind(place: int) -> tuple[bool, bool, bool]:
        return bool(flags[place] & IS_TARGET), int(tokens[place]) in special, place >= len(tokens) - num_padding

    for (is_target, is_special, is_padding), places in groupby(range(len(tokens)), kind):
        found = list(places)
        ids = [int(tokens[place]) for place in found]
        before = [int(tokens[found[0] - 1])] if found[0] else []
        head, text = decode(before), decode([*before, *ids])  # alone, some decoders drop a space at the begin
        text = text[len(head) :] if text.startswith(head) else decode(ids)
        yield Part(text, len(ids), is_target, is_special, is_padding)


def _tokenizer(folder: Path, name: str) -> tuple[Decode, set[int]]:
    """Return what decodes tokens, and the special ones. Raises ConfigError."""
    if name == BYTES:
        return lambda ids: bytes(ids).decode(errors="replace"), {0}
    try:
        raw = json.loads((folder / name).read_text(encoding="utf-8"))
        special = special_names(raw, special_tokens(raw, read_config(folder)))
        loaded = library("tokenizers").Tokenizer.from_str(json.dumps(raw))
    except ConfigError:
        raise
    except Exception as error:  # the library raises nothing more exact
        raise ConfigError(f"its tokenizer cannot be read: {error}", str(folder / name)) from error
    return lambda ids: loaded.decode(list(ids), skip_special_tokens=False), set(special.values())


# Draws a row of data for people: targets in colour on a terminal and in HTML, in brackets elsewhere.

_TARGET: Final = "bold green"
_SPECIAL: Final = "underline"
_OTHER: Final = "dim"


def drawn(row: ShownRow, *, marks: str = "", max_characters: int = 0) -> "Text":
    """Return a row, with a line of counts before it.

    marks: around what is trained, where colours do not show it. max_characters: of the row's text; 0: all.
    """
    from rich.text import Text

    found = Text(f"{heading(row)}\n", end="")
    room = max_characters or sum(len(part.text) for part in row.parts)
    shown = [part for part in row.parts if not part.is_padding]
    was_target = False
    for part in shown:
        if room > 0:
            if part.is_target != was_target and marks:
                found.append(marks[0] if part.is_target else marks[1])
            was_target = part.is_target
            style = _TARGET if part.is_target else _OTHER
            found.append(part.text[:room], f"{style} {_SPECIAL}" if part.is_special else style)
        room -= len(part.text)
    if was_target and marks:
        found.append(marks[1])
    if room < 0:
        found.append(" …", _OTHER)
    if padding := sum(part.num_tokens for part in row.parts if part.is_padding):
        found.append(f" … {padding:,} tokens of padding", _OTHER)
    return found


def heading(row: ShownRow) -> str:
    """Return how many targets a row and its first documents have."""
    total = sum(part.num_tokens for part in row.parts)
    targets = sum(sum(each.targets) for each in row.documents)
    said = f"{row.kind} {row.number:,} of {row.num_rows:,}: {targets:,} of {total:,} tokens are trained"
    for number, each in enumerate(row.documents[:MAX_COUNTED], 1):
        if len(each.targets) > 1 or len(row.documents) > 1:
            name = f"document {number}" if len(row.documents) > 1 else "answers"
            counts = " + ".join(f"{count:,}" for count in each.targets[:MAX_COUNTED]) or "0"
            more = f" + {len(each.targets) - MAX_COUNTED:,} more" if len(each.targets) > MAX_COUNTED else ""
            said += f"; {name}: {counts}{more}" + (f" of {each.num_tokens:,}" if len(row.documents) > 1 else "")
    return said + (f"; and {len(row.documents) - MAX_COUNTED:,} more" if len(row.documents) > MAX_COUNTED else "")


def html(row: ShownRow) -> str:
    """Return a page with the row."""
    page = console(io.StringIO(), width=120)
    page.record = True
    page.print(drawn(row))
    return page.export_html()
