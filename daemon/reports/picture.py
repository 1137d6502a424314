"""Everything that a page shows of a job: its curves, who held which layers, what failures cost. Pure.

A picture is one JSON document of bounded size: curves keep the least and the greatest of each stretch, and where a
cluster changed more often than a screen has columns, the shortest plans lose their layers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Final

import msgspec

from headway.daemon.base.terminal import counted
from headway.daemon.cluster.lineage import PlanOutline
from headway.daemon.cluster.records import EventRecord, NodeRecord
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.changed_keys import job_text, values_of
from headway.daemon.jobs.job import JobSpec
from headway.daemon.reports.goodput_report import goodput_of_plans
from headway.daemon.reports.job_report import JobReport, report_job
from headway.daemon.reports.metrics_file import HistoryRow
from headway.daemon.reports.pipeline_picture import MeasuredPipeline, kind_of
from headway.stages.schedule.operations import BatchOp

MOST_POINTS: Final = 2000
"""Points of a curve."""
MOST_CELLS: Final = 12_000
"""Stages, and holders of stages, over all plans."""
MOST_HOLDERS: Final = 8
"""Named holders of a stage; the others are counted."""
MOST_BYTES: Final = 850_000
"""Bytes of a picture as JSON; the page around it has another 90,000."""
SHORT_TEXT: Final = 60
"""Characters of a sentence of a picture that would be larger."""
MOST_PLANS: Final = 600
"""Plans; the shortest are left out."""
MOST_TEXT: Final = 240
"""Characters of a sentence: one may name a thousand nodes."""
MOST_NAME: Final = 64
MOST_FILE: Final = 60_000
"""Characters of the job file."""
TOLD_WITHIN_S: Final = 8.0
"""A link that goes on is told of within so long."""
MOST_OPERATIONS: Final = 2500
MOST_WORKERS: Final = 40
"""Workers whose operations are drawn."""
CURVES: Final = ("loss", "eval_loss", "final_eval_loss", "learning_rate", "gradient_norm")
"""Fields of a row that are drawn as they are."""


class Series(msgspec.Struct, frozen=True):
    """A curve: values by batch, rising. None: not finite."""

    batches: tuple[int, ...] = ()
    values: tuple[float | None, ...] = ()


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """Layers from `first` to `last`, by index, and who held them."""

    first: int
    last: int
    holders: tuple[int, ...]
    """Indexes of devices, the lead first, at most `MOST_HOLDERS`."""
    num_others: int = 0
    """Holders that are not named."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was in force, from its first batch up to that of the next one."""

    number: int
    first: int
    """First batch."""
    end: int
    """First batch after it; at most `first`: a failure undid all of it."""
    furthest: int = 0
    """Batches from `first` to before this one had been begun before: they were computed again."""
    at_s: float = 0.0
    text: str = ""
    """Sentence of its cause."""
    is_rollback: bool = False
    predicted_tokens_per_s: float | None = None
    stages: tuple[Stage, ...] = ()
    """Empty: not known, or left out for its shortness."""
    goodput_s: dict[str, float] = {}
    """Seconds of its workers by class; empty: not known."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An interruption of the training."""

    at_s: float
    batch: int
    """Newest batch that was begun."""
    boundary: int
    """Where the training resumed."""
    text: str
    still_s: float | None
    """Seconds in which no batch was computed, from the fault until the training resumed; None: it has not."""
    again_s: float | None
    """Seconds in which the same batches were computed again; None: not all of them have been."""

    @property
    def num_again(self) -> int:
        """Return the number of batches that were computed again."""
        return max(self.batch + 1 - self.boundary, 0)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence, and where the cursor goes for it."""

    at_s: float
    batch: int
    text: str
    kind: str
    """`plan`, `failure`, `note`, or `other`."""


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers did in the last batches."""

    first_batch: int
    last_batch: int
    batch_s: float
    window_s: float
    workers: tuple[str, ...]
    operations: tuple[tuple[int, str, int, int, float, float], ...]
    """(worker, kind, batch, microbatch or -1, began, took), in seconds."""


