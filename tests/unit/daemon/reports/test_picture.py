"""What a page shows of a job: curves that keep their extremes and digits, plans, failures."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.measurements import GoodputRecord
from headway.daemon.cluster.records import EventRecord, PlanRecord
from headway.daemon.jobs.changed_keys import job_text
from headway.daemon.jobs.data_choices import with_schedule
from headway.daemon.jobs.job import JobSection, JobSpec, OriginSpec
from headway.daemon.jobs.job_file import parse_job, read_job_file
from headway.daemon.reports.metrics_file import Gaps, MetricsFile, read_rows
from headway.daemon.reports.picture import MOST_PLANS, MOST_POINTS, OtherRun, picture_of, reduced, telling_rows
from headway.daemon.reports.report_page import page_html
from headway.stages.spec import AdapterSpec, ModelSpec
from tests.rigs.pictured_job import BEGAN_S, job_view, outline, rows, story

ROOT = Path(__file__).parents[4]


def test_a_reduced_curve_keeps_its_extremes() -> None:
    """A spike of one batch in a million, up and down, is still there, and so are both ends."""
    points = [(batch, 2.0 + batch % 7) for batch in range(1_000_000)]
    points[123_457] = 123_457, 99.0
    points[654_321] = 654_321, -99.0
    series = reduced(points)
    assert len(series.batches) <= MOST_POINTS
    assert {(123_457, 99.0), (654_321, -99.0), points[0], points[-1]} <= {
        *zip(series.batches, series.values, strict=True)
    }
    assert list(series.batches) == sorted(set(series.batches))


def test_a_loss_that_is_not_finite_is_kept_as_a_gap() -> None:
    """The one NaN of many batches is in the picture, as null."""
    points = [(batch, 1.0) for batch in range(5000)]
    points[2500] = 2500, float("nan")
    series = reduced(points)
    assert dict(zip(series.batches, series.values, strict=True))[2500] is None


def test_the_loss_has_each_digit_of_the_metrics_file(tmp_path: Path) -> None:
    """The text of each loss in the picture's JSON is the text in metrics.jsonl."""
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        for row in rows(300):
            metrics.append(row)
    picture = picture_of(job_view(300), {}, read_rows(tmp_path / "metrics.jsonl"), now_s=BEGAN_S)
    shown = json.loads(msgspec.json.encode(picture), parse_float=str)["series"]["loss"]["values"]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert shown == [json.loads(line, parse_float=str)["loss"] for line in lines]


def test_a_picture_tells_who_held_what_and_what_failures_cost() -> None:
    """Two failures and a join: four plans that meet without a gap, each with its cause; both failures with seconds."""
    picture = picture_of(job_view(400), {}, rows(400, num_generations=4), now_s=BEGAN_S)
    spans = [(plan.number, plan.first, plan.end, plan.is_rollback) for plan in picture.generations]
    assert spans == [(1, 0, 115, False), (2, 115, 192, True), (3, 192, 320, True), (4, 320, 400, False)]
    assert "killed by SIGKILL" in picture.generations[1].text
    assert "node-4 joined" in picture.generations[3].text
    held = [
        [(stage.first, stage.last, *(picture.devices[device] for device in stage.holders)) for stage in plan.stages]
        for plan in picture.generations
    ]
    assert held[0] == [(0, 1, "node-1"), (2, 4, "node-2"), (5, 7, "node-3")]
    assert held[2] == [(0, 3, "node-1"), (4, 7, "node-3")]
    assert [(each.batch, each.boundary, each.num_again) for each in picture.failures] == [(119, 115, 5), (199, 192, 8)]
    seconds = [row.seconds for row in rows(400)]
    unnoticed_s = 60 - 33 - sum(seconds[115:200])  # the second machine was missed so long after its last batch
    assert [each.still_s for each in picture.failures] == [3.0, pytest.approx(6.0 + unnoticed_s)]
    assert [each.batch for each in picture.events] == [0, 119, 115, 199, 192, 320]
    assert picture.failures[0].again_s == pytest.approx(sum(seconds[115:120]))


