"""A planner that gives stages replicas at random: the same nodes always get the same plan."""

import random
from collections.abc import Iterable
from dataclasses import replace

from headway.daemon.cluster.records import WorkerPart
from headway.daemon.plan.plan_question import PlanQuestion
from headway.daemon.plan.planner import ClusterPlan, PlanRefused, answer


def answer_with_replicas(question: PlanQuestion) -> ClusterPlan | PlanRefused:
    """The planner's devices and cuts, with some runs of stages made into replicas of one."""
    spec = question.spec
    plan = answer(replace(question, spec=replace(spec, train=replace(spec.train, reduction_groups=1))))
    if isinstance(plan, PlanRefused):
        return plan
    chance = random.Random(f"{spec.job.name} {spec.train.reduction_groups} {len(plan.workers)}")
    return replace(plan, workers=tuple(_with_replicas(plan.workers, spec.train.reduction_groups, chance)))


def _with_replicas(stages: tuple[WorkerPart, ...], num_groups: int, chance: random.Random) -> Iterable[WorkerPart]:
    first = 0
    while first < len(stages):
        run = stages[first : first + chance.randint(1, num_groups)]
        layers = tuple(layer for stage in run for layer in stage.layers)
        for stage, groups in zip(run, _shares(len(run), num_groups, chance), strict=True):
            yield replace(stage, layers=layers, groups=groups if len(run) > 1 else ())
        first += len(run)


def _shares(num_replicas: int, num_groups: int, chance: random.Random) -> list[tuple[int, ...]]:
    """All groups dealt out, at least one to each, by their first group."""
    dealt = [*range(num_replicas), *(chance.randrange(num_replicas) for _ in range(num_groups - num_replicas))]
    chance.shuffle(dealt)
    shares = [tuple(group for group, owner in enumerate(dealt) if owner == replica) for replica in range(num_replicas)]
    return sorted(shares)
