"""How far this process has come in its updates: a number that rises, for those who watch that something moves.

An update is one operation of a stage and may take minutes. Others read the number from any thread at any time; to count
costs one addition beside some matrix products.
"""


class StepCount:
    """Matrix iterations and parameters that were updated since the process began."""

    def __init__(self) -> None:
        self.num_done = 0


STEPS = StepCount()
