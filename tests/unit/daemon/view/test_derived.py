"""A derived value is that of the present records, whatever changed, and is computed once for the same ones."""

import random
from collections.abc import Set
from dataclasses import dataclass
from functools import partial

from headway.daemon.view.derived import Derived


@dataclass(frozen=True)
class Record:
    """A record of which equal ones exist."""

    number: int


def test_a_value_follows_every_change() -> None:
    """Records come, go, are replaced and change places: what is found is always what is computed anew."""
    random_ = random.Random(1)
    derived, records = Derived(), [Record(number) for number in range(5)]
    for _ in range(500):
        match random_.randrange(5):
            case 0:
                records.append(Record(random_.randrange(9)))
            case 1 if records:
                records.pop(random_.randrange(len(records)))
            case 2 if records:
                records[random_.randrange(len(records))] = Record(random_.randrange(9))
            case 3:
                random_.shuffle(records)
        assert derived.of("all", records, lambda: [record.number for record in records]) == [
            record.number for record in records
        ]
        assert derived.of("sum", records, lambda: sum(record.number for record in records)) == sum(
            record.number for record in records
        )


def test_the_value_of_each_record_follows_every_change() -> None:
    """Records come, go and are replaced, and so do entries on which some values rest: each value is that of its record
    now. Nothing is computed for records that are the same objects, and equal values stay the same object.
    """
    random_ = random.Random(2)
    derived, records, base = Derived(), dict[str, Record](), dict[int, int]()
    computed: list[str] = []

    def value(name: str, record: Record) -> list[int]:
        computed.append(name)
        return [record.number // 2 + base.get(record.number, 0)]

    def concerns(changed: Set[int], _: str, record: Record) -> bool:
        return record.number in changed

    for since in range(500):
        each = partial(derived.each, "each", records, value, concerns=concerns)
        name, before = random_.choice("abcdef"), each(since=since, common=base)
        computed.clear()
        changed = {name}
        match random_.randrange(4):
            case 0:
                records.pop(name, None)
                changed = set()
            case 1:
                number, base_before = random_.randrange(4), base
                base = {key: entry for key, entry in base.items() if key != number}
                if random_.randrange(3):
                    base[number] = random_.randrange(3)
                is_other = base.get(number) != base_before.get(number)
                changed = {key for key, record in records.items() if is_other and record.number == number}
            case _:
                records[name] = Record(random_.randrange(4))
        found = each(since=since + 1, common=base)
        assert found == {key: [record.number // 2 + base.get(record.number, 0)] for key, record in records.items()}
        assert [*found] == [*records], "in the order of the records"
        assert {*computed} == changed
        assert len(computed) == len(changed)
        assert found is before if found == before else found is not before
        assert all(found[name] is before[name] for name in found if before.get(name) == found[name])
        assert each(since=since + 1, common=base) is found


def test_a_value_is_computed_once_for_the_same_records() -> None:
    """Also when there are no records, and when the value is None."""
    derived = Derived()
    computed: list[int] = []
    for num_records in (0, 2):
        records = [Record(number) for number in range(num_records)]
        for _ in range(3):
            assert derived.of("name", records, partial(computed.append, num_records)) is None
    assert computed == [0, 2]


def test_a_value_that_also_follows_from_other_things_is_computed_again_when_it_does_not_hold() -> None:
    """The same records alone are not enough."""
    derived, limit = Derived(), [3]
    for limit[0], expected in ((3, 3), (4, 3), (2, 2), (9, 2)):
        found = derived.of("least", (), lambda: limit[0], holds=lambda least: least <= limit[0])
        assert found == expected
