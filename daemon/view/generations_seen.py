"""The highest generations that any node has seen, of all jobs at once. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from headway.daemon.records.records import NodeRecord, seen_key

Seen = tuple[str, bool]
"""A key of `NodeRecord.generations`, and whether it is the name of a job of which the node counts no submission."""
NONE: Final = Counter[int]()


class GenerationsSeen:
    """What `NodeRecord.generation_seen` says, over all nodes. A change costs as much as one node has to say."""

    def __init__(self, nodes: Iterable[NodeRecord] = ()) -> None:
        self._told: defaultdict[Seen, Counter[int]] = defaultdict(Counter)
        """How many nodes say each generation."""
        for node in nodes:
            self.replace(None, node)

    def replace(self, before: NodeRecord | None, after: NodeRecord | None) -> bool:
        """Take over a node's new record; None: there is none. Return whether an answer may be another one now."""
        if before is not None and after is not None and before.generations == after.generations:
            return False
        gone, come = frozenset(_told(before)), frozenset(_told(after))
        answers = {key: self._highest(key) for key, _ in gone ^ come}
        for key, generation in come - gone:
            self._told[key][generation] += 1
        for key, generation in gone - come:
            self._told[key] -= Counter([generation])
            if not self._told[key]:
                del self._told[key]
        return any(self._highest(key) != answer for key, answer in answers.items())

    def clear(self) -> None:
        """Forget all nodes."""
        self._told.clear()

    def of_name(self, job: str) -> int:
        """Return the highest generation of all jobs of a name; 0: none."""
        return max(self._highest((job, False)), self._highest((job, True)))

    def of_submission(self, job: str, uid: str) -> int:
        """Return the highest generation of one submission; 0: none."""
        return max(self._highest((seen_key(job, uid), False)), self._highest((job, True)))

    def _highest(self, key: Seen) -> int:
        return max(self._told.get(key, NONE), default=0)


def _told(node: NodeRecord | None) -> Iterator[tuple[Seen, int]]:
    """Yield what one node says."""
    generations = node.generations if node is not None else {}
    submitted = {key.partition("/")[0] for key in generations if "/" in key}
    for key, generation in generations.items():
        yield (key, "/" not in key and key not in submitted), generation
