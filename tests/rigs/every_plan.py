"""The best plan by trying all of them: any nodes in any order, any stages, cuts, shares of the groups and depths.

It knows the rules, not the way to the answer. The time of a batch without distance, memory and who may share a stage
are computed on their own (`brute_force`); what distance adds to a placement is asked of the rule itself, which other
tests hold against the simulator.
"""

import itertools
from collections.abc import Iterator, Mapping
from math import inf

from headway.daemon.cluster.records import NodeRecord
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.connections import Links
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.predicted_time import PlacedStage, PredictedTime, Worker
from headway.daemon.plan.profiles import Profiles
from headway.daemon.plan.stage_costs import StageCosts
from headway.stages.schedule.stage_schedule import schedule_depth
from tests.rigs.brute_force import (
    Instance,
    between,
    divisions,
    fits_in,
    reduction_seconds,
    shares_update,
    worker_seconds,
)

SLACK = 1 + 1e-9


class EveryPlan:
    """All plans of an instance whose batches are not slower than a limit."""

    def __init__(
        self,
        instance: Instance,
        profiles: Profiles,
        at_most: float = inf,
        *,
        blocked: frozenset[frozenset[str]] = frozenset(),
    ) -> None:
        """blocked: pairs of nodes that may not be in neighbouring stages, nor in one stage."""
        self.blocked = blocked
        self.instance = instance
        self.spec: JobSpec = instance.spec
        self.at_most = at_most * SLACK
        self.slots = {node.name: DeviceSlot.of(node, 0) for node in instance.nodes}
        self.costs = StageCosts(self.spec, tuple(self.slots.values()), profiles, Links(instance.links, profiles))
        self._stages: dict[tuple[object, ...], list[tuple[float, PlacedStage]]] = {}
        self._between: dict[tuple[object, ...], tuple[float, float]] = {}

    def best_by_size(self) -> Mapping[int, float]:
        """Least seconds of a batch by the number of workers."""
        best: dict[int, float] = {}
        for placed, hidden in self._all():
            size = sum(len(stage.workers) for stage in placed)
            if hidden < best.get(size, inf):
                best[size] = min(best.get(size, inf), self._with_distance(placed))
        return {size: seconds for size, seconds in best.items() if seconds <= self.at_most}

    def is_possible(self) -> bool:
        """Whether there is any plan at all."""
        return next(self._all(), None) is not None

    def _all(self) -> Iterator[tuple[tuple[PlacedStage, ...], float]]:
        """(placement, seconds of a batch without distance)"""
        spec, nodes = self.spec, self.instance.nodes
        most = min(len(nodes), len(spec.layers), spec.train.microbatches)
        for num_stages in range(1, most + 1):
            filled = 1.0 if spec.train.delay else 1 + (num_stages - 1) / spec.train.microbatches
            for placed, slowest, trips in self._extend((), 0.0, 0.0, num_stages, filled):
                yield placed, slowest * filled + (0.0 if spec.train.delay else trips)

    def _extend(
        self, placed: tuple[PlacedStage, ...], slowest: float, trips: float, num_left: int, filled: float
    ) -> Iterator[tuple[tuple[PlacedStage, ...], float, float]]:
        num_layers = len(self.spec.layers)
        first = placed[-1].span[1] if placed else 0
        if num_left == 0:
            yield placed, slowest, trips
            return
        taken = {slot.node for stage in placed for slot in stage.slots}
        free = [node for node in self.instance.nodes if node.name not in taken]
        most_workers = min(self.spec.train.reduction_groups, len(free) - num_left + 1)
        most_workers = 1 if self.instance.is_in_turn else most_workers
        ends = range(first + 1, num_layers - num_left + 2) if num_left > 1 else (num_layers,)
        # Who of a stage's workers comes first matters only where the first groups have more microbatches.
        is_even = self.spec.train.microbatches % self.spec.train.reduction_groups == 0
        runs = itertools.combinations if is_even else itertools.permutations
        for run in (run for size in range(1, most_workers + 1) for run in runs(free, size)):
            if self._is_blocked(placed, run):
                continue
            carrying, trip = self._link(placed[-1], run) if placed else (0.0, 0.0)
            if carrying * filled > self.at_most:
                continue
            for end in ends:
                for seconds, stage in self._stage(run, first, end, num_left):
                    slower = max(slowest, seconds, carrying)
                    if slower * filled <= self.at_most:
                        yield from self._extend((*placed, stage), slower, trips + trip, num_left - 1, filled)

    def _is_blocked(self, placed: tuple[PlacedStage, ...], run: tuple[NodeRecord, ...]) -> bool:
        names = [node.name for node in run]
        above = [slot.node for slot in placed[-1].slots] if placed else []
        together = [*itertools.combinations(names, 2), *itertools.product(above, names)]
        return any(frozenset(pair) in self.blocked for pair in together)

    def _link(self, above: PlacedStage, run: tuple[NodeRecord, ...]) -> tuple[float, float]:
        uppers = tuple(slot.node for slot in above.slots)
        key = uppers, tuple(node.name for node in run)
        if key not in self._between:
            by_name = {node.name: node for node in self.instance.nodes}
            self._between[key] = between(self.instance, tuple(by_name[name] for name in uppers), run)
        return self._between[key]

    def _stage(
        self, run: tuple[NodeRecord, ...], first: int, end: int, num_stages: int
    ) -> list[tuple[float, PlacedStage]]:
        """(seconds of a batch, stage) for all shares of the groups that fit."""
        key = tuple(node.name for node in run), first, end, num_stages
        if key not in self._stages:
            self._stages[key] = list(self._shared(run, first, end, num_stages))
        return self._stages[key]

    def _shared(
        self, run: tuple[NodeRecord, ...], first: int, end: int, num_stages: int
    ) -> Iterator[tuple[float, PlacedStage]]:
        if len({node.arithmetic_class for node in run}) > 1:
            return
        alone = list(self._divided(run, first, end, num_stages, is_shared=False))
        shared = list(self._divided(run, first, end, num_stages, is_shared=True)) if len(run) > 1 else []
        least = [min((seconds for seconds, _ in found), default=inf) for found in (alone, shared)]
        found = shared if shares_update(self.instance, (first, end), *least) else alone
        yield from ((seconds, stage) for seconds, stage in found if seconds <= self.at_most)

    def _divided(
        self, run: tuple[NodeRecord, ...], first: int, end: int, num_stages: int, *, is_shared: bool
    ) -> Iterator[tuple[float, PlacedStage]]:
        train = self.spec.train
        sharing = len(run) if is_shared else 1
        depth = schedule_depth(train.schedule, train.microbatches, num_stages, 0)
        for counts in divisions(train.reduction_groups, len(run)):
            bounds = list(itertools.accumulate(counts, initial=0))
            shares = [range(*pair) for pair in itertools.pairwise(bounds)]
            if not all(
                fits_in(self.instance, node, first, end, groups, len(run), depth, is_shared=is_shared)
                for node, groups in zip(run, shares, strict=True)
            ):
                continue
            computing = max(
                worker_seconds(self.instance, node, first, end, groups, num_sharing=sharing)
                for node, groups in zip(run, shares, strict=True)
            )
            reducing = reduction_seconds(self.instance, run, first, end, is_shared=is_shared)
            workers = tuple(
                Worker(slot=self.slots[node.name], groups=tuple(groups))
                for node, groups in zip(run, shares, strict=True)
            )
            seconds = max(computing, reducing) if train.delay else computing + reducing
            yield seconds, PlacedStage(span=(first, end), workers=workers, shares_update=is_shared)

    def _with_distance(self, placed: tuple[PlacedStage, ...]) -> float:
        """With the most depth that the rule asks for and memory allows: more is never slower."""
        times = PredictedTime(self.costs, placed)
        depths = [self._deepest(stage, len(placed) - index, times.depth(index)) for index, stage in enumerate(placed)]
        return times.distance(depths).batch_s

    def _deepest(self, stage: PlacedStage, num_stages: int, wanted: int) -> int:
        train, by_name = self.spec.train, {node.name: node for node in self.instance.nodes}
        least = schedule_depth(train.schedule, train.microbatches, num_stages, 0)
        return max(
            depth
            for depth in range(least, max(least, wanted) + 1)
            if depth == least
            or all(
                fits_in(
                    self.instance,
                    by_name[worker.slot.node],
                    *stage.span,
                    worker.groups,
                    len(stage.workers),
                    depth,
                    is_shared=stage.shares_update,
                )
                for worker in stage.workers
            )
        )