class Other(msgspec.Struct, frozen=True, kw_only=True):
    """A second run of the job, or another job, to compare with."""

    name: str
    loss: Series
    eval_loss: Series
    difference: Series
    """Loss minus the other's, where both have the batch."""
    sentence: str
    differing_keys: tuple[str, ...] = ()
    """`key: value here, value there`"""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """A job, drawn."""

    schema: int = 1
    job: str
    phase: str
    num_batches: int
    """Batches that the job has in all."""
    num_done: int
    """Batches whose loss is known."""
    at_s: float
    """When the picture was made; seconds since the epoch."""
    is_exact: bool | None
    exact_reason: str
    user: str
    layers: tuple[str, ...]
    devices: tuple[str, ...]
    """`node`, or `node:1` for a device that is not the first."""
    series: dict[str, Series]
    """Curves by name: those of `CURVES` that have values, and `tokens_per_s`."""
    generations: tuple[Generation, ...]
    failures: tuple[Failure, ...]
    cuts: tuple[Failure, ...] = ()
    """Links that were cut and went on: nothing was computed again."""
    events: tuple[Event, ...]
    goodput_s: dict[str, float]
    """Seconds of all workers by class."""
    pipeline: Pipeline | None
    why_no_pipeline: str
    lost_rows: str = ""
    """Which batches have no rows any more, and why."""
    job_file: str
    job_hash: str
    """SHA-256 of the whole job file: equal for equal jobs, also in a later release with more keys."""
    arithmetic_classes: tuple[str, ...]
    arithmetic: str
    checkpoints: tuple[str, ...]
    """Folders, newest first."""
    commands: tuple[str, ...]
    """They give these bits again."""
    other: Other | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRun:
    """What a picture is compared with."""

    name: str
    rows: Sequence[HistoryRow]
    spec: JobSpec | None = None


def picture_of(
    job: JobView,
    nodes: Mapping[str, NodeRecord],
    rows: Sequence[HistoryRow],
    *,
    now_s: float,
    pipeline: tuple[Sequence[str], MeasuredPipeline] | None = None,
    why_no_pipeline: str = "",
    lost_rows: str = "",
    other: OtherRun | None = None,
) -> Picture:
    """Return the picture of a job whose spec is known.

    rows: its history from the beginning, rising. pipeline: names of the workers and what they did.
    """
    spec = job.spec
    assert spec is not None, "a job without its spec is not shown"
    report = report_job(job, nodes)
    records = [job.events[number] for number in sorted(job.events)]
    num_done = max(rows[-1].batch + 1 if rows else 0, (report.batch if report.batch is not None else -1) + 1)
    devices: dict[str, int] = {}
    generations = _generations(records, rows, spec, devices, num_done, goodput_of_plans(job))
    drawn = Picture(
        job=job.name,
        phase=report.phase,
        num_batches=spec.train.batches,
        num_done=num_done,
        at_s=now_s,
        is_exact=report.exact,
        exact_reason=report.exact_reason,
        user=report.user,
        layers=spec.layers,
        devices=tuple(devices),
        series=series_of(rows),
        generations=tuple(generations),
        failures=tuple(_failures(records, rows)),
        cuts=tuple(_cuts(records, rows)),
        events=tuple(_events(records, generations)),
        goodput_s=report.goodput.seconds,
        pipeline=_pipeline(*pipeline) if pipeline is not None else None,
        why_no_pipeline=why_no_pipeline,
        lost_rows=_cut(lost_rows),
        job_file=_cut(job_text(spec), MOST_FILE),
        job_hash=sha256(job_text(spec).encode()).hexdigest(),
        arithmetic_classes=_classes(job),
        arithmetic=report.arithmetic,
        checkpoints=(job.checkpoint.url, *job.checkpoint.earlier) if job.checkpoint is not None else (),
        commands=_commands(report, spec),
        other=_compared(rows, spec, other) if other is not None else None,
    )
    return _bounded(drawn)


def _bounded(picture: Picture) -> Picture:
    """Return a picture of at most `MOST_BYTES`: without layers, then with short sentences, if it is larger."""
    change = msgspec.structs.replace
    if len(msgspec.json.encode(picture)) > MOST_BYTES:
        plans = tuple(change(each, stages=(), text=_cut(each.text, SHORT_TEXT)) for each in picture.generations)
        picture = change(picture, generations=plans)
    if len(msgspec.json.encode(picture)) > MOST_BYTES:
        events = tuple(change(each, text=_cut(each.text, SHORT_TEXT)) for each in picture.events)
        shorter = {
            name: tuple(change(each, text=_cut(each.text, SHORT_TEXT)) for each in getattr(picture, name))
            for name in ("failures", "cuts")
        }
        picture = change(picture, events=events, **shorter)
    return picture


