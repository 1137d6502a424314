"""Remembers values that follow from some records alone, until one of these changes. Pure.

A decision looks at every job, and all jobs see the same nodes and ways between them. At 1,000 nodes, what follows from
these would otherwise be computed again for each job, and again after every event.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from operator import is_
from typing import Any, Final, TypeVar

RecordT = TypeVar("RecordT")
ValueT = TypeVar("ValueT")
NOTHING: Final[Mapping[Any, object]] = {}


class Derived:
    """The last value of each name, with the records from which it was computed."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple[object, ...], Any]] = {}
        self._each: dict[str, tuple[dict[str, Any], Mapping[Any, object], dict[str, Any]]] = {}

    def of(
        self,
        name: str,
        records: Iterable[object],
        compute: Callable[[], ValueT],
        *,
        holds: Callable[[ValueT], bool] = lambda _: True,
    ) -> ValueT:
        """Return the value that follows from these records. They are never changed, only replaced.

        The number of changes of something stands for all its records: the view replaces it with any of them.
        holds: whether a value that also follows from other things would be the same now.
        """
        return self._found_of(name, records, compute, is_lasting=False, holds=holds)

    def lasting(self, name: str, records: Iterable[object], compute: Callable[[], ValueT]) -> ValueT:
        """As `of`, but an equal value stays the same object, so that what follows from it stays too."""
        return self._found_of(name, records, compute, is_lasting=True, holds=lambda _: True)

    def each(
        self,
        name: str,
        records: Mapping[str, RecordT],
        compute: Callable[[str, RecordT], ValueT],
        *,
        since: object,
        common: Mapping[Any, object] = NOTHING,
        concerns: Callable[[Set[Any], str, RecordT], bool] = lambda _changed, _key, _record: True,
    ) -> dict[str, ValueT]:
        """Return the value of each record by the record's key, computed only for records that are other objects.

        since: another object whenever one of the records is, as a number of changes. common: a mapping that values rest
        on beside. concerns: whether the value of a record rests on one of the changed entries of `common`. As in
        `lasting`, an equal value stays the same object, and so do equal dictionaries.
        """

        def renew() -> dict[str, ValueT]:
            seen, common_before, before = self._each.get(name, ({}, NOTHING, {}))
            renewed = {key for key, record in records.items() if seen.get(key) is not record}
            if common_before is not common:
                changed = {key for key, value in common.items() if common_before.get(key) != value}
                changed |= common_before.keys() - common.keys()
                renewed |= {key for key, record in records.items() if concerns(changed, key, record)}
            values = dict(before)
            for key in renewed:
                value = compute(key, records[key])
                if key not in before or before[key] != value:
                    values[key] = value
            now = {key: values[key] for key in records}
            self._each[name] = dict(records), common, now
            return now

        return self.lasting(name, (since, common), renew)

    def _found_of(
        self,
        name: str,
        records: Iterable[object],
        compute: Callable[[], ValueT],
        *,
        is_lasting: bool,
        holds: Callable[[ValueT], bool],
    ) -> ValueT:
        now = tuple(records)
        seen, value = self._found.get(name, ((), None))
        if name not in self._found or len(seen) != len(now) or not all(map(is_, seen, now)) or not holds(value):
            before, value = value, compute()
            if is_lasting and before == value:
                value = before
            self._found[name] = (now, value)
        found: ValueT = value
        return found
