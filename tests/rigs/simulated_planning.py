"""The leader's planning in the simulated cluster: plans come at once, or a few decisions late by the seed."""

import random
from collections.abc import Callable, Collection

from headway.daemon.decide.commands import Decision
from headway.daemon.decide.plans import PlanCache, PlanRequest, Plans, PlansAtOnce

DELAYS = (0, 0, 1, 2, 5)
"""Decisions that a plan takes, each as likely."""


class SimulatedPlanning:
    """Computes plans as the leader's shell does: decisions look plans up, and missing ones are computed, one
    at a time.
    """

    def __init__(self, seed: int) -> None:
        self.takes_time = False
        """True if some plans come later than they are requested."""
        self.num_late = 0
        self._delays = random.Random(f"delays {seed}")
        self._cache = PlanCache()
        self._under_way: tuple[PlanRequest, int] | None = None
        """The plan under computation, and the decision in which it is done."""

    def begin_anew(self) -> None:
        """Another leads."""
        self._cache.clear()
        self._under_way = None

    def decided(
        self, decide: Callable[[Plans], Decision], *, jobs: Collection[str], now: float, num_decisions: int
    ) -> Decision:
        """A decision, taken anew as long as the plans that it misses come at once. num_decisions: before this one."""
        if self._under_way is not None and num_decisions >= self._under_way[1]:
            self._answer(self._under_way[0])
        while True:
            decision = decide(self._cache)
            self._cache.decided(decision.missing, jobs=jobs, now=now)
            wanted = (*decision.missing, *decision.stale)
            if self._under_way is not None or not wanted:
                return decision
            if self.takes_time and (delay := self._delays.choice(DELAYS)):
                self._under_way = wanted[0], num_decisions + delay
                self.num_late += 1
                return decision
            self._answer(wanted[0])

    def looked(self, decide: Callable[[Plans], Decision], *, jobs: Collection[str], now: float) -> None:
        """Take a decision that computes no plan."""
        self._cache.decided(decide(self._cache).missing, jobs=jobs, now=now)

    def _answer(self, request: PlanRequest) -> None:
        self._cache.answered(request, PlansAtOnce().find(request).outcome)
        self._under_way = None