def test_a_job_that_waits_for_its_first_plan_is_drawn() -> None:
    """It has no batch, and no event of a plan; neither has one that was cancelled before it began."""
    picture = picture_of(replace(job_view(400), events={}, progress=None), {}, [], now_s=BEGAN_S)
    assert (picture.generations, picture.num_done) == ((), 0)


def test_a_failure_that_goes_on_has_no_seconds_yet() -> None:
    """Nothing has resumed after the newest failure: it is shown, without an end."""
    picture = picture_of(job_view(400, events=story(400, 8)[:4]), {}, rows(199), now_s=BEGAN_S)
    assert [each.still_s is None for each in picture.failures] == [False, True]


def test_plans_of_an_earlier_release_are_shown_without_layers() -> None:
    """Its events have no plan: the rows tell where each generation began."""
    events = (EventRecord(at=BEGAN_S, text="Training starts at batch 0", generation=1),)
    picture = picture_of(job_view(100, events=events), {}, rows(100, num_generations=2), now_s=BEGAN_S)
    assert [(plan.number, plan.first, plan.end, plan.stages) for plan in picture.generations] == [
        (1, 0, 50, ()),
        (2, 50, 100, ()),
    ]


def test_the_difference_to_another_run_is_told() -> None:
    """Equal bits are 0 in all batches; one that differs is named, with its size."""
    mine = rows(100)
    spec = job_view(100).spec
    assert spec is not None
    equal = picture_of(job_view(100), {}, mine, now_s=0.0, other=OtherRun(name="plain", rows=mine)).other
    assert equal is not None
    assert equal.sentence == "0 in all 100 batches"
    theirs = [replace(row, loss=row.loss + 0.25) if row.batch == 57 else row for row in mine[:80]]
    other = OtherRun(name="b", rows=theirs, spec=replace(spec, train=replace(spec.train, microbatches=2)))
    unlike = picture_of(job_view(100), {}, mine, now_s=0.0, other=other).other
    assert unlike is not None
    assert unlike.sentence == ("from batch 57 on, -0.25 at most (batch 57), in 1 of the 80 batches that both have")
    assert unlike.differing_keys == (f"train.microbatches: {spec.train.microbatches} here, 2 there",)


def test_equal_runs_whose_losses_end_as_nan_differ_by_nothing() -> None:
    """`non_finite = "continue"` goes on with NaN: the same run is not told to be another one."""
    mine = [replace(row, loss=float("nan")) if row.batch >= 90 else row for row in rows(100)]
    other = picture_of(job_view(100), {}, mine, now_s=0.0, other=OtherRun(name="plain", rows=mine)).other
    assert other is not None
    assert other.sentence == "0 in all 100 batches"


@pytest.mark.parametrize("path", sorted((ROOT / "docs/jobs").glob("*.toml")), ids=lambda path: path.stem)
def test_the_job_file_of_a_picture_is_the_job(path: Path) -> None:
    """What the page shows can be saved and run: it reads back as the same job."""
    spec = parse_job(path.read_text())
    assert parse_job(job_text(spec)) == spec


def test_a_value_of_every_kind_reads_back() -> None:
    """Quotes, tuples, tables in tuples and optional tables are TOML."""
    spec: JobSpec = parse_job(
        'job.name = "a"\nplacement.sites = ["x\\"y", "z"]\noptim.matrices = { name = "adamw", betas = [0.5, 0.9] }\n'
        'fault.checkpoint_dir = "s3://b/\\u00e9"\n'
        'data.sources = [{ source = "/a", weight = 0.25 }, { source = "/b", weight = 0.75 }]\n'
    )
    text = job_text(spec)
    assert parse_job(text) == spec
    assert tomllib.loads(text)["data"]["sources"][1]["weight"] == 0.75


@pytest.mark.parametrize(
    "line", ['{"batch":1}', "{", '{"batch":0,"loss":1,"learning_rate":1,"tokens":1,"seconds":1,"generation":0}']
)
def test_a_file_that_is_no_history_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    """Fields missing, no JSON, a batch for the second time."""
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        metrics.append(rows(1)[0])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_rows(tmp_path / "metrics.jsonl")


