"""Commands about jobs that a cluster has."""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headway.daemon.base.errors import StoreUnreachableError
from headway.daemon.base.terminal import console, counted, screen_width, table
from headway.daemon.cli.options import (
    Answer,
    AsJson,
    AsJsonLines,
    Commands,
    JobName,
    OutDir,
    Panel,
    Where,
    add,
    add_group,
    as_json_text,
    draw_over,
    say,
    warn,
)

if TYPE_CHECKING:
    from headway.daemon.base.addresses import NodeEndpoint
    from headway.daemon.client.cluster_access import ClusterAddress, ClusterSession
    from headway.daemon.reports.goodput_report import GoodputReport
    from headway.daemon.reports.job_report import JobReport
    from headway.daemon.reports.metrics_file import HistoryRow
    from headway.daemon.reports.watch_view import Snapshot

WAIT_TIMEOUT_S = 1200.0
"""Maximum wait of --wait. A job may need this long because workers first compile."""
NO_JOBS = "no jobs; `headway submit JOB.toml` makes one"

Wait = Annotated[bool, typer.Option("--wait", help="Wait until the job has reached its new phase.")]


def register(app: Commands) -> None:
    """Add the commands."""
    add(add_group(app, "jobs", jobs, panel=Panel.LOOK, is_command=True), remove, name="rm")
    add(app, status, watch, history, report, events, logs, trace, panel=Panel.LOOK)
    add(app, pause, resume, cancel, export, panel=Panel.JOB)


def jobs(context: typer.Context, where: Where, as_json: AsJson = False) -> Answer:
    """List jobs in the order of their submission; `jobs rm JOB` forgets a job that is over.

    \b
    headway jobs --json
    """
    if context.invoked_subcommand is not None:
        return None
    from headway.daemon.reports.job_report import reports_in, why_now
    from headway.daemon.reports.node_list import date_and_time, retired_line, vanished_jobs

    view = where.view()
    reports = reports_in(view, view.jobs_in_order())
    for name, text in vanished_jobs(view).items():
        warn(f"job {name}: {text}")
    if as_json:
        return as_json_text(reports)
    rows = [
        (
            report.name,
            report.user,
            str(report.priority),
            report.phase,
            f"{0 if report.batch is None else report.batch + 1}/{report.batches}",
            "" if report.loss is None else f"{report.loss:.4f}",
            date_and_time(report.submitted_at),
            " · ".join(why_now(report)),
        )
        for report in reports
    ]
    titles = ("job", "user", "priority", "phase", "batches", "loss", "submitted", "why")
    retired = [retired_line(len(view.retired))] if view.retired else []
    return [*(table(titles, rows, screen_width=screen_width()) if rows else [NO_JOBS]), *retired]


def remove(job: JobName, where: Where) -> Answer:
    """Forget a job that is finished, failed, cancelled or paused. Its checkpoints stay.

    \b
    headway jobs rm my-job
    """
    from headway.daemon.client import job_requests

    return where.run(lambda session: job_requests.remove(session, job))


def status(
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="The job's name; every job when not given.")] = "",
    daemon: Annotated[
        str, typer.Option("--daemon", metavar="HOST:PORT", help="Ask this daemon instead of etcd.", show_default=False)
    ] = "",
    *,
    where: Where,
    as_json: AsJson = False,
) -> Answer:
    """Show a job's phase, its layers by node, its loss, what a failure would cost, and why it is slow.

    While etcd is away, the command asks daemons: those of a local cluster, or those that this user's commands last saw
    in the cluster. --daemon names another daemon.

    \b
    boundary    the state after a number of batches; its number is that number of batches
    generation  number of the plan in force; every change of plan takes the next
    timeline    the generation that began with the last rollback; state of two timelines is never mixed
    depth       maximum number of microbatches that a stage has begun and not ended
    restorable  every layer of the boundary lies on as many nodes as the job wants copies

    \b
    headway status my-job --json
    """
    from headway.daemon.base.addresses import NodeEndpoint
    from headway.daemon.client import cluster_access

    if daemon:
        folder = where.certs or (Path(told) if (told := os.environ.get("HEADWAY_CERTS")) else where.find().certificates)
        address = cluster_access.ClusterAddress(etcd=(), certificates=folder)
        return _status_of_daemons(address, job, as_json=as_json, daemons=[NodeEndpoint("", daemon)])
    try:
        return _status(job, where, as_json=as_json)
    except StoreUnreachableError:
        address = where.find()
        daemons = [NodeEndpoint("", told) for told in address.daemons] or cluster_access.known(address.etcd)
        if not daemons:
            raise
        return _status_of_daemons(address, job, as_json=as_json, daemons=daemons)


