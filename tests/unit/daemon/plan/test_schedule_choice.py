"""`schedule = "auto"`: less of seconds a batch × batches to the same loss."""

import dataclasses
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.client.planned_job import read_planned
from headway.daemon.client.preview import equal_nodes, preview
from headway.daemon.cluster.records import NodeRecord, SpecRecord
from headway.daemon.decide.admission import why_refused
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.plan.schedule_choice import check_named, more_batches, with_chosen_schedule
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.spec import ModelSpec, ScheduleName, TrainSpec

JOB = JobSpec(
    job=JobSection(name="open"),
    model=ModelSpec(num_hidden_layers=8, hidden_size=256, intermediate_size=688),
    train=TrainSpec(schedule="auto", microbatches=4),
)


def seconds(schedule: ScheduleName, spec: JobSpec, nodes: tuple[NodeRecord, ...]) -> float:
    train = dataclasses.replace(spec.train, schedule=schedule)
    return preview(dataclasses.replace(spec, train=train), nodes)[0].plan.predicted_batch_seconds


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 16, 64, 512])
@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_the_schedule_that_is_sooner_at_the_same_loss(microbatches: int, number: int, matrices: str) -> None:
    """Whatever the bubble: one stage has none, and many microbatches hide it."""
    train, optim = (
        dataclasses.replace(JOB.train, microbatches=microbatches),
        OptimSpec(matrices=GroupSpec(name=matrices)),
    )
    job, nodes = dataclasses.replace(JOB, train=train, optim=optim), equal_nodes(number)
    chosen, why = with_chosen_schedule(job, nodes)
    ratio = seconds("2bw", job, nodes) * more_batches(job) / seconds("1f1b", job, nodes)
    assert chosen.train.schedule == ("2bw" if ratio < 1 else "1f1b")
    assert why.startswith(f"Schedule: {chosen.train.schedule}. ")
    assert f"2bw is there in {ratio:.2f} times" in why
    assert dataclasses.replace(chosen, train=train) == job
    assert with_chosen_schedule(chosen, nodes) == (chosen, "")


def test_batches_without_delay_count_as_those_of_1f1b() -> None:
    """They go with the schedule that has a delay, and are in its seconds."""
    nodes = equal_nodes(4)
    job = dataclasses.replace(JOB, train=dataclasses.replace(JOB.train, batches=100, sync_batches=25))
    job = dataclasses.replace(job, placement=dataclasses.replace(job.placement, replicas=(1,) * 4))
    chosen, why = with_chosen_schedule(job, nodes)
    fresh, stale = (seconds(each, dataclasses.replace(job, train=JOB.train), nodes) for each in ("1f1b", "2bw"))
    assert f"{more_batches(job) * (0.25 * fresh + 0.75 * stale) / fresh:.2f} times" in why
    assert (chosen.train.schedule, chosen.train.sync_batches) == ("2bw", 25)
    alone, _ = with_chosen_schedule(dataclasses.replace(job, placement=JOB.placement), equal_nodes(1))
    assert (alone.train.schedule, alone.train.sync_batches) == ("1f1b", 0)


@pytest.mark.parametrize("matrices", ["muon", "adamw", "soap", "lion"])
def test_each_remedy_saves_batches(matrices: str) -> None:
    """And so does a longer run, or one that begins with trained weights."""

    def more(alpha: float, sync: int, batches: int = 1000, url: str = "") -> float:
        optim = OptimSpec(matrices=GroupSpec(name=matrices), error_feedback=alpha)
        train = dataclasses.replace(JOB.train, batches=batches, sync_batches=sync)
        origin = dataclasses.replace(JOB.origin, url=url)
        return more_batches(dataclasses.replace(JOB, optim=optim, train=train, origin=origin))

    assert more(0.0, 100) == more(0.0, 0) >= more(1.0, 0) >= more(1.0, 100) > 1
    assert more(1.0, 10) == more(1.0, 0)
    assert more(1.0, 40, batches=400) > more(1.0, 100) >= more(1.0, 40, batches=400, url="model") > 1


def test_both_are_chosen_somewhere() -> None:
    """One stage has no bubble to save; eight in a row with one microbatch each do little else than wait."""
    alone, row = equal_nodes(1), equal_nodes(4)
    few = dataclasses.replace(JOB, train=dataclasses.replace(JOB.train, microbatches=4))
    assert with_chosen_schedule(few, alone)[0].train.schedule == "1f1b"
    one_each = dataclasses.replace(few, placement=dataclasses.replace(few.placement, replicas=(1,) * 4))
    assert with_chosen_schedule(one_each, row)[0].train.schedule == "2bw"


def test_a_plan_says_why_and_what_does_not_fit_is_said() -> None:
    """The sentence is one of the plan's facts; without a plan the job waits for nodes under the default."""
    told, _ = preview(JOB, equal_nodes(2))
    assert told.schedule_reason in told.lines
    assert told.schedule_reason.startswith(f"Schedule: {told.schedule}. ")
    chosen, why = with_chosen_schedule(JOB, equal_nodes(2, memory_bytes=1 << 20))
    assert (chosen.train.schedule, why) == ("2bw", "Schedule: 2bw, because no plan fits these nodes.")


def test_an_open_schedule_is_refused_where_nobody_can_choose() -> None:
    """By the plain loop, which has no nodes, and in a record of a cluster."""
    with pytest.raises(ConfigError, match=r"job.toml:train.schedule: \"auto\" is chosen for the nodes of a cluster"):
        check_named([JOB], "job.toml")
    check_named([with_chosen_schedule(JOB, equal_nodes(1))[0]], str(Path()))
    record = SpecRecord(spec=JOB, uid="u", submitted_by="", submitted_at=0.0)
    assert why_refused(record, "open").startswith("train.schedule: ")


@pytest.mark.parametrize("more", ["", 'schedule = "auto"\n'])
def test_a_plan_without_the_data_has_the_batches_without_delay_that_submit_would_have(
    tmp_path: Path, more: str
) -> None:
    """The built-in data need not be read for them. Where epochs have to be counted they are not known."""
    job = tmp_path / "job.toml"
    job.write_text(f'[job]\nname = "open"\n[train]\n{more}batches = 80\n')
    assert read_planned(job, warn=print)[0].train.sync_batches == 8
    job.write_text(f'[job]\nname = "open"\n[data]\nsource = "https://far.example/data"\n[train]\n{more}epochs = 2\n')
    assert read_planned(job, warn=print)[0].train.sync_batches == 0