def crowd() -> tuple[Any, Any]:
    """Rows up to batch a million, 500 plans, each on 1,000 nodes in another order, sentences that name them all."""
    nodes = [f"machine-with-a-long-name-{number:04d}" for number in range(1000)]
    events = tuple(
        EventRecord(
            at=BEGAN_S + number,
            text="Training resumes on " + ", ".join(nodes),
            generation=number + 1,
            plan=outline(number * 2000, tuple(nodes[number:] + nodes[:number]), 98, timeline=1, furthest=number * 2000),
        )
        for number in range(500)
    )
    every_tenth = [replace(row, batch=10 * row.batch) for row in rows(100_000, num_generations=500)]
    return job_view(1_000_000, events=events, num_layers=98), every_tenth


@pytest.fixture(scope="module")
def crowded() -> bytes:
    """The picture of it, as JSON, compared with another run as long."""
    job, history = crowd()
    other = OtherRun(name="again", rows=history[::10], spec=job.spec)
    return msgspec.json.encode(picture_of(job, {}, history, now_s=BEGAN_S, other=other))


def test_a_million_batches_on_a_thousand_nodes_stay_below_a_megabyte(crowded: bytes) -> None:
    """With 500 plans and a second run beside it; the longest plans still have their layers."""
    assert len(crowded) < 900_000
    told = json.loads(crowded)
    assert len(told["generations"]) == 500
    assert any(plan["stages"] for plan in told["generations"])
    assert len(told["devices"]) > 100


