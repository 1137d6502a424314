"""Limits how long the workers of a plan may take to be ready to start. Pure."""

from typing import Final

from headway.stages.spec import TrainSpec

PLAIN_S: Final = 120.0
"""Time to import the model, open the data and report."""
COMPILING_S: Final = 600.0
"""Additional time to compile every kind of layer: half a minute on its own core, and workers of a machine
share cores.
"""


def preparation_s(train: TrainSpec) -> float:
    """Return the maximum time from the order to the answer."""
    return COMPILING_S if train.compile else PLAIN_S
