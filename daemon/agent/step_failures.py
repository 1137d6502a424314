"""Counts the failures of each step of an agent since it last succeeded, with its last reason. Pure."""

from collections.abc import Container
from dataclasses import dataclass


@dataclass(slots=True)
class _Failures:
    num_attempts: int = 0
    num_outages: int = 0
    """Number of attempts that met an outage of storage."""
    reason: str | None = None


class StepFailures:
    """Failures by the name of the step."""

    def __init__(self) -> None:
        self._steps: dict[object, _Failures] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def failed(self, name: object, reason: str, *, is_outage: bool = False) -> tuple[int, bool]:
        """Count a failure. Return the number in a row, and whether the reason is new."""
        step = self._steps.setdefault(name, _Failures())
        step.num_attempts += 1
        step.num_outages += is_outage
        is_news, step.reason = step.reason != reason, reason
        return step.num_attempts, is_news

    def charged(self, name: object) -> int:
        """Return how many failures of a step were not outages of storage."""
        step = self._steps.get(name, _Failures())
        return step.num_attempts - step.num_outages

    def start_over(self, name: object) -> None:
        """Count the next failure of a step as its first. Reasons that were reported are not repeated."""
        step = self._steps.setdefault(name, _Failures())
        step.num_attempts = step.num_outages = 0

    def succeeded(self, name: object) -> None:
        """Forget a step's failures."""
        self._steps.pop(name, None)

    def keep_only(self, names: Container[object]) -> None:
        """Forget steps that are no longer due."""
        self._steps = {name: step for name, step in self._steps.items() if name in names}
