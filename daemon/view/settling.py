"""Decides which nodes have been there long enough for a job to start on them. Pure.

Nodes often come in groups, so a job waits until no node has changed for a moment. A node that comes and goes for ever,
or an endless row of newcomers, must not keep it waiting: after a while it starts on the settled nodes.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

SETTLE_S: Final = 2.0
"""Seconds without change before a job starts on a node; and of all nodes, before a job starts or grows at once."""
LONGEST_UNREST_S: Final = 10.0
"""Maximum wait of a job for nodes that keep changing."""


@dataclass(slots=True)
class Unrest:
    """The last change of each node: it came, went, was replaced, or began to drain."""

    changed_at: dict[str, float] = field(default_factory=dict)
    """Node to its last change, for recent moments, the earliest first; other nodes have settled."""
    last_at: float = 0.0
    since: float = 0.0
    """Start of the unrest to which `last_at` belongs."""

    def changed(self, node: str, *, now: float) -> None:
        """Note that a node has changed; an empty name: something else about nodes has changed."""
        if now > self.last_at + SETTLE_S or not self.last_at:
            self.since = now
        self.last_at = now
        self.changed_at.pop(node, None)
        if node:
            self.changed_at[node] = now
        while self.changed_at and now >= self.changed_at[first := next(iter(self.changed_at))] + SETTLE_S:
            del self.changed_at[first]

    @property
    def settled_at(self) -> float:
        """Return from when a job may start or change: nothing has changed for a moment, or changes never end."""
        return min(self.last_at + SETTLE_S, self.since + LONGEST_UNREST_S)

    def steady_at(self, node: str) -> float:
        """Return when a node has settled, if it does not change again."""
        return self.changed_at.get(node, float("-inf")) + SETTLE_S

    def unsettled(self, nodes: Container[str], *, now: float) -> frozenset[str]:
        """Return nodes that have changed a moment ago."""
        if now >= self.last_at + SETTLE_S:
            return frozenset()
        return frozenset(name for name in self.changed_at if name in nodes and self.steady_at(name) > now)
