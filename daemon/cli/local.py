"""Commands that start their own cluster, or need none: demo, run, up, reference."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headway.daemon.base.terminal import counted
from headway.daemon.cli.options import (
    Answer,
    AsJson,
    AsJsonLines,
    Commands,
    EtcdBinary,
    JobFile,
    Link,
    OutDir,
    Panel,
    add,
    say,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from headway.daemon.local.cluster import LocalCluster

STOPPING = "stopping; saving jobs first (Ctrl-C again stops at once)"

NumNodes = Annotated[int, typer.Option("--nodes", min=1, help="Number of daemons to start.")]
StateDir = Annotated[
    Path | None, typer.Option(help="Folder of etcd's data and the checkpoints (DIR/state).", show_default=False)
]


def register(app: Commands) -> None:
    """Add the commands."""
    add(app, demo, run, up, reference, study, panel=Panel.HERE)


def demo(
    out: OutDir = Path("demo-run"),
    job: Annotated[
        Path | None, typer.Option(help="Job file to use instead of the demo's own.", show_default=False)
    ] = None,
    etcd_binary: EtcdBinary = None,
) -> int:
    """Watch three nodes train a small model while a link is cut, a worker and a machine are lost, and one joins.

    Then the plain loop trains the same job, and the hashes of both models are compared. Takes three to four minutes.

    \b
    headway demo --out demo-run
    """
    from headway.daemon.base.interrupts import run_interruptible
    from headway.daemon.local.demo import run_demo

    return run_interruptible(
        lambda force: run_demo(out, job_file=job, force=force, etcd_binary=etcd_binary),
        on_first="stopping; the next demo starts from the beginning (Ctrl-C again stops at once)",
    )


def run(
    job: JobFile,
    out: OutDir,
    nodes: NumNodes = 1,
    link: Annotated[
        Link | None,
        typer.Option(help="Kind of link between workers; overrides the job file.", show_default=False),
    ] = None,
    state_dir: StateDir = None,
    etcd_binary: EtcdBinary = None,
    as_json: AsJsonLines = False,
) -> int:
    """Train one job in a cluster of its own: DIR/metrics.jsonl, DIR/report.html and DIR/model.

    After Ctrl-C, the command continues where it stopped if it is given its old folder.

    \b
    headway run job.toml --nodes 2 --out runs/first
    """
    from headway.daemon.base.interrupts import run_interruptible
    from headway.daemon.local.run import run_job
    from headway.daemon.reports.metrics_file import METRICS_NAME, read_rows
    from headway.daemon.reports.watch_view import open_display

    async def main(force: "asyncio.Event") -> int:
        await run_job(
            job,
            num_nodes=nodes,
            link=link,
            out=out,
            state_dir=state_dir,
            display=open_display(as_json=as_json),
            force=force,
            etcd_binary=etcd_binary,
            on_start=lambda: _say_starting(nodes),
        )
        if not as_json:
            rows = read_rows(out / METRICS_NAME)
            if rows and rows[-1].end_text:
                say(rows[-1].end_text)
            say(f"{out / 'metrics.jsonl'}: one line a batch · {out / 'model'}: the model")
            say(f"{out / 'report.html'}: the run as a page; a browser opens it")
        return 0

    return run_interruptible(main, on_first=f"{STOPPING}; the same command goes on from there")


def up(
    nodes: NumNodes = 3,
    state_dir: Annotated[Path, typer.Option(help="Folder of etcd's data and the checkpoints.")] = Path(".headway"),
    etcd_binary: EtcdBinary = None,
    etcd_port: Annotated[int, typer.Option(help="etcd's port for clients; 0 takes a free port.", min=0, max=65535)] = 0,
) -> int:
    """Start etcd and daemons on this machine, until Ctrl-C.

    Ctrl-C first saves every job in a checkpoint; the next `up` on this state folder continues the jobs. A second
    Ctrl-C does not wait for the checkpoints. The exit code is 0 if every job was saved, otherwise 130.

    With HEADWAY_METRICS_LISTEN=HOST:PORT each daemon serves metrics at its own port, from PORT upwards.

    \b
    headway up --nodes 3
    """
    from headway.daemon.base.interrupts import run_interruptible
    from headway.daemon.local.cluster import LocalCluster

    has_ended_well = False

    async def main(force: "asyncio.Event") -> int:
        nonlocal has_ended_well
        cluster = LocalCluster(
            state_dir,
            num_nodes=nodes,
            etcd_binary=etcd_binary,
            etcd_port=etcd_port,
            force=force,
            on_trouble=lambda text: typer.echo(f"warning: {text}", err=True),
            on_step=lambda text: typer.echo(text, err=True),
        )
        try:
            async with cluster:
                for line in _lines_of(cluster, state_dir):
                    say(line)
                await cluster.guard()
        finally:
            has_ended_well = cluster.has_ended_well
        return 0

    return run_interruptible(main, on_first=STOPPING, has_ended_well=lambda: has_ended_well)


def _lines_of(cluster: "LocalCluster", state_dir: Path) -> "Iterator[str]":
    """Return what people need to know of a cluster that is up."""
    num_up = sum(node.process.poll() is None for node in cluster.nodes)
    count = f"{num_up} nodes are" if num_up > 1 else "1 node is"
    yield f"{count} up; etcd at {cluster.address.etcd[0]}, state in {state_dir}"
    option = "" if state_dir == Path(".headway") else f" --cluster {state_dir}"
    yield f"in another terminal, in this folder: headway submit JOB.toml{option}"
    yield from filter(None, (cluster.card_sharing,))
    for name, listen in cluster.metrics.items():
        yield f"metrics of {name}: http://{listen}/metrics"
    yield "Ctrl-C here saves every job and stops"


def reference(
    job: JobFile,
    out: OutDir,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA if the machine has it.")] = "auto",
    coded_cuts: Annotated[
        str,
        typer.Option(
            metavar="LAYERS", help="With wire compression: the layers at which coded links end, as in status --json."
        ),
    ] = "",
) -> Answer:
    """Train a job in one plain loop: no pipeline, no etcd. The oracle that every run equals bit for bit.

    \b
    headway reference job.toml --out runs/plain
    headway reference far.toml --out runs/plain --coded-cuts block.3,block.6
    """
    from headway.daemon.base.terminal import behind
    from headway.daemon.local.reference_run import run_reference

    cuts = [layer.strip() for layer in coded_cuts.split(",") if layer.strip()]
    progress = behind(sys.stderr) if sys.stderr.isatty() else None
    return run_reference(job, out, device=device, coded_cuts=cuts, progress=progress)


def study(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="A job, and what varies of it.")],
    out: OutDir,
    processes: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Trainings at a time.", show_default="one a core")
    ] = None,
    as_json: AsJson = False,
) -> Answer:
    """Train one job under several optimizers, treatments, rates and seeds, and compare what they end at.

    After Ctrl-C, the command goes on where it stopped if it is given its old folder.

    \b
    headway study delay.toml --out studies/delay
    """
    import os

    from headway.daemon.base.terminal import behind
    from headway.daemon.study.study_answer import answer

    progress = behind(sys.stderr) if sys.stderr.isatty() else None
    return answer(study, out, processes=processes or os.cpu_count() or 1, progress=progress, as_json=as_json)


def _say_starting(nodes: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"starting etcd and {counted(nodes, 'node')}\n")