def _status(job: str, where: Where, *, as_json: bool) -> Answer:
    """Return the answer from etcd's records."""
    from headway.daemon.client.job_requests import job_of
    from headway.daemon.reports.job_report import report_in, reports_in
    from headway.daemon.reports.node_list import set_aside_lines
    from headway.daemon.reports.watch_view import LossHistory, snapshot

    view = where.view()
    if not job:
        reports = reports_in(view, view.jobs_in_order())
        return as_json_text(reports) if as_json else [*_lines_of(reports), *set_aside_lines(view)]
    found = job_of(view, job)
    if as_json:
        return as_json_text(report_in(view, found))
    shown = snapshot(view, job, LossHistory())
    assert shown is not None
    _draw(shown)
    return set_aside_lines(view, job=job)


def _status_of_daemons(
    address: "ClusterAddress", job: str, *, as_json: bool, daemons: "Sequence[NodeEndpoint]"
) -> Answer:
    """Return the answer of the first daemon that answers."""
    import asyncio

    from headway.daemon.client import job_requests
    from headway.daemon.reports.watch_view import Snapshot

    told = asyncio.run(job_requests.ask_daemons(daemons, address.identity()))
    reports = [told.report(job)] if job else [told.report(name) for name in told.jobs]
    if as_json:
        etcd = {"reachable": told.etcd_reachable, "away_s": told.etcd_away_s, "waits_for": told.waits_for}
        return as_json_text({"asked": told.node, "etcd": etcd, "jobs": reports})
    if not job:
        return [told.line, *_lines_of(reports)]
    say(told.line)
    _draw(Snapshot(report=reports[0]))
    return None


def _lines_of(reports: "Sequence[JobReport]") -> list[str]:
    from headway.daemon.reports.job_report import report_line

    now = time.time()
    return [report_line(report, now=now) for report in reports] or [NO_JOBS]


def _draw(shown: "Snapshot") -> None:
    from headway.daemon.reports.watch_view import render

    screen = console()
    screen.print(render(shown, width=min(screen.width, 120)))
    if shown.report.error:
        say(shown.report.error)


def watch(job: JobName, where: Where, as_json: AsJsonLines = False) -> None:
    """Show a job until it is over.

    Batches since the newest restorable boundary are provisional: after a failure they are computed again. The new
    results have equal bits and replace the ones shown.

    \b
    headway watch my-job
    """
    from headway.daemon.client.job_watch import check_finished, follow_job, last_row
    from headway.daemon.reports.watch_view import open_display

    async def work(session: "ClusterSession") -> None:
        with open_display(as_json=as_json) as display:
            found = await session.while_reachable(follow_job(session, job, display=display))
        check_finished(found, where=f"`headway logs {job}`")
        if not as_json and (row := await last_row(session, found)) is not None and row.end_text:
            say(row.end_text)

    where.run(work, follows=job)


