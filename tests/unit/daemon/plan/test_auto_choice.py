"""`recompute = "auto"` is never slower than a choice that a job could fix."""

from dataclasses import replace

import pytest

from headway.daemon.plan.planner import ClusterPlan, make_plan
from tests.rigs.pipeline_cut import instance


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 8))])
def test_auto_is_as_fast_as_every_fixed_choice(block: int) -> None:
    """Five clusters by chance: it fits where any choice fits, and its batches take no longer."""
    for seed in range(9000 + 5 * block, 9000 + 5 * (block + 1)):
        case, _ = instance(seed, is_auto=True)
        auto = make_plan(case.spec, case.nodes, links=case.links)
        for choice in case.spec.train.recomputes:
            spec = replace(case.spec, train=replace(case.spec.train, recompute=choice))
            fixed = make_plan(spec, case.nodes, links=case.links)
            if isinstance(fixed, ClusterPlan):
                assert isinstance(auto, ClusterPlan), (seed, choice, auto.reason)
                # A plan gives up to 1 % for a worker less, each choice by itself.
                assert auto.predicted_batch_seconds <= 1.01 * fixed.predicted_batch_seconds, (seed, choice)
