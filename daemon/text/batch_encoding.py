"""Encodes documents in batches, in order: the tokenizer's library then works on all cores, and takes bounded memory."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.destination import EncodedPiece
from headway.daemon.text.documents import TOO_DEEP, BadRecord, Conversation, Document, Pair
from headway.daemon.text.encoder import EncodedChat, Encoder, Spoken, Tokens
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.text_sources import Source
from headway.stages.data.shard_index import BEGINS_DOCUMENT, IS_TARGET

# Chooses the documents of the validation split: by their content and a seed, wherever they stand. Pure.
#
# Equal documents are on the same side, so no copy of a training document is validated on.


def is_held_out(beginning: bytes | Conversation | Pair, share: float, seed: int) -> bool:
    """Return whether a document is held out. beginning: its first piece, the conversation, or the pair.

    It is, if BLAKE2b's first 8 bytes, a little-endian number, are below share · 2^64. The key is the seed.
    """
    if not share:
        return False
    digest = blake2b(_content(beginning), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < int(share * 2**64)


def _content(beginning: bytes | Conversation | Pair) -> bytes:
    if isinstance(beginning, bytes):
        return beginning
    if isinstance(beginning, Pair):
        return _content(beginning.preferred) + _content(beginning.other)
    return json.dumps([beginning.messages, beginning.tools], sort_keys=True, default=str).encode()


BATCH_BYTES: Final = 1 << 20
"""Text of a batch: a tokenizer takes many times its text's memory. The last piece may go beyond it."""
BATCH_ITEMS: Final = 4096
SPECIAL_WORDS: Final = "special_words"
"""Noted: names of special tokens in what people wrote."""
THOUGHTS_LEFT_OUT: Final = "thoughts_left_out"
"""Noted: answers of which the template does not render what the assistant thinks."""
FORMS: Final = "conversations of "
"""Noted, before a name: conversations in another form than a list of roles and contents."""
CONVERSATION_BYTES: Final = 4096
"""What a conversation counts before it is rendered."""


@dataclass(frozen=True, slots=True)
class Read:
    """A part of a source is read, and everything in it has been passed on."""

    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place between two items of the sources; everything before it has been passed on."""

    source_index: int = 0
    num_items: int = 0
    """Items of that source before the place: pieces, bad records and the ends of records."""
    begins: bool = True
    """No token has come since the last document ended."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a document; no content: the end of a text."""

    content: bytes | Conversation | Pair | None
    is_first: bool
    is_held_out: bool
    source: str


@dataclass(frozen=True, slots=True)
class Noted:
    """What the summary says of the documents, counted by kind."""

    counts: Counter[str]


_Item = _Piece | BadRecord | Read
_Flags = npt.NDArray[np.uint8]
_Found = Sequence[tuple[Tokens, _Flags | None]] | BadRecord
"""Rows with their flags, which plain text does not need; or why there are none."""


def encoded_pieces(
    sources: Iterable[Source], encoder: Encoder, options: Preparation, start: Position
) -> Iterator[EncodedPiece | BadRecord | Read | Noted | Position]:
    """Yield the pieces of all documents in their order, records that have none, and how far the sources are read.

    After each batch comes a position. From it a later call goes on: it reads again what lies before in the same source,
    but encodes none of it, and neither opens nor checks an earlier source.

    Raises ConfigError for text that is not UTF-8, or that the tokenizer cannot encode.
    """
    begins = start.begins
    for batch, end in _batches(sources, encoder, options, start):
        noted: Counter[str] = Counter()
        found = _encoded(batch, encoder, noted)
        for item in batch:
            if not isinstance(item, _Piece):
                yield item
                continue
            result = next(found)
            if isinstance(result, BadRecord):
                yield result
                continue
            for tokens, flags in result:
                begins = begins or item.is_first
                yield _piece(tokens, flags, begins=begins, is_held_out=item.is_held_out)
                begins = begins and not len(tokens)
        yield Noted(noted)
        yield replace(end, begins=begins)


def _batches(
    sources: Iterable[Source], encoder: Encoder, options: Preparation, start: Position
) -> Iterator[tuple[list[_Item], Position]]:
    """Yield batches, each with the position after it."""
    batch: list[_Item] = []
    num_bytes = 0
    end = start
    for item, end in _items(sources, encoder, options, start):
        batch.append(item)
        content = item.content if isinstance(item, _Piece) else None
        num_bytes += len(content) if isinstance(content, bytes) else CONVERSATION_BYTES * (content is not None)
        if num_bytes >= BATCH_BYTES or len(batch) >= BATCH_ITEMS:
            yield batch, end
            batch, num_bytes = [], 0
    yield batch, end


def _items(
    sources: Iterable[Source], encoder: Encoder, options: Preparation, start: Position
) -> Iterator[tuple[_Item, Position]]:
    """Yield what comes after the start, each with the position after it; and how far is read also before the start."""
    for index, source in enumerate(sources):
        if index < start.source_index:
            yield Read(source.size), start
            continue
        known = start.num_items if index == start.source_index else 0
        for number, item in enumerate(_items_of(source, encoder, options), 1):
            if number > known:
                yield item, Position(source_index=index, num_items=number)
            elif isinstance(item, Read):
                yield item, start


