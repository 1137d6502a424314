"""Remembers what was decided about each job, so that an event costs only the jobs that it concerns. Pure.

A judgement holds until something changes that it has read: a record of the job, what nodes and shares say, the claims
of all jobs, a plan, a way between nodes of its plans, or the time at which waiting ends. One that does something is
never remembered. So a decision with these memories equals one without them; tests compare the two after every event.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from headway.daemon.coordination.claims import Claims
from headway.daemon.coordination.commands import Command
from headway.daemon.records.identity import Same
from headway.daemon.records.records import DeviceKey, Phase
from headway.daemon.situation.reads import Reads
from headway.daemon.view.job_view import JobView

REPEATED_S: Final = 10.0
"""A judgement is repeated after this time in any case, because numbers in its sentences age."""

Basis = tuple[object, ...]
"""What was read, as version numbers and immutable values: two that are equal lead to the same judgement, as long as
the same `Reads` go with them.
"""
Renew = Callable[[Reads], Reads | None]
"""`Reads.now` of the present view and plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The decision about one job, and its effect on the jobs after it."""

    command: Command | None
    takes: frozenset[DeviceKey] = frozenset()
    """Devices that the command assigns to the job."""
    deadlines: tuple[float, ...] = ()
    reads: Reads = field(default_factory=Reads)

    @property
    def is_quiet(self) -> bool:
        """Return whether it does nothing."""
        return self.command is None and not self.takes


@dataclass(slots=True)
class Earlier:
    """What one leader has decided so far. `decide` alone reads and writes it."""

    claims_read: dict[str, Reads] = field(default_factory=dict)
    """What was read of each job to settle the claims."""
    _claims: Claims | None = None
    _claims_rest_on: Basis | None = None
    """None: they must be settled again."""
    _num_claims: int = 0
    """Number that rises whenever the claims differ from the ones before."""
    _judged: dict[str, tuple[Basis, float, Judged]] = field(default_factory=dict)
    """Job to its last judgement, with what it rests on and until when it holds."""
    _wake_at: float = float("-inf")
    """The moment at which time alone may change something about any job."""

    def claims(self, basis: Basis, renew: Renew, *, now: float) -> Claims | None:
        """Return the claims that were settled on the same basis; None: they must be settled again."""
        if self._claims is None or self._claims_rest_on != basis or now >= min(self._wake_at, self._claims.until):
            return None
        renewed = {job: new for job, reads in self.claims_read.items() if (new := renew(reads)) is not None}
        if len(renewed) < len(self.claims_read):
            return None
        self.claims_read = renewed
        return self._claims

    def settled(self, basis: Basis, claims: Claims, reads: Mapping[str, Reads]) -> None:
        """Remember claims. reads: of jobs. A job that misses a plan for them is judged again when they are settled."""
        misses_any = any(each.missing for each in (*self.claims_read.values(), *reads.values()))
        self.claims_read = {job: each for job, each in reads.items() if each}
        if claims != self._claims or claims.errors or misses_any:
            self._num_claims += 1
        self._claims, self._claims_rest_on = claims, basis if not claims.errors else None

    def basis(self, job: JobView, *others: object) -> Basis:
        """Return what a judgement about a job rests on, beside `others`."""
        return (self._num_claims, job.num_changes, Same(job.progress), *others)

    def judged(self, job: JobView, basis: Basis, renew: Renew, *, now: float) -> Judged | None:
        """Return the earlier judgement about a job, if it holds."""
        before, until, found = self._judged.get(job.name, ((), 0.0, None))
        if found is None or before != basis or now >= until:
            return None
        # Sentences about a job that waits name other jobs, and the time until these give way.
        if job.phase.phase is not Phase.RUNNING and now >= self._wake_at:
            return None
        reads = renew(found.reads)
        if reads is None:
            return None
        if reads is not found.reads:
            found = replace(found, reads=reads)
            self._judged[job.name] = basis, until, found
        return found

    def remember(self, job: JobView, basis: Basis, judged: Judged, *, now: float) -> None:
        """Remember a judgement."""
        if judged.is_quiet:
            self._judged[job.name] = basis, min((now + REPEATED_S, *judged.deadlines)), judged
        else:
            self._judged.pop(job.name, None)

    def decided(self, names: Iterable[str], *, wake_at: float | None) -> None:
        """Note the end of a decision about these jobs."""
        self._wake_at = wake_at if wake_at is not None else float("inf")
        for name in self._judged.keys() - set(names):
            del self._judged[name]
