"""How long a stage's operations took."""

from dataclasses import dataclass


@dataclass(slots=True)
class OpTimes:
    """How often one kind of operation ran, and for how long. On CUDA: until it was launched, not until it was done."""

    num_done: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """One more was done."""
        self.num_done += 1
        self.seconds += seconds

    @property
    def mean_s(self) -> float:
        """Of those that were done; 0: none was."""
        return self.seconds / self.num_done if self.num_done else 0.0
