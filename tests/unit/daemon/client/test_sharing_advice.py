"""A plan that leaves devices spare says what the job would gain if several of them shared a stage."""

from dataclasses import replace
from typing import Final

import pytest

from headway.daemon.client.preview import PlanPreview, equal_nodes, preview
from headway.daemon.jobs.job import JobSection, JobSpec, PlacementSpec
from headway.daemon.plan.connections import LinkAssumptions
from headway.stages.spec import ModelSpec, TrainSpec

JOB: Final = JobSpec(
    job=JobSection(name="wide"),
    model=ModelSpec(num_hidden_layers=2, hidden_size=1024, intermediate_size=2816, vocab_size=1024),
    train=TrainSpec(schedule="2bw", microbatches=32, microbatch_size=4, sequence_length=512),
)
"""Four layers, so at most four stages, each of which computes for seconds. Three are as fast as four."""


def planned(spec: JobSpec, num_nodes: int, links: LinkAssumptions | None = None) -> PlanPreview:
    return preview(spec, equal_nodes(num_nodes), links=links)[0]


def with_groups(number: int) -> JobSpec:
    return replace(JOB, train=replace(JOB.train, reduction_groups=number))


@pytest.mark.parametrize(("num_nodes", "groups"), [(5, 2), (8, 4), (24, 8)])
def test_the_figure_is_that_of_the_job_with_more_groups(num_nodes: int, groups: int) -> None:
    """Three workers of five, eight or 24 nodes: the groups are the next power of two of nodes for each, up to 8."""
    told, then = planned(JOB, num_nodes), planned(with_groups(groups), num_nodes)
    assert told.plan.spares
    assert told.sharing == (
        f"With reduction_groups = {groups} up to {groups} workers may share a stage: {then.tokens_per_second:,.0f} "
        f"tokens/s on {len(then.plan.workers)} workers."
    )
    spare = next(line for line in told.lines if line.startswith("Spare: "))
    assert told.lines[told.lines.index(spare) + 1] == told.sharing
    assert then.tokens_per_second > 1.05 * told.tokens_per_second
    assert not then.sharing, "the job has groups"


@pytest.mark.parametrize(
    ("spec", "num_nodes", "mbit_s"),
    [
        pytest.param(JOB, 2, 8000.0, id="no device is spare"),
        pytest.param(JOB, 24, 0.1, id="sums would take longer than batches"),
        pytest.param(replace(JOB, placement=PlacementSpec(replicas=(1, 1))), 24, 8000.0, id="the job says one each"),
        pytest.param(replace(JOB, train=replace(JOB.train, microbatches=1)), 24, 8000.0, id="one microbatch"),
    ],
)
def test_nothing_is_said_where_nothing_is_gained(spec: JobSpec, num_nodes: int, mbit_s: float) -> None:
    """The plan is silent where more groups change nothing, or cannot be."""
    assert not planned(spec, num_nodes, LinkAssumptions(site_bytes_per_s=mbit_s * 125e3)).sharing