def events(job: JobName, where: Where, as_json: AsJson = False) -> Answer:
    """Show why each plan changed, in sentences, and on stderr what ails its nodes now.

    \b
    headway events my-job
    """
    from headway.daemon.client.job_requests import job_of
    from headway.daemon.reports.job_report import ailments_of
    from headway.daemon.reports.node_list import date_and_time

    view = where.view()
    found = job_of(view, job)
    records = [found.events[number] for number in sorted(found.events)]
    for line in ailments_of(found, view.nodes):
        warn(f"now {line}")
    if as_json:
        return as_json_text(records)
    return [f"{date_and_time(record.at)}  generation {record.generation}  {record.text}" for record in records]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryOptions:
    """Which batches are shown, and how."""

    from_batch: Annotated[int, typer.Option("--from", metavar="B", min=0)] = 0
    """First batch that is shown."""
    every: Annotated[int, typer.Option(min=1)] = 1
    """Show the batches that this number divides, those with a held-out loss, and the last of a job that is over."""
    follow: Annotated[bool, typer.Option("--follow", "-f")] = False
    """Go on with each batch as soon as no failure can undo it, until the job is over."""
    as_csv: Annotated[bool, typer.Option("--csv")] = False
    """Print comma-separated values, with a line of titles."""
    jsonl: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    """Write what is shown also here, as JSON, one object a line; an earlier file is continued."""
    tensorboard: Annotated[Path | None, typer.Option(metavar="DIR")] = None
    """Write what is shown also for TensorBoard, in DIR/JOB; earlier files are continued."""
    wandb: Annotated[Literal["offline", "online"] | None, typer.Option()] = None
    """Write what is shown also for Weights & Biases, to ./wandb or to the service; an earlier run is continued."""


def history(job: JobName, options: HistoryOptions, where: Where, as_json: AsJsonLines = False) -> None:
    """Show each batch of a job from its beginning: loss, held-out loss, learning rate, gradient norm, tokens/s, plan.

    Also of a job that is over. Batches that a failure could still undo are left out; `watch` has them. At the end
    stands where the time of all workers went, as seconds by class with --json.

    \b
    headway history my-job --every 100
    headway history my-job --csv > losses.csv
    headway history my-job --follow --tensorboard runs
    """
    from headway.daemon.client.job_requests import job_of
    from headway.daemon.client.job_watch import follow_history, read_history
    from headway.daemon.reports.goodput_report import report_goodput
    from headway.daemon.reports.metrics_file import ROW_NAMES, Gaps
    from headway.daemon.reports.writers import opened

    def line(row: "HistoryRow") -> str:
        if as_json:
            return row.as_json()
        if options.as_csv:
            known = row.as_dict()
            return ",".join(str(known.get(name, "")) for name in ROW_NAMES)
        return _history_line(row)

    async def work(session: "ClusterSession") -> None:
        read = follow_history if options.follow else read_history
        last: HistoryRow | None = None
        gaps, found = Gaps(every=options.every, due=options.from_batch), job_of(await session.view(), job)
        where_to = {name: getattr(options, name) for name in ("jsonl", "tensorboard", "wandb")}
        with opened(job, found.uid, **where_to) as write:
            async for row in read(session, job, from_batch=options.from_batch, every=options.every):
                if last is None and not as_json:
                    say(",".join(ROW_NAMES) if options.as_csv else _HISTORY_TITLES)
                last = row
                if lost := gaps.before(row):
                    warn(lost)
                say(line(row))
                write(row)
        if last is None:
            which = f"no batch of {job} from {options.from_batch} on" if options.from_batch else f"no batch of {job}"
            warn(f"{which} is restorable yet; `headway watch {job}` shows it")
        elif not options.as_csv:
            for each in _end_of_history(last, report_goodput(job_of(await session.view(), job)), as_json=as_json):
                say(each)

    where.run(lambda session: session.while_reachable(work(session)), follows=job if options.follow else "")


