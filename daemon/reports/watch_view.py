"""The views of `watch`, `run` and `demo`: a live picture in a terminal, a line a second in a pipe, or JSON lines.

Every display receives the same snapshots, so that the caller need not know which display it uses.
"""

import math
import re
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from typing import IO, Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headway.daemon.base.terminal import console, fitted
from headway.daemon.cluster.cluster_records import NodeFailureRecord
from headway.daemon.cluster.records import EventRecord, NodeRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.plan.cluster_plan import layer_range, sentence
from headway.daemon.plan.link_choice import link_sentences
from headway.daemon.reports.goodput_report import goodput_line
from headway.daemon.reports.job_report import (
    NO_FASTER_PLAN,
    JobReport,
    StageReport,
    losses_and_rate,
    planning_note,
    progress_text,
    queue_note,
    report_in,
    report_line,
    time_left,
)
from headway.daemon.reports.node_list import alike, node_notes, time_of_day
from headway.daemon.reports.safety_report import safety_lines

_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def draw_curve(points: Sequence[tuple[int, float]], *, width: int, height: int, last: int = 0) -> list[str]:
    """Return lines with the curve of (batch, loss) points and its scale at the left; empty without finite points.

    width and height are characters; last: the batch at the right edge (0: the newest point).
    """
    finite = [(batch, loss) for batch, loss in points if math.isfinite(loss)]
    scale_width = 8
    columns = width - scale_width
    if not finite or columns < 2 or height < 1:
        return []
    low, high = min(loss for _, loss in finite), max(loss for _, loss in finite)
    span = high - low or 1.0
    right = max(last, max(batch for batch, _ in finite), 1)
    cells = [[0] * columns for _ in range(height)]
    for x, loss in _means(finite, right=right, num_columns=2 * columns):
        y = round((high - loss) / span * (4 * height - 1))
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    labels = [f"{high:7.3f} "] + [" " * scale_width] * (height - 2) + ([f"{low:7.3f} "] if height > 1 else [])
    return [label + "".join(chr(_BLANK + cell) for cell in row) for label, row in zip(labels, cells, strict=True)]


