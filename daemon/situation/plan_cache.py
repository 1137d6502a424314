"""Caches the plans that decisions need: which are wanted, which exist, and which may still be used. Pure.

A decision never computes a plan. It looks one up, and names a missing plan in `Decision.missing`; it is repeated when
the plan exists. The cluster may change in the meantime, so an answer may be for an earlier question:

- other measurements, but equal devices: the plan is used, and a newer one is requested;
- other devices: the plan is overtaken, and requested again. After `MAX_OVERTAKEN` in a row, a plan is used if all its
  devices may still be used, although it ignores later newcomers.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, Unpack

from headway.daemon.costs.profiles import Profiles
from headway.daemon.jobs.job import JobSpec
from headway.daemon.planning.plan_question import (
    Conditions,
    PlanQuestion,
    ask,
    differs_in_measurements_alone,
    still_answers,
)
from headway.daemon.planning.planner import ClusterPlan, PlanRefused, answer
from headway.daemon.records.records import NodeRecord

MAX_OVERTAKEN: Final = 2
"""Maximum number of plans in a row that are overtaken by changes of devices."""

Outcome = ClusterPlan | PlanRefused


class Purpose(StrEnum):
    """The purpose of a plan. The last answer for each purpose is remembered."""

    BEST = "best"
    WITH_FLAPPING_NODES = "with flapping nodes"
    RECOVERY = "recovery"
    RECOVERY_WITH_SUSPECTS = "recovery with suspects"
    RECOVERY_WITH_DRAINING_NODES = "recovery with draining nodes"
    ON_EVERYTHING = "on everything"
    CLAIM = "claim"
    CLAIM_OF_MORE = "claim of more"
    SHRUNK = "shrunk"
    SHRUNK_FURTHER = "shrunk further"


RECOVERIES: Final = (Purpose.RECOVERY, Purpose.RECOVERY_WITH_SUSPECTS, Purpose.RECOVERY_WITH_DRAINING_NODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A plan that a job wants."""

    job: str
    purpose: Purpose
    question: PlanQuestion


def urgency(request: PlanRequest, *, is_content: bool) -> int:
    """Order of computation, the lowest first: a job that recovers, then one that waits to start or to leave a node.

    A job that already trains, and could train faster, comes last.
    """
    if request.purpose in RECOVERIES:
        return 0
    return 2 if is_content else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan that may be used."""

    outcome: Outcome
    is_current: bool = True
    """True if the plan answers the present question, measurements included; otherwise a newer one is requested."""


class PlanMissingError(Exception):
    """A decision needs a plan that does not exist yet."""

    def __init__(self, request: PlanRequest) -> None:
        super().__init__(f"job {request.job} has no {request.purpose} plan yet")
        self.request = request


class Plans(Protocol):
    """The source of a decision's plans."""

    def find(self, request: PlanRequest) -> Found | None:
        """Return a plan that may be used now; None: there is none yet."""
        ...

    def wanted_since(self, job: str) -> float | None:
        """Return since when a job has missed a plan, by the clock of the decisions; None: it misses none."""
        ...


class PlansAtOnce:
    """Computes every plan at once when it is requested, for callers that can wait."""

    def find(self, request: PlanRequest) -> Found:
        """Compute the plan."""
        return Found(outcome=answer(request.question))

    def wanted_since(self, job: str) -> None:
        """Return None: nothing is missing."""


