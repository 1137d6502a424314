"""Counts records that cannot be used, names the first of them, and ends the preparation when there are too many."""

from collections.abc import Callable
from typing import Final

from headway.daemon.data.documents import BadRecord
from headway.daemon.errors import ConfigError

MAX_NAMED: Final = 20
"""Warnings that name a record; further ones are counted."""


class BadRecords:
    """The records that are left out."""

    def __init__(self, limit: int, warn: Callable[[str], None]) -> None:
        self.count = 0
        """Of an earlier run too, if this one goes on with it."""
        self._limit = limit
        self._warn = warn

    def leave_out(self, bad: BadRecord) -> None:
        """Count a record, with a warning. Raises ConfigError when it is one too many."""
        self.count += 1
        if self.count > self._limit:
            too_many = f"; more than {self._limit} records are bad (--max-bad)" if self._limit else ""
            raise ConfigError(f"{bad.what}{too_many}", bad.where)
        if self.count <= MAX_NAMED:
            last = "; further ones are only counted" if self.count == MAX_NAMED else ""
            self._warn(f"{bad.where}: {bad.what}; it is left out{last}")
