"""The operations of a stage: forward and backward of a microbatch, and the update of a batch. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute a microbatch's output on W_v(b). One of the job's end is held-out text on W_end, and has no backward."""

    batch: int
    microbatch: int

    def __str__(self) -> str:
        return f"F{self.batch}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Differentiate a microbatch's forward, and add to the gradient sums."""

    batch: int
    microbatch: int

    def __str__(self) -> str:
        return f"B{self.batch}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Update:
    """Make W_{b+1} from W_b."""

    batch: int

    def __str__(self) -> str:
        return f"U{self.batch}"


@dataclass(frozen=True, slots=True)
class Orthogonalize:
    """Compute this replica's share of the coming update, and send it to the others. W_b and its state stay."""

    batch: int

    def __str__(self) -> str:
        return f"O{self.batch}"


BatchOp = Update | Orthogonalize
"""Operations of a whole batch: they have no microbatch."""

Op = Forward | Backward | BatchOp
