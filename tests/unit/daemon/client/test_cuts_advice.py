"""A plan whose stages on cards are uneven says what the job would gain by cuts inside blocks."""

from dataclasses import replace
from typing import Final

import pytest

from headway.daemon.client.preview import PlanPreview, preview
from headway.daemon.cluster.records import Device
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.stages.spec import ModelSpec, TrainSpec
from tests.rigs.clusters import node
from tests.rigs.pipeline import with_blocks

CARD: Final = Device(kind="cuda", memory_gb_s=2800.0)
JOB: Final = JobSpec(
    job=JobSection(name="uneven"),
    model=ModelSpec(num_hidden_layers=5, hidden_size=1024, intermediate_size=2816, vocab_size=1024),
    train=TrainSpec(schedule="2bw", microbatches=32, microbatch_size=4, sequence_length=2048, dtype="bfloat16"),
)
"""Five large blocks: of two cards one has three of them."""


def planned(spec: JobSpec, device: Device = CARD) -> PlanPreview:
    """The plan on two devices of one machine."""
    return preview(spec, [replace(node("a"), devices=tuple(replace(device, index=index) for index in range(2)))])[0]


def test_the_figure_is_that_of_the_job_with_cuts_inside_blocks() -> None:
    """Behind the line on the slowest stage; a job that has them is told nothing."""
    told, then = planned(JOB), planned(with_blocks(JOB, are_split=True))
    figure = f"{then.tokens_per_second:,.0f} tokens/s"
    assert told.cuts == f"With split_blocks = true a stage may end inside a block: {figure}."
    pace = next(line for line in told.lines if "sets the pace" in line)
    assert told.lines[told.lines.index(pace) + 1] == told.cuts
    assert then.tokens_per_second > 1.05 * told.tokens_per_second
    assert not then.cuts


@pytest.mark.parametrize(
    ("spec", "device"),
    [
        pytest.param(JOB, Device(kind="cpu"), id="CPUs"),
        pytest.param(JOB.with_values({"model.num_hidden_layers": 4}), CARD, id="two blocks on each card"),
        pytest.param(JOB.with_values({"train.wire": "bf16"}), CARD, id="coded links"),
    ],
)
def test_nothing_is_said_where_nothing_is_gained_or_possible(spec: JobSpec, device: Device) -> None:
    """Stages are even, or halves do not go with the job; between CPUs no figure is told."""
    assert not planned(spec, device).cuts
