"""Commands before a job runs: submit it, plan it, find a checkpoint from which it could start."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.daemon.base.errors import ConfigError, StoreUnreachableError
from headway.daemon.cli.options import (
    JOB_FILE_HELP,
    Answer,
    AsJson,
    Commands,
    JobFile,
    JobName,
    Link,
    Panel,
    Where,
    add,
    as_json_text,
    show_sending,
    warn,
)

if TYPE_CHECKING:
    from headway.daemon.client.checkpoint_folder import FoundCheckpoint
    from headway.daemon.client.cluster_access import ClusterSession
    from headway.daemon.cluster.records import NodeRecord
    from headway.daemon.jobs.job import JobSpec
    from headway.daemon.plan.connections import LinkAssumptions


def register(app: Commands) -> None:
    """Add the commands."""
    add(app, checkpoints, plan, panel=Panel.LOOK)
    add(app, submit, panel=Panel.JOB)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """What a job begins with, and what overrides its file."""

    origin: Annotated[str | None, typer.Option("--from", metavar="CHECKPOINT")] = None
    """Start from this checkpoint, or from the newest of a job's folder. Without JOB.toml: its own job."""
    model: Annotated[str | None, typer.Option(metavar="PATH")] = None
    """Start with the weights of this folder or URL, as `[model] from` does."""
    change: bool = False
    """With --from: other rates, data, order and the like may follow the checkpoint."""
    link: Link | None = None
    """Kind of link between workers; overrides the job file."""
    priority: Annotated[int | None, typer.Option(min=-10, max=10)] = None
    """Priority in the queue; overrides the job file."""


def submit(
    job: Annotated[Path | None, typer.Argument(metavar="[JOB.toml]", help=JOB_FILE_HELP)] = None,
    *,
    options: SubmitOptions,
    where: Where,
    as_json: AsJson = False,
) -> Answer:
    """Put a job in the queue: a new job, a job that continues from a checkpoint, or both.

    \b
    headway submit my-job.toml
    headway submit my-job.toml --model hf://Qwen/Qwen3-4B
    headway submit --from /mnt/checkpoints/my-job          that job, in a cluster that has lost everything else
    headway submit next.toml --from /mnt/checkpoints/my-job
    """
    from headway.daemon.client import submission

    draft = submission.read_draft(
        job,
        checkpoint=options.origin,
        model=options.model,
        are_changes_meant=options.change,
        link=options.link,
        priority=options.priority,
    )
    done = where.run(lambda session: submission.submit(session, draft, tell=show_sending, warn=warn))
    if as_json:
        return as_json_text(done.report)
    for remark in done.remarks:
        warn(remark)
    return done.lines


def checkpoints(
    job: JobName,
    folder: Annotated[
        str | None,
        typer.Option(
            "--in", metavar="CHECKPOINT_DIR", help="Look in this folder, and ask no cluster.", show_default=False
        ),
    ] = None,
    *,
    where: Where,
    as_json: AsJson = False,
) -> Answer:
    """List a job's checkpoints, oldest first. A checkpoint without its manifest is incomplete and cannot be used.

    \b
    headway checkpoints my-job
    headway checkpoints my-job --in s3://bucket/checkpoints
    """
    from headway.daemon.blobs.checkpoint import resolve_checkpoint_dir
    from headway.daemon.client.checkpoint_folder import list_checkpoints
    from headway.daemon.client.job_requests import find_job

    async def work(session: "ClusterSession") -> tuple[str, str]:
        told = (await find_job(session, job)).submission
        assert told is not None
        return resolve_checkpoint_dir(told.spec.fault.checkpoint_dir, session.address.state_dir), told.uid

    base, uid = (folder.rstrip("/"), "") if folder else where.run(work)
    found = list_checkpoints(f"{base}/{job}")
    if uid and any(f"/{uid}/" not in entry.url for entry in found):
        warn(f"other submissions of the name {job} write there too; those of this job are below {base}/{job}/{uid}")
    if as_json:
        return as_json_text(found)
    return [_line(entry) for entry in found] or [f"{job}: no checkpoint yet"]


def _line(entry: "FoundCheckpoint") -> str:
    from headway.daemon.reports.node_list import date_and_time

    moment = date_and_time(entry.written_at) if entry.written_at else "?"
    size = f"{entry.size_bytes / 1e6:,.1f} MB"
    state = "complete" if entry.is_complete else "incomplete"
    return f"boundary {entry.boundary}  timeline {entry.timeline}  {moment}  {size}  {state}  {entry.url}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """For which nodes to plan, and what to show of it."""

    nodes: Annotated[int, typer.Option(min=0, max=10_000)] = 0
    """Number of CPU nodes to plan for instead of the cluster's: they share this machine, as those of `headway run`."""
    memory: Annotated[float, typer.Option(min=0)] = 0.0
    """Memory of each of the --nodes in GiB; 0: enough."""
    nodes_file: Annotated[Path | None, typer.Option(metavar="N.toml")] = None
    """File with nodes, devices and links instead of the cluster's."""
    picture: Annotated[Path | None, typer.Option("--simulate", metavar="OUT.png")] = None
    """Simulate the plan, and draw the pipeline's timeline."""
    trace: Annotated[Path | None, typer.Option(metavar="OUT.json")] = None
    """Simulate the plan, and write a trace for chrome://tracing or Perfetto."""
    explain: bool = False
    """Also print the arithmetic: the parts of each worker's memory and seconds."""


