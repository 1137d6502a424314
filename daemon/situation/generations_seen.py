"""The highest generations that any node has seen, of all jobs at once. Pure."""

from collections import defaultdict
from collections.abc import Iterable

from headway.daemon.records.records import NodeRecord, seen_key


class GenerationsSeen:
    """What `NodeRecord.generation_seen` says, over all nodes. Each record is read once, not once for each job."""

    def __init__(self, nodes: Iterable[NodeRecord]) -> None:
        self._of_submissions: defaultdict[str, int] = defaultdict(int)
        self._by_name: defaultdict[str, int] = defaultdict(int)
        self._by_name_alone: defaultdict[str, int] = defaultdict(int)
        """Of nodes that count a job by its name, and none of its submissions."""
        for node in nodes:
            submitted = {key.partition("/")[0] for key in node.generations if "/" in key}
            for key, generation in node.generations.items():
                found = self._of_submissions if "/" in key else self._by_name
                found[key] = max(found[key], generation)
                if "/" not in key and key not in submitted:
                    self._by_name_alone[key] = max(self._by_name_alone[key], generation)

    def of_name(self, job: str) -> int:
        """Return the highest generation of all jobs of a name; 0: none."""
        return self._by_name.get(job, 0)

    def of_submission(self, job: str, uid: str) -> int:
        """Return the highest generation of one submission; 0: none."""
        return max(self._of_submissions.get(seen_key(job, uid), 0), self._by_name_alone.get(job, 0))
