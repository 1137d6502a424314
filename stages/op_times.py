"""How long a stage's operations took."""

from dataclasses import dataclass


@dataclass(slots=True)
class OpTimes:
    """How often one kind of operation ran, and for how long. On CUDA: until it was launched, not until it was done."""

    num_done: int = 0
    seconds: float = 0.0
