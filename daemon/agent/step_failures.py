"""Counts the failures of each step of an agent since it last succeeded, with its last reason. Pure."""

from collections.abc import Container


class StepFailures:
    """Failures by the name of the step."""

    def __init__(self) -> None:
        self._attempts: dict[object, int] = {}
        self._outages: dict[object, int] = {}
        """Number of attempts that met an outage of storage."""
        self._reasons: dict[object, str] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def failed(self, name: object, reason: str, *, is_outage: bool = False) -> tuple[int, bool]:
        """Count a failure. Return how many there are in a row, and whether this reason is news."""
        attempts = self._attempts[name] = self._attempts.get(name, 0) + 1
        if is_outage:
            self._outages[name] = self._outages.get(name, 0) + 1
        is_news = self._reasons.get(name) != reason
        self._reasons[name] = reason
        return attempts, is_news

    def charged(self, name: object) -> int:
        """Return how many failures of a step were no outage of storage."""
        return self._attempts.get(name, 0) - self._outages.get(name, 0)

    def start_over(self, name: object) -> None:
        """Let the next failure of a step count as its first. Reported reasons are not repeated."""
        self._attempts[name] = 0
        self._outages.pop(name, None)

    def succeeded(self, name: object) -> None:
        """Forget a step's failures."""
        self._attempts.pop(name, None)
        self._outages.pop(name, None)
        self._reasons.pop(name, None)

    def keep_only(self, names: Container[object]) -> None:
        """Forget steps that are no longer due."""
        for name in [name for name in self._attempts if name not in names]:
            self.succeeded(name)
