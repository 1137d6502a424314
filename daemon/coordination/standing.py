"""What the division of the cluster means for one job. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Who is in whose way."""

    gives_way_to: tuple[str, ...] = ()
    """Jobs that are owed devices of this one."""
    left_alone_until: float = 0.0
    """Before then it is not stopped for them; it may shrink. 0: nobody else is there."""
    in_the_way: tuple[str, ...] = ()
    """Jobs that have devices which this one waits for."""
    after: str = ""
    """The first waiting job before this one in the queue that could use the same devices."""