def with_other(picture: Picture, rows: Sequence[HistoryRow], other: OtherRun) -> Picture:
    """Return a picture with what is known after its cluster is gone; rows: its own."""
    return _bounded(msgspec.structs.replace(picture, other=_compared(rows, None, other)))


def series_of(rows: Sequence[HistoryRow]) -> dict[str, Series]:
    """Return the curves that have values."""
    found = {}
    for name in CURVES:
        points = [(row.batch, value) for row in rows if (value := getattr(row, name, None)) is not None]
        if points:
            found[name] = reduced(points)
    rates = [(row.batch, float(f"{row.tokens / row.seconds:.5g}")) for row in rows if row.seconds > 0]
    return found | ({"tokens_per_s": reduced(rates)} if rates else {})


def reduced(points: Sequence[tuple[int, float]], *, most: int = MOST_POINTS) -> Series:
    """Return at most so many of the points: the first, the last, and the least and the greatest of each stretch."""
    kept: Iterable[tuple[int, float]] = points
    if len(points) > most:
        num = most // 2 - 1
        edges = [1 + index * (len(points) - 2) // num for index in range(num + 1)]
        inner = [point for begin, end in pairwise(edges) for point in _extremes(points[begin:end])]
        kept = (points[0], *inner, points[-1])
    batches, values = zip(*kept, strict=True) if points else ((), ())
    return Series(batches, tuple(value if math.isfinite(value) else None for value in values))


def telling_rows(rows: Sequence[HistoryRow]) -> list[HistoryRow]:
    """Return the rows of a stretch that have the least or the greatest of a curve, its first and its last."""
    if len(rows) <= 2 * len(CURVES):
        return list(rows)
    kept = {rows[0].batch, rows[-1].batch}
    for name in (*CURVES, "seconds"):
        points = [(row.batch, value) for row in rows if (value := getattr(row, name)) is not None]
        kept |= {batch for batch, _ in _extremes(points)} if points else set()
    return [row for row in rows if row.batch in kept]


def _extremes(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the least and the greatest, in their order; a value that is not finite counts as the greatest."""
    least = min(points, key=lambda point: point[1] if math.isfinite(point[1]) else math.inf)
    greatest = max(points, key=lambda point: point[1] if math.isfinite(point[1]) else math.inf)
    return sorted({least[0]: least, greatest[0]: greatest}.values())


def _generations(
    records: Sequence[EventRecord],
    rows: Sequence[HistoryRow],
    spec: JobSpec,
    devices: dict[str, int],
    num_done: int,
    goodput: Mapping[int, dict[str, float]],
) -> list[Generation]:
    """Return the plans in the order in which they were in force; devices: gets the index of each."""
    told: dict[int, Generation] = {}
    cause = ""
    tokens = spec.train.tokens_per_batch
    outlines: dict[int, PlanOutline] = {}
    for record in records:
        if record.is_failure and not cause:
            cause = record.text
        if (plan := record.plan) is None:
            continue
        outlines[record.generation] = plan
        told[record.generation] = Generation(
            number=record.generation,
            first=plan.boundary,
            end=num_done,
            furthest=plan.furthest,
            at_s=record.at,
            text=_cut(cause or record.text),
            is_rollback=plan.timeline == record.generation and bool(told),
            predicted_tokens_per_s=tokens / plan.predicted_batch_seconds if plan.predicted_batch_seconds > 0 else None,
        )
        cause = ""
    for row in rows:  # plans whose events are gone, or were written by an earlier release
        if row.generation not in told:
            told[row.generation] = Generation(number=row.generation, first=row.batch, end=num_done)
    ordered = [told[number] for number in sorted(told)]
    ends = [*(each.first for each in ordered), num_done][1:]
    spans = [
        msgspec.structs.replace(each, end=end, goodput_s=goodput.get(each.number, {}))
        for each, end in zip(ordered, ends, strict=True)
    ]
    shown = {each.number for each in sorted(spans, key=lambda each: each.first - each.end)[:MOST_PLANS]}
    return _with_stages([each for each in spans if each.number in shown], outlines, devices)


def _with_stages(
    spans: Sequence[Generation], outlines: Mapping[int, PlanOutline], devices: dict[str, int]
) -> list[Generation]:
    """Return the generations with their layers, the longest first as far as `MOST_CELLS` goes."""
    left = MOST_CELLS
    stages: dict[int, tuple[Stage, ...]] = {}
    for each in sorted(spans, key=lambda each: (each.first - each.end, -each.number)):
        outline = outlines.get(each.number)
        if outline is None:
            continue
        left -= sum(1 + min(len(stage.holders), MOST_HOLDERS) for stage in outline.stages)
        if left < 0:
            break
        stages[each.number] = ()
    for number in sorted(stages):
        stages[number] = tuple(
            Stage(
                stage.first,
                stage.last,
                tuple(devices.setdefault(_device(*holder), len(devices)) for holder in stage.holders[:MOST_HOLDERS]),
                max(len(stage.holders) - MOST_HOLDERS, 0) + stage.num_others,
            )
            for stage in outlines[number].stages
        )
    return [msgspec.structs.replace(each, stages=stages.get(each.number, ())) for each in spans]


def _device(node: str, index: int) -> str:
    return _cut(f"{node}:{index}" if index else node, MOST_NAME)


def _failures(records: Sequence[EventRecord], rows: Sequence[HistoryRow]) -> list[Failure]:
    """Return the interruptions, oldest first; one that meets another's recovery is part of it."""
    found: list[Failure] = []
    began: EventRecord | None = None
    before: EventRecord | None = None
    for record in records:
        if record.is_failure and began is None:
            began = record
        if record.plan is not None:
            if began is not None:
                found.append(_failure(before, began, record, record.plan, rows))
            before, began = record, None
    if began is not None:
        batch = rows[-1].batch if rows else 0
        found.append(
            Failure(at_s=began.at, batch=batch, boundary=batch + 1, text=_cut(began.text), still_s=None, again_s=None)
        )
    return found


def _failure(
    before: EventRecord | None, began: EventRecord, ended: EventRecord, plan: PlanOutline, rows: Sequence[HistoryRow]
) -> Failure:
    """Return what a failure cost; before: the plan that it struck.

    A fault is told of after somebody has missed its victim, so the seconds before that in which the struck plan
    computed nothing count too.
    """
    unnoticed_s = 0.0
    if before is not None and before.plan is not None:
        worked_s = _seconds_of(rows, before.plan.boundary, plan.furthest)
        unnoticed_s = max(began.at - before.at - worked_s, 0.0)
    is_whole = not rows or rows[-1].batch + 1 >= plan.furthest
    return Failure(
        at_s=began.at,
        batch=max(plan.furthest - 1, 0),
        boundary=plan.boundary,
        text=_cut(began.text),
        still_s=unnoticed_s + max(ended.at - began.at, 0.0),
        again_s=_seconds_of(rows, plan.boundary, plan.furthest) if is_whole else None,
    )


def _cuts(records: Sequence[EventRecord], rows: Sequence[HistoryRow]) -> list[Failure]:
    """Return what links cost that were cut and went on: at most the cut, and what the batches of that time took longer
    than most of their plan.
    """
    found = []
    for record in records:
        cut_s = max((cuts.cut_s for cuts in record.cuts if cuts.num_back >= cuts.num_cut), default=0.0)
        if not cut_s:
            continue
        own = [row for row in rows if row.generation == record.generation]
        took = sorted(row.seconds for row in own)
        usual_s = took[len(took) // 2] if took else 0.0
        first = record.batch - (cut_s + TOLD_WITHIN_S) / max(usual_s, 1e-3)
        longer_s = sum(max(row.seconds - usual_s, 0.0) for row in own if first <= row.batch <= record.batch + 1)
        still_s = min(cut_s, longer_s) if took else cut_s
        at_s, batch, text = record.at, record.batch, _cut(record.text)
        found.append(Failure(at_s=at_s, batch=batch, boundary=batch + 1, text=text, still_s=still_s, again_s=0.0))
    return found


def _seconds_of(rows: Sequence[HistoryRow], first: int, end: int) -> float:
    """Return the seconds that batches took; some rows may be left out of a long history."""
    found = [row.seconds for row in rows if first <= row.batch < end and row.seconds > 0]
    return sum(found) / len(found) * (end - first) if found else 0.0


def _events(records: Sequence[EventRecord], generations: Sequence[Generation]) -> list[Event]:
    """Return the coordinator's sentences, each at the batch where it belongs."""
    first = {each.number: each.first for each in generations}
    furthest = {each.number: each.furthest for each in generations}
    found = []
    batch = 0
    told = set[tuple[int, int]]()  # links whose cut has been told of, and not their return
    for record in records:
        ends = {cuts.ends for cuts in record.cuts}
        is_cut = not ends <= told
        told = (told - ends) | {cuts.ends for cuts in record.cuts if cuts.num_back < cuts.num_cut}
        if record.plan is not None:
            batch, told = record.plan.boundary, set()
        elif record.is_failure:
            batch = max(furthest.get(record.generation, 1) - 1, 0)
        else:
            batch = max(batch, first.get(record.generation, 0), record.batch)
        kind = "failure" if record.is_failure else "note" if is_cut else "other"
        kind = "plan" if record.plan is not None else kind
        found.append(Event(at_s=record.at, batch=batch, text=_cut(record.text), kind=kind))
    return found


def _pipeline(names: Sequence[str], measured: MeasuredPipeline) -> Pipeline:
    shown = [done for done in measured.timeline if done.stage < MOST_WORKERS][:MOST_OPERATIONS]
    return Pipeline(
        first_batch=measured.first_batch,
        last_batch=measured.last_batch,
        batch_s=measured.step_seconds,
        window_s=min(measured.window[1], max((done.ended for done in shown), default=0.0)),
        workers=tuple(_cut(name, MOST_NAME) for name in names[:MOST_WORKERS]),
        operations=tuple(
            (
                done.stage,
                kind_of(done),
                done.op.batch,
                -1 if isinstance(done.op, BatchOp) else done.op.microbatch,
                round(done.started, 6),
                round(done.ended - done.started, 6),
            )
            for done in sorted(shown, key=lambda done: done.started)
        ),
    )


def _classes(job: JobView) -> tuple[str, ...]:
    told = job.plan or job.next or job.checkpoint
    return told.arithmetic_classes if told is not None else job.phase.arithmetic_classes


def _commands(report: JobReport, spec: JobSpec) -> tuple[str, ...]:
    """Return the commands that compute the same bits from the job file below."""
    wheel = (f"# with the plug-in of SHA-256 {spec.plugins.sha256} in its place",) if spec.plugins.sha256 else ()
    cuts = f" --coded-cuts {','.join(report.coded_cuts)}" if report.coded_cuts else ""
    name = report.name
    return (
        *wheel,
        f"headway reference {name}.toml --out plain{cuts}",
        f"headway run {name}.toml --nodes 2 --out again",
    )


def _compared(rows: Sequence[HistoryRow], spec: JobSpec | None, other: OtherRun) -> Other:
    theirs = {row.batch: row for row in other.rows}
    pairs = [(row.batch, _less(row.loss, theirs[row.batch].loss)) for row in rows if row.batch in theirs]
    series = series_of(other.rows)
    return Other(
        name=_cut(other.name, MOST_NAME),
        loss=series.get("loss", Series()),
        eval_loss=series.get("eval_loss", Series()),
        difference=reduced(pairs),
        sentence=_difference(pairs, len(rows)),
        differing_keys=_differing_keys(spec, other.spec) if spec is not None and other.spec is not None else (),
    )


def _less(loss: float, other: float) -> float:
    """Return a difference; 0 of two that are not finite, which metrics files do not tell apart."""
    return loss - other if math.isfinite(loss) or math.isfinite(other) else 0.0


def _difference(pairs: Sequence[tuple[int, float]], num_rows: int) -> str:
    """Return `0 in all 400 batches`, or where the losses part."""
    if not pairs:
        return "they have no batch in common"
    differing = [(batch, value) for batch, value in pairs if value != 0.0]
    told = counted(len(pairs), "batch")
    all_of = f"all {told}" if len(pairs) == num_rows else f"the {told} that both have"
    if not differing:
        return f"0 in {all_of}"
    batch, most = max(differing, key=lambda pair: abs(pair[1]))
    return f"from batch {differing[0][0]} on, {most:+.3g} at most (batch {batch}), in {len(differing)} of {all_of}"


def _differing_keys(spec: JobSpec, other: JobSpec) -> tuple[str, ...]:
    ours, theirs = values_of(spec), values_of(other)
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return tuple(_cut(f"{key}: {ours.get(key, 'absent')} here, {theirs.get(key, 'absent')} there") for key in keys)


def _cut(text: str, most: int = MOST_TEXT) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
