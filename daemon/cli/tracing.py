"""`headway trace`: shows what a job's workers did in the last batches, next to the simulation of the plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.daemon.cli.options import AsJson, Certs, Cluster, Etcd, JobName, say, say_json, with_cluster

if TYPE_CHECKING:
    from headway.daemon.client.cluster_access import ClusterSession
    from headway.daemon.client.job_trace import JobTrace


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(trace)


def trace(
    job: JobName,
    batches: Annotated[
        int, typer.Option(min=1, help="Number of recent batches; workers remember a limited number.")
    ] = 20,
    picture: Annotated[
        Path | None, typer.Option("--png", metavar="OUT.png", help="Draw both timelines.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="OUT.json",
            help="Write a trace for chrome://tracing or ui.perfetto.dev.",
            show_default=False,
        ),
    ] = None,
    etcd: Etcd = None,
    certs: Certs = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
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
    from headway.daemon.client.job_trace import trace_job
    from headway.daemon.results.pipeline_picture import check_drawing

    if picture is not None:
        check_drawing("--png")

    async def work(session: "ClusterSession") -> "JobTrace":
        return await trace_job(session, job, num_batches=batches)

    found = with_cluster(etcd, certs, cluster, work)
    _write(found, picture, out)
    if as_json:
        say_json(_facts(found))
        return
    for line in found.lines:
        say(line)
    for what, path in (("timeline", picture), ("trace", out)):
        if path is not None:
            say(f"{what:8}  {path}")


def _facts(found: "JobTrace") -> dict[str, object]:
    run = found.prediction
    return {
        "job": found.job,
        "generation": found.generation,
        "first_batch": found.pipeline.first_batch,
        "last_batch": found.pipeline.last_batch,
        "batch_seconds": found.pipeline.step_seconds,
        "predicted_batch_seconds": run.step_seconds if run is not None else None,
        "workers": found.workers,
        "clocks": found.clocks,
        "are_launches": found.are_launches,
        "troubles": found.troubles,
    }


def _write(found: "JobTrace", picture: Path | None, out: Path | None) -> None:
    """Write the files that the user asked for. Raises ConfigError for a path that cannot be written."""
    import json

    import msgspec

    from headway.daemon.errors import ConfigError
    from headway.daemon.results.pipeline_picture import Panel, draw_panels
    from headway.daemon.results.pipeline_trace import trace_document, trace_events

    measured, run, names = found.pipeline, found.prediction, found.names
    path = picture
    try:
        if path is not None:
            title = f"{found.head}\n{found.clock_line}".strip()
            panels = [Panel(timeline=measured.timeline, window=measured.window, title=title, x_label="measured")]
            if run is not None:
                end = min(run.window[1], run.window[0] + measured.window[1])
                panels.append(
                    Panel(timeline=run.timeline, window=(run.window[0], end), title="predicted", x_label="simulated")
                )
            draw_panels(panels, names, path)
        path = out
        if path is not None:
            parts = [trace_events(measured.timeline, [f"measured {name}" for name in names])]
            if run is not None:
                rows = [f"predicted {name}" for name in names]
                parts.append(trace_events(run.timeline, rows, first_row=len(names), zero_s=run.window[0]))
            about = msgspec.to_builtins(_facts(found))
            path.write_text(json.dumps(trace_document(*parts, about=about)))
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror or error}", str(path)) from error