class Inquiry:
    """The plans that one decision about one job looks up, and those that it misses."""

    def __init__(self, plans: Plans, job: str) -> None:
        self._plans = plans
        self._job = job
        self._missing: dict[Purpose, PlanMissingError] = {}
        self.stale: list[PlanRequest] = []
        """Plans that were used although measurements have changed since then."""

    @property
    def missing(self) -> tuple[PlanRequest, ...]:
        """Return the plans that do not exist yet, without which a decision was impossible."""
        return tuple(each.request for each in self._missing.values())

    @property
    def waits_since(self) -> float | None:
        """Return since when decisions have missed a plan that this one misses; None: none, or this is the first."""
        return self._plans.wanted_since(self._job) if self._missing else None

    def plan(
        self,
        purpose: Purpose,
        spec: JobSpec,
        nodes: Collection[NodeRecord],
        *,
        profiles: Profiles,
        **conditions: Unpack[Conditions],
    ) -> Found:
        """Look a plan up, or compute it. Raises PlanMissingError, again for its purpose too."""
        if purpose in self._missing:
            raise self._missing[purpose]
        question = ask(spec, nodes, profiles=profiles, **conditions)
        request = PlanRequest(job=self._job, purpose=purpose, question=question)
        found = self._plans.find(request)
        if found is None:
            self._missing[purpose] = PlanMissingError(request)
            raise self._missing[purpose]
        if not found.is_current:
            self.stale.append(request)
        return found


@dataclass(slots=True)
class _Entry:
    """The entry of one job and purpose."""

    question: PlanQuestion | None = None
    outcome: Outcome | None = None
    """The last answer, and its question."""
    num_overtaken: int = 0
    is_unread: bool = False
    """True if no decision has been taken since the answer came."""
    wanted_since: float | None = None


class PlanCache:
    """The plans that a leader has had computed. One owner writes (`answered` and then `decided`); decisions read."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, Purpose], _Entry] = {}

    def find(self, request: PlanRequest) -> Found | None:
        """Look a plan up, see Plans."""
        entry = self._entries.get((request.job, request.purpose))
        if entry is None or entry.question is None or entry.outcome is None:
            return None
        if entry.question == request.question:
            return Found(outcome=entry.outcome)
        if differs_in_measurements_alone(entry.question, request.question):
            return Found(outcome=entry.outcome, is_current=False)
        is_patient = entry.num_overtaken < MAX_OVERTAKEN
        if is_patient or isinstance(entry.outcome, PlanRefused):
            return None
        if not still_answers(entry.outcome, entry.question, request.question):
            return None
        return Found(outcome=entry.outcome, is_current=False)

    def wanted_since(self, job: str) -> float | None:
        """Return the time, see Plans."""
        waits = [entry.wanted_since for (name, _), entry in self._entries.items() if name == job]
        return min((since for since in waits if since is not None), default=None)

    def answered(self, request: PlanRequest, outcome: Outcome) -> None:
        """Store a computed plan. The next decision shows whether it came in time."""
        entry = self._entry(request)
        entry.question, entry.outcome, entry.is_unread = request.question, outcome, True

    def decided(self, missing: Sequence[PlanRequest], *, jobs: Collection[str], now: float) -> None:
        """Note a decision. missing: the plans that it needed and did not have. jobs: all present jobs."""
        for key in [key for key in self._entries if key[0] not in jobs]:
            del self._entries[key]
        wanted = {(request.job, request.purpose) for request in missing}
        for request in missing:
            self._entry(request)
        for key, entry in self._entries.items():
            if entry.is_unread:
                entry.num_overtaken = entry.num_overtaken + 1 if key in wanted else 0
                entry.is_unread = False
            if key not in wanted:
                entry.wanted_since = None
            elif entry.wanted_since is None:
                entry.wanted_since = now

    def knows(self, job: str, purpose: Purpose) -> bool:
        """Return whether an existing job has requested such a plan."""
        return (job, purpose) in self._entries

    def forget(self, request: PlanRequest) -> None:
        """Request a plan again, although none of its inputs has changed."""
        entry = self._entries.get((request.job, request.purpose))
        if entry is not None and entry.question == request.question:
            entry.question = entry.outcome = None

    def clear(self) -> None:
        """Forget everything: the next leader begins with an empty cache."""
        self._entries.clear()

    def _entry(self, request: PlanRequest) -> _Entry:
        return self._entries.setdefault((request.job, request.purpose), _Entry())
