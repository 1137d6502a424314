"""Remembers values that follow from some records alone, until one of these changes. Pure.

A decision looks at every job, and all jobs see the same nodes and ways between them. At 1,000 nodes, what follows from
these would otherwise be computed again for each job, and again after every event.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any, TypeVar

RecordT = TypeVar("RecordT")
ValueT = TypeVar("ValueT")


class Derived:
    """The last value of each name, with the records from which it was computed."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple[object, ...], Any]] = {}
        self._each: dict[str, tuple[object, dict[str, tuple[Any, Any]]]] = {}

    def of(self, name: str, records: Iterable[object], compute: Callable[[], ValueT]) -> ValueT:
        """Return the value that follows from these records. They are never changed, only replaced.

        The number of changes of something stands for all its records: the view replaces it with any of them.
        """
        return self._found_of(name, records, compute, is_lasting=False)

    def lasting(self, name: str, records: Iterable[object], compute: Callable[[], ValueT]) -> ValueT:
        """As `of`, but an equal value stays the same object, so that what follows from it stays too."""
        return self._found_of(name, records, compute, is_lasting=True)

    def each(
        self,
        name: str,
        records: Mapping[str, RecordT],
        compute: Callable[[str, RecordT], ValueT],
        *,
        since: object,
        common: object = None,
    ) -> dict[str, ValueT]:
        """Return the value of each record by the record's key, computed only for records that are other objects.

        since: another object whenever one of the records is, as a number of changes. common: what all values rest on
        beside. As in `lasting`, an equal value stays the same object, and so do equal dictionaries.
        """

        def renew() -> dict[str, ValueT]:
            common_before, before = self._each.get(name, (None, {}))
            now = {}
            for key, record in records.items():
                known = before.get(key)
                if known is None or known[0] is not record or common_before is not common:
                    value = compute(key, record)
                    known = record, known[1] if known is not None and known[1] == value else value
                now[key] = known
            self._each[name] = common, now
            return {key: value for key, (_, value) in now.items()}

        return self.lasting(name, (since, common), renew)

    def _found_of(
        self, name: str, records: Iterable[object], compute: Callable[[], ValueT], *, is_lasting: bool
    ) -> ValueT:
        now = tuple(records)
        seen, value = self._found.get(name, ((), None))
        if name not in self._found or len(seen) != len(now) or not all(map(is_, seen, now)):
            before, value = value, compute()
            if is_lasting and before == value:
                value = before
            self._found[name] = (now, value)
        found: ValueT = value
        return found
