"""An etcd whose writers can die: one of them right before, or right after, a write that is named by its key."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.rigs.simulated_etcd import Store


class WriterDiedError(Exception):
    """The process that was writing is no more."""


@dataclass
class MortalStore(Store):
    """`deaths` write numbers are still to come: (number among the writes that `counts` is true of, is it written)."""

    counts: Callable[[str], bool] = lambda _: False
    """Returns whether a write of a key is counted."""
    num_counted: int = 0
    deaths: dict[int, bool] = field(default_factory=dict)
    """Number of a counted write to whether it reaches etcd before its writer dies."""

    def transact(
        self,
        compare: dict[str, int],
        puts: dict[str, bytes],
        deletes: tuple[str, ...] = (),
        *,
        lease: str = "",
    ) -> bool:
        """Raises WriterDiedError."""
        is_last = None
        if any(map(self.counts, puts)):
            self.num_counted += 1
            is_last = self.deaths.pop(self.num_counted, None)
        done = is_last is not False and super().transact(compare, puts, deletes, lease=lease)
        if is_last is not None:
            raise WriterDiedError
        return done
