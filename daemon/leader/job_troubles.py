"""Reports what blocks decisions about single jobs or the writing of those decisions; retries become less frequent."""

import random
import time
from collections.abc import Callable, Collection, Iterable

import structlog

from headway.daemon.coordination.commands import BrokenJob
from headway.daemon.runtime.restart_policy import Health

log = structlog.get_logger()


class JobTroubles:
    """A leader's troubles with jobs, by job."""

    def __init__(
        self,
        *,
        tell: Callable[[str, str], None] = lambda _job, _reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """tell(job, reason) is called when a trouble begins, and with an empty reason when it ends."""
        self._tell = tell
        self._clock = clock
        self._broken: dict[str, str] = {}
        self._unwritten: dict[str, Health] = {}

    def not_decided(self, broken: Iterable[BrokenJob]) -> None:
        """Note the jobs that the last decision left out. Each new error is logged once with its traceback."""
        found = {job.job: job for job in broken}
        for name in self._broken.keys() - found.keys():
            del self._broken[name]
            self._say(name)
        for name, job in found.items():
            if self._broken.get(name) != job.reason:
                log.error("job_not_decided", job=name, reason=job.reason, traceback=job.traceback)
                self._broken[name] = job.reason
                self._say(name)

    def not_carried_out(self, job: str, reason: str) -> float:
        """Record that a decision about a job cannot be carried out. Return the seconds until the next attempt."""
        now = self._clock()
        health = self._unwritten.get(job, Health()).failed(reason, began_at=now, now=now, chance=random.random())
        self._unwritten[job] = health
        self._say(job)
        return health.resumes_at - now

    def carried_out(self, job: str) -> None:
        """Note that a decision about a job was written."""
        if self._unwritten.pop(job, None) is not None:
            self._say(job)

    def keep_only(self, jobs: Collection[str]) -> None:
        """Forget jobs that are gone: nothing more is tried or reported about them."""
        for name in self._unwritten.keys() - jobs:
            self.carried_out(name)

    def clear(self) -> None:
        """Forget everything, because another daemon leads."""
        names = self._broken.keys() | self._unwritten.keys()
        self._broken.clear()
        self._unwritten.clear()
        for name in names:
            self._tell(name, "")

    def _say(self, job: str) -> None:
        unwritten = self._unwritten.get(job)
        reason = self._broken.get(job, "")
        if reason:
            reason = f"the coordinator cannot decide about this job: {reason}"
        elif unwritten is not None:
            number = unwritten.num_in_a_row
            times = "" if number == 1 else f" {number} times in a row"
            reason = f"a decision was not carried out{times}: {unwritten.reason}"
        self._tell(job, reason)
