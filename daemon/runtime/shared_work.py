"""Shares work among callers, so that it is done once. It ends when no caller has waited for it for a while."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

KEPT_S: Final = 10.0
"""Time within which a replaced plan asks again, and finds the work under way."""


@dataclass(slots=True)
class _Work(Generic[T]):
    task: "asyncio.Task[T]"
    num_waiting: int = 0
    ending: asyncio.TimerHandle | None = None
    is_cancelled: bool = False

    def end(self) -> None:
        self.is_cancelled = True
        self.task.cancel()


class SharedWork(Generic[K, T]):
    """At most one task for each key."""

    def __init__(self, *, kept_s: float = KEPT_S) -> None:
        """kept_s: how long work goes on for which nobody waits."""
        self._kept_s = kept_s
        self._under_way: dict[K, _Work[T]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, key: K) -> bool:
        return key in self._under_way

    async def result(self, key: K, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the running work, or of the work that begins now. A caller may be cancelled alone."""
        while (work := self._under_way.get(key)) is not None and work.is_cancelled:
            await asyncio.wait({work.task})
        if work is None:
            work = self._under_way[key] = _Work(asyncio.create_task(begin(), name=f"shared work {key}"))
            work.task.add_done_callback(lambda done: done.cancelled() or done.exception())
            work.task.add_done_callback(lambda _: self._under_way.pop(key, None))
        work.num_waiting += 1
        if work.ending is not None:
            work.ending.cancel()
        try:
            return await asyncio.shield(work.task)
        finally:
            work.num_waiting -= 1
            if not work.num_waiting and not work.task.done():
                work.ending = asyncio.get_running_loop().call_later(self._kept_s, work.end)
