"""How often each step of an agent has failed since it last succeeded, and its last reason: forgotten with it. Pure."""

from collections.abc import Container


class StepFailures:
    """By the name of the step."""

    def __init__(self) -> None:
        self._attempts: dict[object, int] = {}
        self._outages: dict[object, int] = {}
        """How many of the attempts met an outage of storage."""
        self._reasons: dict[object, str] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def failed(self, name: object, reason: str, *, is_outage: bool = False) -> tuple[int, bool]:
        """Count a failure. Returns how many there are in a row, and whether this reason is news."""
        attempts = self._attempts[name] = self._attempts.get(name, 0) + 1
        if is_outage:
            self._outages[name] = self._outages.get(name, 0) + 1
        is_news = self._reasons.get(name) != reason
        self._reasons[name] = reason
        return attempts, is_news

    def charged(self, name: object) -> int:
        """How many failures of a step were no outage of storage."""
        return self._attempts.get(name, 0) - self._outages.get(name, 0)

    def start_over(self, name: object) -> None:
        """The next failure of a step is its first one. What was said of it is not said again."""
        self._attempts[name] = 0
        self._outages.pop(name, None)

    def succeeded(self, name: object) -> None:
        """Forget a step's failures."""
        self._attempts.pop(name, None)
        self._outages.pop(name, None)
        self._reasons.pop(name, None)

    def keep_only(self, names: Container[object]) -> None:
        """Other steps are not due any more."""
        for name in [name for name in self._attempts if name not in names]:
            self.succeeded(name)
