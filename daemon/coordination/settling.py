"""Which nodes have been there for long enough to start a job on them. Pure.

Nodes often come in groups, so a job waits until no node has changed for a moment. A node that comes and goes for ever,
or an endless row of newcomers, must not keep it waiting: after a while it starts on the nodes that have settled.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

SETTLE_S: Final = 2.0
"""How long a node must be as it is before a job starts on it, and all nodes before a job starts or grows at once."""
LONGEST_UNREST_S: Final = 10.0
"""A job waits for so long for nodes that keep changing."""


@dataclass(slots=True)
class Unrest:
    """When each node last changed: it came, went, was replaced, or began to drain."""

    changed_at: dict[str, float] = field(default_factory=dict)
    """By node, of the last moments; others have settled."""
    last_at: float = 0.0
    since: float = 0.0
    """When the unrest began that `last_at` belongs to."""

    def changed(self, node: str, *, now: float) -> None:
        """Note that a node has changed; an empty name: something else about nodes has."""
        if now > self.last_at + SETTLE_S or not self.last_at:
            self.since = now
        self.last_at = now
        self.changed_at = {name: at for name, at in self.changed_at.items() if now < at + SETTLE_S}
        if node:
            self.changed_at[node] = now

    @property
    def settled_at(self) -> float:
        """From when on a job may start or change: nothing has changed for a moment, or something changes for ever."""
        return min(self.last_at + SETTLE_S, self.since + LONGEST_UNREST_S)

    def steady_at(self, node: str) -> float:
        """When a node has settled, if it stays as it is."""
        return self.changed_at.get(node, float("-inf")) + SETTLE_S

    def unsettled(self, nodes: Iterable[str], *, now: float) -> frozenset[str]:
        """Nodes that have changed a moment ago."""
        return frozenset(name for name in nodes if self.steady_at(name) > now)
