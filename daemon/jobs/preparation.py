"""How long the workers of a plan may take to be ready to start. Pure."""

from typing import Final

from headway.stages.spec import TrainSpec

PLAIN_S: Final = 120.0
"""To import the model, open the data and say so."""
COMPILING_S: Final = 600.0
"""To compile every kind of layer, too: half a minute on a core of its own, and the workers of a machine share cores."""


def preparation_s(train: TrainSpec) -> float:
    """From the order to the answer, at most."""
    return COMPILING_S if train.compile else PLAIN_S