def plan(job: JobFile, options: PlanOptions, where: Where, as_json: AsJson = False) -> Answer:
    """Show which node would hold which layers, and why: a dry run that changes nothing and needs no GPU.

    With --nodes or --nodes-file the command needs no cluster: a file sizes one before you rent it. If no cluster is
    named and none runs here, the plan is for this machine. A job that does not fit is refused with the arithmetic.

    \b
    depth   maximum number of microbatches that a worker has begun and not ended
    share   of each batch's microbatches, where several workers share a stage
    bubble  the share of a batch's time in which a worker is idle, by the simulator of the schedule

    \b
    headway plan my-job.toml --nodes 4
    headway plan my-job.toml --nodes-file nodes.toml --simulate timeline.png --trace timeline.json

    \b
    nodes.toml:
        [[nodes]]
        name = "berlin"
        count = 2
        memory_gb = 128.0
        [[nodes.devices]]
        kind = "cuda"
        memory_gb = 48.0
        bfloat16_tflops = 120.0
    """
    from headway.daemon.base.terminal import screen_width
    from headway.daemon.client.planned_job import nodes_in, read_planned
    from headway.daemon.client.preview import preview, worker_labels
    from headway.daemon.reports.pipeline_picture import Panel, check_drawing, write_panels

    picture, trace = options.picture, options.trace
    if options.nodes and options.nodes_file is not None:
        raise ConfigError("excludes --nodes; give one of the two", "--nodes-file")
    if options.memory and not options.nodes:
        raise ConfigError("needs --nodes; give the number of nodes", "--memory")
    spec, named, has_data = read_planned(job, warn=warn)
    if picture is not None:
        check_drawing()
    links: LinkAssumptions | None = None
    records: Sequence[NodeRecord]
    assumed: list[str] = []
    if options.nodes_file is not None:
        records, links, assumed = nodes_in(options.nodes_file, spec, named)
    else:
        records = _nodes(options.nodes, options.memory, where, spec, job)
    is_simulated = picture is not None or trace is not None
    told, run = preview(spec, records, named=named, links=links, is_simulated=is_simulated, has_data=has_data)
    for text in assumed:
        warn(text)
    files = []
    if run is not None:
        predicted_s = told.plan.predicted_batch_seconds
        title = f"{told.job}: {run.step_seconds:.3g} s a batch simulated, {predicted_s:.3g} predicted"
        panel = Panel(timeline=run.timeline, window=run.shown, title=title, x_label="simulated, the pipe is full")
        files = write_panels([panel], worker_labels(told.plan.workers), picture=picture, trace=trace)
    if as_json:
        return as_json_text(told)
    width = screen_width()
    return [*told.lines_for(width), *(["", *told.arithmetic_for(width)] if options.explain else []), *files]


def _nodes(number: int, memory_gib: float, where: Where, spec: "JobSpec", job: Path) -> "Sequence[NodeRecord]":
    """Return so many equal nodes; 0: those of the cluster, or this machine if there is none."""
    if number:
        from headway.daemon.base.machine_share import num_cores
        from headway.daemon.client.preview import equal_nodes

        return equal_nodes(number, memory_bytes=round(memory_gib * (1 << 30)), num_cores=num_cores())
    if not _is_any_cluster(where):
        warn("no cluster runs here, so the plan is for this machine alone; --nodes N plans for more")
        return (_this_machine(),)
    from headway.daemon.decide.outlook import as_fast_as_their_like

    async def work(session: "ClusterSession") -> "Sequence[NodeRecord]":
        if session.address.state_dir is None:
            _check_checkpoints(spec, job)
        return tuple(as_fast_as_their_like((await session.view()).nodes.values()).values())

    return where.run(work)


def _check_checkpoints(spec: "JobSpec", job: Path) -> None:
    """Tell on stderr if the cluster would refuse the job's checkpoint folder."""
    from headway.daemon.client.checkpoint_folder import check_checkpoint_dir
    from headway.daemon.client.planned_job import would_be_refused

    try:
        check_checkpoint_dir(spec, job_file=job, root=None)
    except ConfigError as error:
        warn(would_be_refused(error))


def _is_any_cluster(where: Where) -> bool:
    """Return True if a cluster is named or a local one runs. A named cluster that does not answer is an error."""
    if where.etcd or where.cluster or os.environ.get("HEADWAY_ETCD") or os.environ.get("HEADWAY_CLUSTER"):
        return True
    try:
        Where().find()
    except StoreUnreachableError:
        return False
    return True


def _this_machine() -> "NodeRecord":
    """Return one node with the devices that a daemon on this machine would have."""
    from headway.daemon.base.machine_share import memory_bytes
    from headway.daemon.cluster.records import NodeRecord
    from headway.daemon.node.hardware import class_of, find_devices

    devices = find_devices("auto", 0)
    return NodeRecord(
        name="this-machine",
        incarnation="preview",
        address="",
        host="",
        site="default",
        devices=devices,
        memory_bytes=memory_bytes(),
        arithmetic_class=class_of(devices),
        allow_plugins=("any",),
    )
