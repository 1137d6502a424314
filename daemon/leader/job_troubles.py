"""Reports what blocks decisions about single jobs or the writing of those decisions; retries become less frequent."""

import random
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

import structlog

from headway.daemon.coordination.commands import BrokenJob
from headway.daemon.runtime.restart_policy import Health

log = structlog.get_logger()

NOT_DUE_S: Final = 60.0
"""Seconds after a pause without another attempt: then a decision is not due any more, and its failure is no trouble."""


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
        self._unwritten: dict[str, dict[str, Health]] = {}
        """Job to kind of decision to what becomes of it."""

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

    def not_carried_out(self, job: str, reason: str, *, kind: str = "") -> float:
        """Record that a decision about a job cannot be carried out. Return the seconds until the next attempt."""
        now, of_job = self._clock(), self._unwritten.setdefault(job, {})
        of_job[kind] = of_job.get(kind, Health()).failed(reason, began_at=now, now=now, chance=random.random())
        self._say(job)
        return of_job[kind].resumes_at - now

    def carried_out(self, job: str, *, kind: str = "") -> None:
        """Note that a decision about a job was written. Another kind still fails, unless nobody has tried it lately."""
        now, of_job = self._clock(), self._unwritten.get(job)
        if of_job is None:
            return
        left = {other: each for other, each in of_job.items() if other != kind and now < each.resumes_at + NOT_DUE_S}
        if left:
            self._unwritten[job] = left
        else:
            del self._unwritten[job]
        self._say(job)

    def keep_only(self, jobs: Collection[str]) -> None:
        """Forget jobs that are gone: nothing more is tried or reported about them."""
        for name in self._unwritten.keys() - jobs:
            del self._unwritten[name]
            self._say(name)

    def clear(self) -> None:
        """Forget everything, because another daemon leads."""
        names = self._broken.keys() | self._unwritten.keys()
        self._broken.clear()
        self._unwritten.clear()
        for name in names:
            self._tell(name, "")

    def _say(self, job: str) -> None:
        unwritten = max(self._unwritten.get(job, {}).values(), key=lambda each: each.num_in_a_row, default=None)
        reason = self._broken.get(job, "")
        if reason:
            reason = f"the coordinator cannot decide about this job: {reason}"
        elif unwritten is not None:
            number = unwritten.num_in_a_row
            times = "" if number == 1 else f" {number} times in a row"
            reason = f"a decision was not carried out{times}: {unwritten.reason}"
        self._tell(job, reason)
