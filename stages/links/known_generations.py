"""Remembers the newest generation of a job that a worker process has met: it refuses hellos of others. Pure."""

from typing import Final

from headway.stages.ids import Generation

MAX_JOBS: Final = 64
"""Number of jobs remembered, the last met: a process belongs to its device and serves one job after another."""
NEVER_MET: Final = Generation(-1)


class KnownGenerations:
    """The newest generation by job."""

    def __init__(self) -> None:
        self._newest: dict[str, Generation] = {}

    def __contains__(self, job: str) -> bool:
        return job in self._newest

    def meet(self, job: str, generation: Generation) -> None:
        """Note that a link of this generation is wanted here."""
        self._newest[job] = max(generation, self._newest.pop(job, generation))
        while len(self._newest) > MAX_JOBS:
            del self._newest[next(iter(self._newest))]

    def newest(self, job: str) -> Generation:
        """Return the newest generation; NEVER_MET: none of the job is remembered."""
        return self._newest.get(job, NEVER_MET)