def _items_of(source: Source, encoder: Encoder, options: Preparation) -> Iterator[_Item]:
    for document, size in source.documents():
        if isinstance(document, BadRecord):
            yield document
        else:
            yield from _pieces(document, source.name, options, has_end=encoder.end_of_text is not None)
        yield Read(size)


def _pieces(document: Document, source: str, options: Preparation, *, has_end: bool) -> Iterator[_Piece | BadRecord]:
    """Yield the pieces of a document. A text ends with a token of its own, if there is one."""
    is_first, is_apart, is_text = True, False, True
    for content in document:
        try:
            is_apart = is_held_out(content, options.validation, options.seed) if is_first else is_apart
        except RecursionError:
            yield BadRecord(TOO_DEEP, "" if isinstance(content, bytes) else content.where)
            return
        is_text = isinstance(content, bytes)
        yield _Piece(content, is_first, is_apart, source)
        is_first = False
    if is_text and has_end:
        yield _Piece(None, is_first, is_apart, source)


def _encoded(batch: Iterable[_Item], encoder: Encoder, noted: Counter[str]) -> Iterator[_Found]:
    """Return what becomes of each piece of a batch, in order."""
    pieces = [item for item in batch if isinstance(item, _Piece)]
    texts = [(piece.content, piece.source) for piece in pieces if isinstance(piece.content, bytes)]
    chats = [piece.content for piece in pieces if isinstance(piece.content, Conversation | Pair)]
    of_texts, of_chats = iter(_texts(texts, encoder, noted)), iter(_chats(chats, encoder, noted))
    begin = np.array(encoder.begin_of_text, dtype=np.int64)
    end = np.array([encoder.end_of_text or 0], dtype=np.int64)
    for piece in pieces:
        if isinstance(piece.content, Conversation | Pair):
            yield next(of_chats)
            continue
        tokens = end if piece.content is None else next(of_texts)
        # With --special-tokens, a text may begin with the name of this token itself.
        if piece.is_first and not np.array_equal(tokens[: len(begin)], begin):
            tokens = np.concatenate((begin, tokens))
        yield [(tokens, None)]


def _texts(texts: list[tuple[bytes, str]], encoder: Encoder, noted: Counter[str]) -> list[Tokens]:
    noted[SPECIAL_WORDS] += sum(encoder.words.count(text) for text, _ in texts)
    try:
        return encoder.encode([text for text, _ in texts])
    except UnicodeDecodeError as error:
        source = next(source for text, source in texts if text == error.object)
        raise ConfigError("is not UTF-8 text", source) from error


def _chats(contents: list[Conversation | Pair], encoder: Encoder, noted: Counter[str]) -> Iterator[_Found]:
    """Yield what becomes of each conversation, or pair of them."""
    if not contents:
        return
    assert encoder.chats is not None, "prepare() asks for a chat template"
    chats = [(each.preferred, each.other) if isinstance(each, Pair) else (each,) for each in contents]
    found = iter(encoder.chats.encode([chat for each in chats for chat in each]))
    for each in chats:
        encoded = [next(found) for _ in each]
        wrong = next((one for one in encoded if isinstance(one, ConfigError)), None)
        if wrong is not None:
            yield BadRecord(wrong.what, each[0].where)
            continue
        good = [one for one in encoded if isinstance(one, EncodedChat)]
        for one in good:
            noted[SPECIAL_WORDS] += one.num_words
            noted[one.texts.way] += 1
            noted[THOUGHTS_LEFT_OUT] += one.texts.num_thoughts_left_out
        if each[0].form:
            noted[FORMS + each[0].form] += 1
        if len(good) > 1:
            yield _of_pair(*(one.rows[-1] for one in good), where=each[0].where)
        else:
            yield [(tokens, is_spoken.astype(np.uint8) * IS_TARGET) for tokens, is_spoken in good[0].rows]


def _of_pair(preferred: tuple[Tokens, Spoken], other: tuple[Tokens, Spoken], *, where: str) -> _Found:
    """Return both documents, one after the other. What they begin with alike is no target: it would cancel out."""
    shorter = min(len(preferred[0]), len(other[0]))
    differs = np.flatnonzero(preferred[0][:shorter] != other[0][:shorter])
    num_alike = int(differs[0]) if len(differs) else shorter
    flags = [is_spoken.astype(np.uint8) * IS_TARGET for _, is_spoken in (preferred, other)]
    for each in flags:
        each[:num_alike] = 0
        if not each.any():
            return BadRecord("has two answers of which one is the beginning of the other", where)
    flags[1][0] |= BEGINS_DOCUMENT
    return [(np.concatenate((preferred[0], other[0])), np.concatenate(flags))]


def _piece(tokens: Tokens, flags: _Flags | None, *, begins: bool, is_held_out: bool) -> EncodedPiece:
    """Return a piece with its flags: all of a text is trained on, of a conversation what is an answer.

    A document begins with its first token, so an empty piece begins none.
    """
    if flags is None:
        flags = np.full(len(tokens), IS_TARGET, dtype=np.uint8)
    begins = begins and bool(len(tokens))
    if begins:
        flags[0] |= BEGINS_DOCUMENT
    return EncodedPiece(tokens=tokens, flags=flags, begins=begins, is_held_out=is_held_out)
