"""A microbatch: the rows that a stage computes at once, and what they are to predict."""

from collections.abc import Sequence
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
    """int64 [size, length]: the token after each of the tokens; -100: it is not trained on."""
    positions: "Tensor | None" = None
    """int32 [size, length]: each token's position in its document. None: attention does not end with documents."""
    mean_tokens: "Tensor | None" = None
    """float32 []: the sum of the losses, of tokens or of pairs, is divided by it. None: the loss is the mean over all
    tokens.
    """

    @property
    def read_by_all(self) -> "tuple[Tensor, ...]":
        """Return the tensors that every stage reads."""
        return (self.inputs,) if self.positions is None else (self.inputs, self.positions)

    @property
    def read_by_last(self) -> "tuple[Tensor, ...]":
        """Return the tensors that only pass through the other stages."""
        return (self.targets,) if self.mean_tokens is None else (self.targets, self.mean_tokens)

    @property
    def tensors(self) -> "tuple[Tensor, ...]":
        """Return all of it, from which `of` makes it again."""
        return (*self.read_by_all, *self.read_by_last)

    @classmethod
    def of(cls, tensors: "Sequence[Tensor]") -> "Microbatch":
        """Return the microbatch of its tensors. Positions never come without a mask."""
        match tensors:
            case (inputs, targets):
                return cls(inputs, targets)
            case (inputs, targets, mean_tokens):
                return cls(inputs, targets, mean_tokens=mean_tokens)
            case (inputs, positions, targets, mean_tokens):
                return cls(inputs, targets, positions, mean_tokens)
        raise AssertionError(f"{len(tensors)} tensors are no microbatch")
