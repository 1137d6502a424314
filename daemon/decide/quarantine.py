"""Decides when plans leave a node out because it failed too often, and which jobs' charges count. Pure.

A failure of the node itself counts for all jobs: its daemon was lost, or a worker's process was killed or did not
answer. An error that a worker reported may be the job's: it is charged to that job on that node. For the plans of that
job each error counts; for other jobs all errors of one job count once. So a job that raises everywhere costs no other
job a node. A node on which different jobs raise is left out.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from headway.daemon.base.terminal import counted
from headway.daemon.cluster.cluster_records import NodeFailureRecord

QUARANTINE_S: Final = 600
"""Seconds for which a node's failure counts against the node."""
QUARANTINE_AFTER: Final = 3
"""Failures of a node within that time after which plans leave it out."""


def num_counted(failures: Collection[NodeFailureRecord], *, for_job: str = "") -> int:
    """Return how many failures count for a job's plans; without a job: for a job that has charged nothing."""
    own = sum(not failure.is_jobs_error for failure in failures)
    by_job = Counter(failure.job for failure in failures if failure.is_jobs_error)
    return own + sum(number if job == for_job else 1 for job, number in by_job.items())


def left_out(failures: Mapping[str, Collection[NodeFailureRecord]], *, limit: int, for_job: str = "") -> frozenset[str]:
    """Return the nodes that a job's plans leave out. limit: number of failures that is too many; 0: no number is."""
    counts = {name: num_counted(found, for_job=for_job) for name, found in failures.items()}
    return frozenset(name for name, number in counts.items() if 0 < limit <= number)


def charged_by(failures: Collection[NodeFailureRecord]) -> str:
    """Return `2 failures of its own and errors of jobs a and b`."""
    own = sum(not failure.is_jobs_error for failure in failures)
    jobs = sorted({failure.job for failure in failures if failure.is_jobs_error})
    parts = [f"{counted(own, 'failure')} of its own"] if own else []
    parts += [f"errors of job{'s' * (len(jobs) > 1)} {listed(jobs)}"] if jobs else []
    return listed(parts)


def listed(names: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
