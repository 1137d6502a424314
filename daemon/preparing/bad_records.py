"""Counts records that cannot be used by kind, names the first, and ends the preparation when there are too many."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Final

from headway.daemon.data.documents import BadRecord
from headway.daemon.errors import ConfigError

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