def _means(points: Sequence[tuple[int, float]], *, right: int, num_columns: int) -> list[tuple[int, float]]:
    """Return the mean loss of each column of dots that has points."""
    sums: dict[int, tuple[float, int]] = {}
    for batch, loss in points:
        x = min(num_columns - 1, batch * (num_columns - 1) // right)
        total, count = sums.get(x, (0.0, 0))
        sums[x] = (total + loss, count + 1)
    return [(x, total / count) for x, (total, count) in sorted(sums.items())]


STAGE_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
PHASE_COLOURS = {
    "running": "green",
    "finished": "green",
    "failed": "red",
    "cancelled": "red",
    "paused": "yellow",
    "recovering": "yellow",
}
LAYOUTS = (
    (8, True, True, 4),
    (8, False, True, 4),
    (8, False, False, 4),
    (6, False, False, 2),
    (5, False, False, 1),
    (4, False, False, 0),
    (3, False, False, 0),
    (0, False, False, 0),
)
"""Rows of the curve, whether nodes and details are listed, number of events: from a full picture to a low terminal."""
OVER = ("finished", "failed", "cancelled")
FEWEST_LOSSES = 5
"""Losses from which on a curve is drawn: a single look knows only the newest."""
PLAIN_INTERVAL_S = 1.0
ROWS_ABOVE = 2
"""Rows left free above the live picture, so that messages there (`stopping`) are seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One job in its cluster, at one moment."""

    report: JobReport
    nodes: tuple[NodeRecord, ...] = ()
    failures: Mapping[str, tuple[NodeFailureRecord, ...]] = field(default_factory=dict)
    """Recent failures by node."""
    leader: str = ""
    losses: tuple[tuple[int, float], ...] = ()
    """Known (batch, loss) pairs, oldest first."""
    events: tuple[EventRecord, ...] = ()


@dataclass(slots=True)
class LossHistory:
    """The losses of a job as far as its progress was followed. A recomputed batch replaces its old loss."""

    losses: dict[int, float] = field(default_factory=dict)

    def add(self, recent: Sequence[tuple[int, float]]) -> None:
        """Add (batch, loss) pairs that end with the newest batch: later batches, from before a rollback, go."""
        self.losses.update(recent)
        newest = recent[-1][0] if recent else None
        if newest is not None and newest < max(self.losses):
            self.losses = {batch: loss for batch, loss in self.losses.items() if batch <= newest}

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Return all pairs in the order of their batches."""
        return tuple(sorted(self.losses.items()))


def snapshot(view: ClusterView, job: str, history: LossHistory) -> Snapshot | None:
    """Return the snapshot of a job, or None while its spec is unknown. Adds the job's progress to the history."""
    found = view.jobs.get(job)
    if found is None or found.submission is None:
        return None
    if found.progress is not None:
        history.add((*found.progress.recent, (found.progress.batch, found.progress.loss)))
    return Snapshot(
        report=report_in(view, found),
        nodes=tuple(view.nodes[name] for name in sorted(view.nodes)),
        failures={name: tuple(found.values()) for name, found in view.failures.items()},
        leader=view.leader.node if view.leader else "",
        losses=history.points,
        events=tuple(found.events[number] for number in sorted(found.events)),
    )


class Display(AbstractContextManager["Display", None]):
    """Shows snapshots until its context ends."""

    def __exit__(self, *_: object) -> None:
        return

    @abstractmethod
    def show(self, snapshot: Snapshot) -> None:
        """Receive a snapshot; a display may skip some."""


def open_display(*, as_json: bool = False) -> Display:
    """Return the display that fits: JSON lines, a live picture if stdout is a terminal, otherwise plain lines."""
    if as_json:
        return JsonDisplay(sys.stdout)
    screen = console(sys.stdout)
    return LiveDisplay(screen) if screen.is_terminal else PlainDisplay(sys.stdout)


class LiveDisplay(Display):
    """Redraws in place, five times a second and in the screen's present size; the last picture stays."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._size = console.size
        self._snapshot: Snapshot | None = None
        self._live = Live(
            get_renderable=self._picture,
            console=console,
            refresh_per_second=5,
            transient=False,
            redirect_stderr=sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Draw this snapshot from now on, within a fifth of a second."""
        self._snapshot = snapshot

    def _picture(self) -> RenderableType:
        """Return the present picture. A resize has broken the lines of the last picture, so a new one starts."""
        size = self._console.size
        if size != self._size:
            self._size = size
            self._console.clear()
        if self._snapshot is None:
            return Text()
        return render(self._snapshot, width=size.width, height=size.height - ROWS_ABOVE)


class PlainDisplay(Display):
    """At most one line a second; a change of phase or generation is shown at once."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._shown_at = -PLAIN_INTERVAL_S
        self._last_line = ""
        self._last_key: tuple[str, int] | None = None
        self._pending = ""

    def __exit__(self, *_: object) -> None:
        self._write(self._pending)

    def show(self, snapshot: Snapshot) -> None:
        """Print the job's line, if it has changed and its time has come."""
        line, now = report_line(snapshot.report, now=time.time()), time.monotonic()
        key = (snapshot.report.phase, snapshot.report.generation)
        if key == self._last_key and now - self._shown_at < PLAIN_INTERVAL_S:
            self._pending = line
            return
        self._last_key, self._shown_at = key, now
        self._write(line)

    def _write(self, line: str) -> None:
        if line and line != self._last_line:
            self._stream.write(line + "\n")
            self._stream.flush()
        self._last_line, self._pending = line or self._last_line, ""


class JsonDisplay(Display):
    """One JSON object a line whenever the job's report has changed."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._last: JobReport | None = None

    def show(self, snapshot: Snapshot) -> None:
        """Print the report, if it differs from the last."""
        if snapshot.report != self._last:
            self._last = snapshot.report
            self._stream.write(msgspec.json.encode(snapshot.report).decode() + "\n")
            self._stream.flush()


def render(snapshot: Snapshot, *, width: int, height: int | None = None) -> RenderableType:
    """Return the picture of a snapshot for a console of these columns and rows; rows None: as many as it takes, with
    the arithmetic too.
    """
    screen = console(width=width)
    for layout in LAYOUTS:
        picture = _picture(snapshot, width, *layout, has_arithmetic=height is None)
        if height is None or len(screen.render_lines(picture)) <= height:
            break
    return picture


def _picture(
    snapshot: Snapshot,
    width: int,
    curve_height: int,
    has_nodes: bool,
    has_details: bool,
    num_events: int,
    *,
    has_arithmetic: bool,
) -> RenderableType:
    inner = max(20, width - 4)
    report = snapshot.report
    parts: list[RenderableType] = [_head(report), _progress(report, inner, has_details=has_details)]
    if curve_height and len(snapshot.losses) >= FEWEST_LOSSES:
        curve = draw_curve(snapshot.losses, width=inner, height=curve_height, last=report.batches - 1)
        parts += [Text(), Text("\n".join(curve), style="bright_blue", no_wrap=True)]
    if troubles := (*report.waits, *report.ailments):
        parts += [Text(), *(Text(f"warning: {trouble}", style="yellow") for trouble in troubles)]
    if pipeline := _pipeline(report, inner):
        parts += [Text(), *pipeline]
    if snapshot.nodes and has_nodes:
        parts += [Text(), _nodes(snapshot)]
    parts += [Text(), _exact(report, has_arithmetic=has_arithmetic)]
    if report.arithmetic and has_arithmetic:
        parts.append(Text(f"arithmetic: {report.arithmetic}", style="dim"))
    if report.data:
        parts.append(Text(f"data: {report.data}", style="dim"))
    if report.user and (report.priority or has_details):
        priority = f", priority {report.priority}" if report.priority else ""
        parts.append(Text(f"submitted by {report.user}{priority}", style="dim"))
    if report.parent:
        parts.append(Text(f"started from a checkpoint of {report.parent}", style="dim"))
    parts += [_safety(line) for line in safety_lines(report.safety) if has_details or not line.startswith("check")]
    if has_details:
        parts += [Text(sentence, style="dim") for sentence in link_sentences(report.links)]
    parts += _goodput(report, has_details)
    if report.no_better_plan and (has_details or report.no_better_plan != NO_FASTER_PLAN):
        parts.append(Text(f"plan kept: {report.no_better_plan}", style="dim"))
    has_newest = bool(snapshot.events) and sentence(report.reason) == snapshot.events[-1].text  # then the head has it
    events = snapshot.events[: len(snapshot.events) - has_newest]
    if events := events[max(0, len(events) - num_events) :]:
        parts += [Text(), *(_event(event) for event in events)]
    if report.error:
        parts += [Text(), Text(report.error.strip().splitlines()[-1], style="red")]
    return Panel(Group(*parts), title=f"[bold]headway[/] · {report.name}", width=width)


def _head(report: JobReport) -> Text:
    text = Text(report.phase, style=f"bold {PHASE_COLOURS.get(report.phase, 'cyan')}")
    if report.generation and report.phase not in OVER:
        text.append(f"  generation {report.generation}", style="dim")
    if place := queue_note(report):
        text.append(f"  {place}", style="dim")
    why = planning_note(report, time.time()) or report.reason or report.plan_reason
    if told := re.sub(rf"^{report.phase}(: |$)", "", why, flags=re.IGNORECASE):
        text.append(f"  {told}", style="default")
    return text


def _progress(report: JobReport, width: int, *, has_details: bool) -> RenderableType:
    done = 0 if report.batch is None else report.batch + 1
    numbers = [progress_text(report)]
    if has_details and report.provisional_from is not None and report.provisional_from < done:
        numbers.append(f"provisional from {report.provisional_from}")
    numbers += losses_and_rate(report)
    if report.seconds_left:
        numbers.append(time_left(report))
    filled = width * min(done, report.batches) // report.batches
    bar = Text("━" * filled, style="green", no_wrap=True).append("╌" * (width - filled), style="bright_black")
    return Group(bar, *(Text(line) for line in fitted(numbers, width)))


def _pipeline(report: JobReport, width: int) -> list[RenderableType]:
    """Return a bar of layers, coloured by stage, and a line for each worker."""
    lines: list[RenderableType] = []
    for title, stages in (("", report.stages), ("next: ", report.next_stages)):
        if not stages or (title and stages == report.stages):
            continue
        bar = Text(title, no_wrap=True)
        cell = max(2, (width - len(title)) // max(1, len(report.layers)))
        for _, replicas in groupby(stages, key=lambda stage: stage.index):
            lead, *others = replicas
            room = cell * len(lead.layers)
            label = " " + " + ".join(stage.node for stage in (lead, *others))
            bar.append(label.ljust(room)[:room], style=f"black on {_colour(lead)}")
        lines.append(bar)
        lines += [_stage(stage) for stage in stages]
    return lines or ([] if report.phase in OVER else [Text("no plan in force", style="dim")])


def _stage(stage: StageReport) -> Text:
    text = Text("■ ", style=_colour(stage))
    text.append(f"{stage.name}: {layer_range(stage.layers)}", style="default")
    groups = f"  groups {' '.join(map(str, stage.groups))}" if stage.num_replicas > 1 else ""
    again = f"  computes {stage.recompute} again" if stage.recompute not in ("", "none") else ""
    text.append(f"{groups}  depth {stage.depth}{again}  {stage.worker}", style="dim")
    return text


def _colour(stage: StageReport) -> str:
    return STAGE_COLOURS[stage.index % len(STAGE_COLOURS)]


def _nodes(snapshot: Snapshot) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("node", "devices", "site", ""):
        table.add_column(title, overflow="fold")
    for node in snapshot.nodes:
        devices = alike([device.model or device.kind for device in node.devices])
        failures = snapshot.failures.get(node.name, ())
        table.add_row(node.name, devices, node.site, node_notes(node, snapshot.leader, num_failures=len(failures)))
    return table


def _safety(line: str) -> Text:
    return Text(line, style="yellow" if line.startswith(("unprotected", "warning")) else "dim")


def _goodput(report: JobReport, has_details: bool) -> list[RenderableType]:
    line = goodput_line(report.goodput)
    if not line:
        return []
    why = report.goodput.why_slow if has_details else ""
    return [Text(line, style="dim"), *([Text(why)] if why else [])]


def _exact(report: JobReport, *, has_arithmetic: bool) -> Text:
    if report.exact is None:
        return Text("exact: known once there is a plan", style="dim")
    text = Text("exact: yes" if report.exact else "exact: no", style="green" if report.exact else "yellow")
    if report.exact_reason and (has_arithmetic or not report.exact):
        text.append(
            f", {report.exact_reason}"
            if report.exact_reason.startswith("because")
            else f", because {report.exact_reason}"
        )
    return text


def _event(event: EventRecord) -> Text:
    text = Text(f"{time_of_day(event.at)} " if event.at else "", style="dim")
    return text.append(event.text, style="default")
