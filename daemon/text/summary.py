"""What a preparation says of itself: records that it leaves out, and a summary when it is finished."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.terminal import counted
from headway.daemon.text.batch_encoding import FORMS, SPECIAL_WORDS, THOUGHTS_LEFT_OUT
from headway.daemon.text.chat_mask import Way
from headway.daemon.text.destination import SplitCounts
from headway.daemon.text.documents import BadRecord
from headway.stages.data.shard_index import ShardIndex

MAX_NAMED: Final = 10
"""Warnings that name a record; further ones are counted."""

_NUMBER: Final = re.compile(r"\d+")


class BadRecords:
    """The records that are left out."""

    def __init__(self, limit: int, warn: Callable[[str], None]) -> None:
        self.count = 0
        """Of an earlier run too, if this one goes on with it."""
        self.kinds: Counter[str] = Counter()
        """Reasons, without the numbers in them."""
        self._limit = limit
        self._warn = warn

    def leave_out(self, bad: BadRecord) -> None:
        """Count a record, with a warning. Raises ConfigError when it is one too many."""
        self.count += 1
        self.kinds[_NUMBER.sub("…", bad.what)] += 1
        if self.count > self._limit:
            too_many = f"; more than {self._limit} records are bad (--max-bad)" if self._limit else ""
            raise ConfigError(f"{bad.what}{too_many}", bad.where)
        if self.count <= MAX_NAMED:
            last = "; further ones are only counted" if self.count == MAX_NAMED else ""
            self._warn(f"{bad.where}: {bad.what}; it is left out{last}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A finished data folder."""

    index: ShardIndex
    train: SplitCounts
    begin_of_text: str = ""
    """What each text begins with; empty: nothing."""
    num_bad: int = 0
    """Records that were left out."""
    bad_kinds: Counter[str] = field(default_factory=Counter)
    """Why, without the numbers in it."""
    noted: Counter[str] = field(default_factory=Counter)
    """What else the summary counts, by kind."""
    validation: SplitCounts = field(default_factory=lambda: SplitCounts(documents=0, tokens=0))


_WAYS: Final = {
    Way.MARKED: "the chat template marks the answers",
    Way.WHOLE: "one text each, in which all answers are trained",
    Way.PER_ANSWER: "a text for each answer that the chat template would change in the whole one",
}


def lines_of(out: Path, prepared: Prepared) -> Iterator[str]:
    """Yield the summary for people."""
    index = prepared.index
    size = f"{index.num_tokens:,} tokens of a vocabulary of {index.vocab_size}"
    yield f"{out}: {size}, SHA-256 {index.sha256}"
    yield f"training: {_line(prepared.train, index.row_tokens, holds_pairs=index.holds_pairs)}"
    if prepared.begin_of_text:
        yield f"each document begins with {prepared.begin_of_text}, as its tokenizer says (--no-bos leaves it out)"
    for kind, count in sorted(prepared.noted.items()):
        if kind.startswith(FORMS):
            verb = "has" if count == 1 else "have"
            yield f"{counted(count, 'conversation')} {verb} the form {kind.removeprefix(FORMS)}"
    if prepared.num_bad:
        yield f"left out, because they could not be used: {counted(prepared.num_bad, 'record')}"
    if prepared.num_bad > MAX_NAMED:
        yield from (f"  {count:,}: {kind}" for kind, count in prepared.bad_kinds.most_common(MAX_NAMED))
    for way, said in _WAYS.items():
        if count := prepared.noted[way]:
            yield f"{counted(count, 'conversation')}: {said}"
    if lost := prepared.noted[THOUGHTS_LEFT_OUT]:
        yield f"the chat template leaves out what the assistant thinks in {counted(lost, 'answer')}"
    if words := prepared.noted[SPECIAL_WORDS]:
        yield f"names of special tokens in the text are only words: {words:,} (--special-tokens makes tokens)"
    if index.validation:
        yield f"validation: {_line(prepared.validation, index.row_tokens, holds_pairs=index.holds_pairs)}"


def table_of(prepared: Prepared) -> dict[str, Any]:
    """Return the summary for programs."""
    index = prepared.index
    return {
        "tokens": index.num_tokens,
        "vocab_size": index.vocab_size,
        "sha256": index.sha256,
        "row_tokens": index.row_tokens,
        "begin_of_text": prepared.begin_of_text,
        "bad_records": prepared.num_bad,
        "bad_kinds": dict(prepared.bad_kinds),
        **prepared.noted,
        "training": asdict(prepared.train),
        "validation": asdict(prepared.validation),
    }


def _line(counts: SplitCounts, row_tokens: int, *, holds_pairs: bool) -> str:
    parts = [counted(counts.documents, "document")]
    if row_tokens:
        padding = 100 * counts.padding / max(1, counts.tokens)
        parts.append(f"{counted(counts.tokens // row_tokens, 'row')} of {row_tokens:,} tokens, {padding:.1f} % padding")
    else:
        parts.append(f"{counts.tokens:,} tokens")
    if counts.cut_documents:
        parts.append(f"cut, because longer than a row: {counted(counts.cut_documents, 'document')}")
    if counts.left_out:
        why = "stood in pairs that are longer than a row" if holds_pairs else "had nothing to train on"
        parts.append(f"left out, because they {why}: {counted(counts.left_out, 'token')}")
    return "; ".join(parts)
