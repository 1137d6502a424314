"""Remembers what a pure function returned, for as long as it is asked about the same objects. Pure.

Records and views are replaced, never changed. So the same objects lead to the same answer, and to compare identities
costs nothing, however large the objects are.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, Final, Generic, ParamSpec, TypeVar

ArgumentsT = ParamSpec("ArgumentsT")
ValueT = TypeVar("ValueT")

_BY_VALUE: Final = (str, int, float, frozenset, type(None))
"""Small arguments, which are compared as values."""


class Same(Generic[ValueT]):
    """A value as a key: the same object is equal to itself, and to no other. It keeps the object alive."""

    __slots__ = ("value",)

    def __init__(self, value: ValueT) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


def remembered(
    *, size: int = 64, is_lasting: bool = False
) -> Callable[[Callable[ArgumentsT, ValueT]], Callable[ArgumentsT, ValueT]]:
    """Remember the last `size` answers of a pure function of positional arguments.

    is_lasting: an answer that equals the one before stays the same object, so that what follows from it stays too.
    """

    def remember(compute: Callable[ArgumentsT, ValueT]) -> Callable[ArgumentsT, ValueT]:
        last: list[ValueT] = []

        @lru_cache(size)
        def found(*keys: Any) -> ValueT:
            value = compute(*(key.value if isinstance(key, Same) else key for key in keys))  # type: ignore[call-arg]
            if is_lasting and last and last[0] == value:
                return last[0]
            last[:] = [value]
            return value

        @wraps(compute)
        def answer(*arguments: ArgumentsT.args, **named: ArgumentsT.kwargs) -> ValueT:
            assert not named, "what is remembered takes positional arguments alone"
            return found(*(each if isinstance(each, _BY_VALUE) else Same(each) for each in arguments))

        return answer

    return remember
