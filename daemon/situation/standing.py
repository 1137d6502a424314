"""The place of one job in the division of the cluster. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The jobs that block this job, and the jobs that it blocks."""

    gives_way_to: tuple[str, ...] = ()
    """Jobs that are owed devices of this one."""
    left_alone_until: float = 0.0
    """Until this time the job is not stopped for others, but it may shrink. 0: there is no other job."""
    in_the_way: tuple[str, ...] = ()
    """Jobs that hold devices for which this job waits."""
    after: str = ""
    """The first waiting job ahead in the queue that could use devices of this job's choice."""
