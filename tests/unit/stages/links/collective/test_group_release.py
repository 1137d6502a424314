"""A group between two workers that ends: each direction between cards is aborted once, whoever sees the failure."""

import threading
from contextlib import suppress

from headway.stages.links.collective.group import GroupOfTwo

NUM_THREADS = 8


class Direction:
    """Counts its aborts."""

    def __init__(self) -> None:
        self.aborts: list[int] = []

    def abort(self) -> None:
        self.aborts.append(threading.get_ident())


class SlowToLook(dict[int, Direction]):
    """Directions that let every thread look before the first has begun an abort."""

    def __init__(self, directions: dict[int, Direction]) -> None:
        super().__init__(directions)
        self._together = threading.Barrier(NUM_THREADS)

    def values(self):  # type: ignore[no-untyped-def]
        with suppress(threading.BrokenBarrierError):
            self._together.wait(0.5)
        return super().values()


def test_threads_that_see_a_failure_at_once_abort_a_direction_once() -> None:
    """Two aborts of one communicator are undefined in NCCL."""
    group, directions = GroupOfTwo.__new__(GroupOfTwo), {0: Direction(), 1: Direction()}
    group._aborts, group._releasing, group._directions = [], threading.Lock(), SlowToLook(directions)  # type: ignore[assignment]
    threads = [threading.Thread(target=group.release) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    for abort in group.release():
        abort.join(30.0)
    assert [len(direction.aborts) for direction in directions.values()] == [1, 1]