def test_thousands_of_plans_without_events_stay_bounded() -> None:
    """Events of a job under faults for hours are gone: the longest of its plans are shown."""
    history = [replace(row, generation=1 + row.batch // 3) for row in rows(20_000)]
    picture = picture_of(job_view(20_000, events=()), {}, history, now_s=BEGAN_S)
    assert len(picture.generations) == MOST_PLANS
    assert len(msgspec.json.encode(picture)) < 500_000


def test_the_worst_of_everything_stays_below_a_megabyte() -> None:
    """Long names and sentences of two bytes a letter, plans of 98 stages, thousands of forgotten plans, every curve."""
    nodes = tuple(f"{'n' * 55}-{number:04d}" for number in range(98))
    events = tuple(
        EventRecord(
            at=BEGAN_S + number,
            text="é" * 400,
            generation=6000 + number,
            is_failure=number % 2 == 0,
            plan=outline(number * 40, nodes[number % 50 :] + nodes[: number % 50], 98, timeline=1)
            if number % 2
            else None,
        )
        for number in range(500)
    )
    history = [
        replace(row, generation=1 + row.batch // 3, eval_loss=row.loss / 3, gradient_norm=row.loss / 7)
        for row in rows(20_000)
    ]
    other = OtherRun(name="again", rows=[replace(row, loss=row.loss / 3) for row in history])
    picture = picture_of(job_view(20_000, events=events, num_layers=98), {}, history, now_s=BEGAN_S, other=other)
    assert len(page_html(picture).encode()) < 1_000_000
    assert not any(plan.stages for plan in picture.generations)
    assert len(picture.devices) == 98, "the page says that the layers were left out, for somebody held them"


def test_a_job_with_a_plug_in_reads_back() -> None:
    """Its settings are tables in the file, and the commands name the wheel that they need."""
    text = (
        'job.name = "a"\nplugins.wheel = "own.whl"\n'
        'optim.matrices = { name = "own:Sign", settings = { beta = 0.95, "a key" = "\\u007f" } }\n'
    )
    spec = parse_job(text)
    assert parse_job(job_text(spec)) == spec


def test_a_job_with_adapters_and_a_model_reads_back() -> None:
    """Its adapters are those of a folder, and keys of the config.json beside them are let go."""

    def open_model(folder: str, _ignored: Sequence[str]) -> tuple[OriginSpec, ModelSpec]:
        return OriginSpec(url="/model", adapter=folder), ModelSpec(adapter=AdapterSpec(rank=4, targets=("q_proj",)))

    spec = parse_job(
        'job.name = "a"\nmodel.from = "/adapters"\nmodel.ignore = ["a_key"]\nadapter.dropout = 0.1\n',
        open_model=open_model,
    )
    assert parse_job(job_text(spec), open_model=open_model) == spec
    assert (spec.origin.adapter, spec.model.adapter.rank, spec.origin.ignored) == ("/adapters", 4, ("a_key",))


def test_the_telling_rows_of_a_stretch_have_its_extremes() -> None:
    """A spike of a loss, of a time, and both ends."""
    history = rows(100)
    history[40] = replace(history[40], loss=99.0)
    history[60] = replace(history[60], seconds=77.0)
    kept = [row.batch for row in telling_rows(history)]
    assert {0, 40, 60, 99} <= {*kept}
    assert len(kept) <= 2 + 2 * 5


def test_rows_that_are_lost_are_told() -> None:
    """Batches 20 to 49 have none: told once, also where every tenth is asked for; evaluated ones between are no gap."""
    there = [row for row in rows(100) if not 20 <= row.batch < 50]
    for every, first, last in ((1, 20, 49), (10, 20, 40), (7, 21, 49)):
        gaps = Gaps(every=every)
        told = [gaps.before(row) for row in there if row.batch % every == 0 or row.batch % 20 == 5]
        assert [text.partition(" are lost")[0] for text in told if text] == [f"the rows of batches {first} to {last}"]
    gaps = Gaps(every=100)
    [alone] = filter(None, map(gaps.before, (row for row in rows(301) if row.batch in (0, 200, 300))))
    assert alone.startswith("the row of batch 100 is lost: ")
    job = job_view(100)
    assert picture_of(job, {}, there, now_s=0.0, lost_rows="x").lost_rows == "x"


def test_a_name_is_the_default(tmp_path: Path) -> None:
    """The shortest job has its name, and what would be computed if it were left out: read again it is the same."""
    job = JobSpec(job=JobSection(name="first"))
    (tmp_path / "first.toml").write_text(text := job_text(job))
    assert [line.partition(" ")[0] for line in text.splitlines()] == [
        *("job.name", "train.sync_batches", "optim.rest.name", "optim.rest.betas", "optim.warmup_batches")
    ]
    spec, named = read_job_file(tmp_path / "first.toml")
    assert with_schedule(spec, "first.toml", named=named) == job


def test_each_plan_has_the_seconds_that_were_spent_while_it_was_in_force() -> None:
    """Totals grow from plan to plan; seconds of waiting that a rollback calls recovery go from the plan before."""
    job = job_view(1000)
    spent = [{}, {"useful": 25.0}, {"useful": 27.0, "recovery": 1.0, "waiting": 2.0}, {"useful": 50.0, "recovery": 1.0}]
    spent += [{"useful": 50.0, "recovery": 2.0}, {"useful": 75.0, "recovery": 2.0, "bubble": 3.0}]
    events = [replace(job.events[number], goodput_s=each) for number, each in enumerate(spent)]
    job = replace(job, events=dict(enumerate(events)), phase=replace(job.phase, spent_s=spent[-1]))
    found = picture_of(job, {}, rows(1000), now_s=0.0).generations
    assert [each.goodput_s for each in found] == [
        {"useful": 27.0, "recovery": 1.0},
        {"useful": 23.0, "recovery": 1.0},
        {"useful": 25.0, "bubble": 3.0},
        {},
    ]


def test_an_event_takes_only_seconds_that_can_be_told() -> None:
    """A record names a thousand classes, and one that overflows: the event has the one that is known, and finite."""
    made_up = {f"class {number}": 1.0 for number in range(1000)}
    seconds = {"useful": 2.04, "waiting:stage 1": 1.0, "waiting:stage 2": 2.0, "idle": float("inf"), **made_up}
    plan = PlanRecord(generation=1, timeline=1, workers=())
    record = GoodputRecord(node="a", incarnation="i", seconds=seconds)
    job = replace(job_view(10), plan=plan, goodput={(1, 0): record})
    assert job.told_s == {"useful": 2.0, "waiting": 3.0}
