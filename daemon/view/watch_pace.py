"""Tells when a daemon lets changes in etcd gather for a moment, so that one reply tells them all. Pure.

A reply costs etcd and a daemon the same, however many changes it tells. While hundreds of daemons join or are lost,
each is told of every other: a reply for each change would keep etcd and all their machines busy with each other.
"""

from typing import Final

BURST: Final = 30.0
"""Replies that a daemon hears one by one, before it lets changes gather."""
PER_S: Final = 1.0
"""Replies per second that it hears one by one in the long run."""
PER_NODE_S: Final = 2e-3
"""Seconds per node of the cluster for which changes gather."""
LEAST_S: Final = 0.5
"""Least time for which they gather: a rest takes three messages itself."""
MOST_S: Final = 2.0
FEW_NODES: Final = 50
"""In a cluster of so many nodes changes never gather."""


class WatchPace:
    """Counts the replies to one watch. `now` is seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._left = BURST
        self._counted_at = 0.0

    def heard(self, *, now: float) -> None:
        """Count a reply."""
        self._left = max(min(self._left + PER_S * (now - self._counted_at), BURST) - 1.0, 0.0)
        self._counted_at = now

    def rest_s(self, num_nodes: int) -> float:
        """Return for how many seconds changes had better gather from now on; 0: not at all."""
        if num_nodes <= FEW_NODES or self._left >= 1.0:
            return 0.0
        return min(max(PER_NODE_S * num_nodes, LEAST_S), MOST_S)