def _end_of_history(last: "HistoryRow", goodput: "GoodputReport", *, as_json: bool) -> list[str]:
    """Return the lines after the rows: the last held-out loss, which is in the last row too, and where the time of all
    workers went from the job's beginning, which no row can tell. As JSON one object, with the report's name of it.
    """
    from headway.daemon.reports.goodput_report import goodput_line

    if as_json:
        return [json.dumps({"goodput_s": goodput.seconds})] if goodput.seconds else []
    return [line for line in (last.end_text, goodput_line(goodput)) if line]


_HISTORY_TITLES = f"{'batch':>9}{'loss':>10}{'held-out':>10}{'rate':>11}{'norm':>11}{'tokens/s':>11}{'generation':>12}"


def _history_line(row: "HistoryRow") -> str:
    held_out = "" if row.eval_loss is None else f"{row.eval_loss:.4f}"
    norm = "" if row.gradient_norm is None else f"{row.gradient_norm:.4g}"
    speed = f"{row.tokens / row.seconds:.0f}" if row.seconds else ""
    numbers = f"{row.batch:>9}{row.loss:>10.4f}{held_out:>10}{row.learning_rate:>11.3g}{norm:>11}"
    return f"{numbers}{speed:>11}{row.generation:>12}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Which lines are shown."""

    node: str = ""
    """Only this node's workers."""
    follow: Annotated[bool, typer.Option("--follow", "-f")] = False
    """Print new lines as they are written."""
    lines: Annotated[int, typer.Option("--lines", "-n", min=0)] = 0
    """Number of last lines of each worker; 0: all."""


def logs(job: JobName, options: LogOptions, where: Where, as_json: AsJsonLines = False) -> None:
    """Show the output of a job's workers, through any daemon; on a terminal their JSON lines as sentences.

    \b
    headway logs my-job --follow
    """
    from headway.daemon.client.job_watch import read_logs

    async def work(session: "ClusterSession") -> None:
        import msgspec

        from headway.daemon.base.logging import readable

        is_read = sys.stdout.isatty()
        told = read_logs(session, job, node=options.node, follow=options.follow, last_lines=options.lines)
        async with aclosing(told):  # its reader may leave first
            async for line in told:
                if as_json:
                    say(msgspec.json.encode({"node": line.node, "text": line.text}).decode())
                else:
                    say(f"{line.node} | {readable(line.text) if is_read else line.text}")

    where.run(work, follows=job if options.follow else "")


def pause(job: JobName, wait: Wait = False, *, where: Where) -> Answer:
    """Stop a job after the batches that it has begun, and write a checkpoint.

    \b
    headway pause my-job --wait
    """
    return _requested("pause", job, where, wait_for="paused" if wait else "")


def resume(job: JobName, wait: Wait = False, *, where: Where) -> Answer:
    """Let a paused or failed job continue from the newest state that is left: state that nodes hold, or its checkpoint.

    \b
    headway resume my-job
    """
    return _requested("resume", job, where, wait_for="running" if wait else "")


def cancel(job: JobName, wait: Wait = False, *, where: Where) -> Answer:
    """End a job now, without a checkpoint.

    \b
    headway cancel my-job
    """
    return _requested("cancel", job, where, wait_for="cancelled" if wait else "")


