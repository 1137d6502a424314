"""A microbatch: the rows that a stage computes at once, and what they are to predict."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # commands that read only an index do without torch


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """As the first stage draws it. On a later stage hidden states take the place of the tokens."""

    inputs: "Tensor"
    """Tokens int64 [size, length], or hidden states [size, length, hidden]."""
    targets: "Tensor"
    """int64 [size, length]: the token after each of the tokens."""
