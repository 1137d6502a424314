"""The daemon's knowledge of one of its workers: its goal, what it says of itself, and how its processes ended. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headway.daemon.workers.goal import Actual, Failure, Goal


@dataclass(frozen=True, slots=True, order=True)
class JobGeneration:
    """One plan of one job."""

    job: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One device's worker process."""

    device_index: int
    incarnation: str = ""
    """Incarnation of the process; empty while none has said hello."""
    pid: int = 0
    address: str = ""
    """Address at which its neighbours in the plan dial it."""
    goal: Goal = field(default_factory=Goal)
    """The last one that this process was given."""
    actual: Actual = field(default_factory=Actual)
    """The last one that it told."""
    failures: Mapping[JobGeneration, Failure] = field(default_factory=dict)
    """Reasons why it could not do its part of a generation. They outlive the process."""
    has_died: bool = False
    """True if a process was there, and the next one is not there yet."""

    @property
    def is_up(self) -> bool:
        """Return whether a process is there to reach a goal."""
        return bool(self.incarnation)

    @property
    def job(self) -> str:
        """Return the job that it serves or is to serve; empty: none."""
        return self.goal.job or self.actual.job

    def is_prepared(self, run_key: JobGeneration) -> bool:
        """Return whether it is ready to start a generation."""
        return self.actual.job == run_key.job and self.actual.prepared == run_key.generation

    def has_started(self, run_key: JobGeneration) -> bool:
        """Return whether a generation is the one that it computes, or computed last."""
        return self.actual.job == run_key.job and self.actual.generation == run_key.generation

    def is_running(self, run_key: JobGeneration) -> bool:
        """Return whether it is up with a generation and has not failed in it."""
        return self.is_up and self.has_started(run_key) and run_key not in self.failures

    def told(self, actual: Actual) -> "WorkerStatus":
        """Return the status after it said where it is."""
        news = {}
        if actual.failures != self.actual.failures:  # what was forgotten is not learned again
            told = {JobGeneration(actual.job, generation): why for generation, why in actual.failures.items()}
            news = {run_key: why for run_key, why in told.items() if run_key not in self.failures}
        return replace(self, actual=actual, failures={**self.failures, **news})

    def failed(self, failure: Failure, *, run_key: JobGeneration) -> "WorkerStatus":
        """Return the status after it could not do its part of one generation."""
        return replace(self, failures={**self.failures, run_key: failure})

    def died(self, failure: Failure) -> "WorkerStatus":
        """Return the status after its process ended: every generation that it served is lost here."""
        goal, actual = self.goal, self.actual
        wanted = [JobGeneration(goal.job, part.plan.generation) for part in (goal.prepare, goal.start) if part]
        served = [JobGeneration(actual.job, number) for number in (actual.prepared, actual.generation) if number]
        failures = {run_key: failure for run_key in (*wanted, *served) if run_key not in self.failures}
        return WorkerStatus(device_index=self.device_index, failures={**self.failures, **failures}, has_died=True)

    def attached(self, incarnation: str, *, pid: int, address: str) -> "WorkerStatus":
        """Return the status after a new process said hello; the earlier process's failures stay."""
        return WorkerStatus(
            device_index=self.device_index, incarnation=incarnation, pid=pid, address=address, failures=self.failures
        )

    def forgetting(self, is_over: frozenset[JobGeneration]) -> "WorkerStatus":
        """Return the status without the failures of generations that are over."""
        return replace(
            self, failures={run_key: why for run_key, why in self.failures.items() if run_key not in is_over}
        )