def _requested(request: str, job: str, where: Where, *, wait_for: str) -> str:
    """Return the answer to a request of client/job_requests.py, or the phase that was waited for."""
    from headway.daemon.client import job_requests
    from headway.daemon.client.job_watch import wait_for_phase
    from headway.daemon.cluster.records import Phase

    async def work(session: "ClusterSession") -> str:
        answer: str = await getattr(job_requests, request)(session, job)
        if not wait_for:
            return answer
        found = await wait_for_phase(session, job, frozenset({Phase(wait_for)}), timeout_s=WAIT_TIMEOUT_S)
        return f"{job}: {found.phase.phase}"

    return where.run(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What is written of a model, and over what."""

    force: bool = False
    """Replace a model that `headway export` did not write."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Default: that of the folder from which the job started, else float32."""
    merge: bool = False
    """Add a job's adapters to the weights beside them."""


def export(job: JobName, out: OutDir, options: ExportOptions, where: Where, as_json: AsJson = False) -> Answer:
    """Write a job's newest boundary as a folder that AutoModelForCausalLM opens.

    A job with an [adapter] gives a folder that PEFT opens; --merge gives the whole model. An earlier export in the
    folder stays until the new one is complete. Files that belong to no model stay. Beside the model,
    metrics.jsonl has the batches that made it.

    \b
    headway export my-job --out exported
    headway export my-job --out exported --dtype bfloat16
    headway export my-job --out exported --merge
    """
    from headway.daemon.client.export import ExportReport, export_with_history

    def show(done: int, total: int) -> None:
        draw_over(f"layer {done}/{total}", is_last=done == total)

    async def work(session: "ClusterSession") -> int:
        boundary = await export_with_history(session, job, out, **asdict(options), on_warning=warn, on_layer=show)
        return boundary.number

    boundary = where.run(work)
    if as_json:
        return as_json_text(ExportReport(job=job, boundary=boundary, out=str(out)))
    return f"{out}: the model after {counted(boundary, 'batch')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """How much is shown, and which files are written."""

    batches: Annotated[int, typer.Option(min=1)] = 20
    """Number of recent batches; workers remember a limited number."""
    picture: Annotated[Path | None, typer.Option("--png", metavar="OUT.png")] = None
    """Draw both timelines."""
    out: Annotated[Path | None, typer.Option(metavar="OUT.json")] = None
    """Write a trace for chrome://tracing or ui.perfetto.dev."""


def trace(job: JobName, options: TraceOptions, where: Where, as_json: AsJson = False) -> Answer:
    """Show what each worker of a running job did in the last batches, next to the simulator's prediction.

    Workers always remember their last 8192 operations. The clocks of machines differ: the command aligns the times
    by measured offsets, and shows the offsets.

    \b
    idle       the share of the time in which a worker computes nothing
    predicted  the schedule's simulator, with the layer and link times that were measured so far

    \b
    headway trace my-job
    headway trace my-job --batches 5 --png timeline.png --out timeline.json
    """
    import msgspec

    from headway.daemon.client.job_trace import trace_job
    from headway.daemon.reports.pipeline_picture import check_drawing, write_panels

    if options.picture is not None:
        check_drawing("--png")
    found, measured, run = where.run(lambda session: trace_job(session, job, num_batches=options.batches))
    panels, names = found.panels(measured, run), [worker.name for worker in found.workers]
    about = msgspec.to_builtins(found)
    files = write_panels(panels, names, picture=options.picture, trace=options.out, about=about)
    return as_json_text(found) if as_json else [*found.lines, *files]


def report(
    job: JobName,
    out: Annotated[Path, typer.Option("--out", metavar="OUT.html", help="File to write.")] = Path("run.html"),
    compare: Annotated[
        str,
        typer.Option(metavar="OTHER", help="Another job, or the folder of a `run` or `reference`, to compare with."),
    ] = "",
    *,
    where: Where,
    as_json: AsJson = False,
) -> Answer:
    """Draw a job as one page: its losses, who held which layers, what failures cost. Also of a job that is over.

    The page is one file that opens without a network. It replaces an earlier page, and no other file. --json prints
    what it draws.

    \b
    headway report my-job --out run.html
    headway report my-job --compare runs/plain
    """
    from headway.daemon.client.job_picture import draw_job
    from headway.daemon.reports.report_page import check_report, write_report

    if not as_json:
        check_report(out)
    picture = where.run(lambda session: draw_job(session, job, compare=compare))
    if as_json:
        return as_json_text(picture)
    write_report(picture, out)
    difference = [f"difference to {picture.other.name}: {picture.other.sentence}"] if picture.other is not None else []
    return [
        *difference,
        f"{out}: {picture.num_done} of {counted(picture.num_batches, 'batch')} of {job}; a browser opens it",
    ]
