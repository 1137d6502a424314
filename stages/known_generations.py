"""Which generation of a job is the newest that a worker process has met: hellos of others are refused by it. Pure."""

from typing import Final

from headway.stages.ids import Generation

MAX_JOBS: Final = 64
"""A process belongs to its device and serves one job after another: it remembers those that it met last."""
NEVER_MET: Final = Generation(-1)


class KnownGenerations:
    """By job."""

    def __init__(self) -> None:
        self._newest: dict[str, Generation] = {}

    def __contains__(self, job: str) -> bool:
        return job in self._newest

    def meet(self, job: str, generation: Generation) -> None:
        """A link of this generation is wanted here."""
        self._newest[job] = max(generation, self._newest.pop(job, generation))
        while len(self._newest) > MAX_JOBS:
            del self._newest[next(iter(self._newest))]

    def newest(self, job: str) -> Generation:
        """NEVER_MET: none of the job, as far as is remembered."""
        return self._newest.get(job, NEVER_MET)
