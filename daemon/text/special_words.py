"""Keeps the names of special tokens in what people wrote apart from those that a chat template writes. Pure.

A name in a message is broken by a guard, a code point that stands for no character. It passes through the template, and
then says which names in the text are only words.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

GUARD: Final = "\ufdd0"
NO_CHARACTER: Final = re.compile("[\ufdd0-\ufddf\ud800-\udfff\0]")
"""Zero, half a character, and code points for internal use, which guards, notes and stand-ins are made of."""


class SpecialWords:
    """The names of a tokenizer's special tokens."""

    def __init__(self, names: Iterable[str]) -> None:
        """Names of one character cannot be told apart, and are left out."""
        self.names = tuple(sorted((name for name in names if len(name) > 1), key=lambda name: (-len(name), name)))
        self._pattern = re.compile("|".join(map(re.escape, self.names)) or "(?!)")
        self._in_utf8 = re.compile(self._pattern.pattern.encode())

    def count(self, text: bytes) -> int:
        """Return how many names stand in a text, given in UTF-8."""
        return sum(1 for _ in self._in_utf8.finditer(text))

    def places(self, text: str, words: Collection[int] = (), *, start: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the spans of the names in a text from a place on, but for those that `words` gives the begins of."""
        return (match.span() for match in self._pattern.finditer(text, start) if match.start() not in words)

    def guarded(self, value: Any) -> Any:
        """Return messages, tools, or any part of them, with every name in their texts broken by a guard."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: match[0][0] + GUARD + match[0][1:], value)
        if isinstance(value, dict):
            return {self.guarded(key): self.guarded(each) for key, each in value.items()}
        return [self.guarded(each) for each in value] if isinstance(value, list) else value

    def without(self, names: Iterable[str]) -> "SpecialWords":
        """Return the same but for some names."""
        left_out = set(names)
        return SpecialWords(name for name in self.names if name not in left_out)


def unguarded(text: str) -> tuple[str, Sequence[int]]:
    """Return a text without its guards, and where in it the broken names begin."""
    parts = text.split(GUARD)
    begins, length = [], 0
    for part in parts[:-1]:
        length += len(part)
        begins.append(length - 1)
    return "".join(parts), begins
