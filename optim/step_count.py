"""Counts this process's progress in its updates, for observers of movement.

An update is one operation of a stage and may take minutes. Other threads read the number at any time; counting costs
one addition per few matrix products.
"""


class StepCount:
    """Matrix iterations, sides that SOAP has turned, and parameters that were updated since the process began."""

    def __init__(self) -> None:
        self.num_done = 0


STEPS = StepCount()
