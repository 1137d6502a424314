"""`headway plan`: shows which node would hold which layers, before anything is submitted or rented."""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.daemon.cli.options import AsJson, Certs, Cluster, Etcd, JobFile, say, say_json, with_cluster

if TYPE_CHECKING:
    from headway.daemon.client.cluster_access import ClusterSession
    from headway.daemon.costs.connections import LinkAssumptions
    from headway.daemon.errors import ConfigError
    from headway.daemon.jobs.job import JobSpec
    from headway.daemon.preview.plan_simulation import Forecast
    from headway.daemon.preview.preview import PlanPreview
    from headway.daemon.records.records import NodeRecord


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)


def plan(
    job: JobFile,
    nodes: Annotated[
        int, typer.Option(min=0, max=10_000, help="Number of equal CPU nodes to plan for, instead of the cluster's.")
    ] = 0,
    memory: Annotated[float, typer.Option(min=0, help="Memory of each of the --nodes in GiB; 0: enough.")] = 0.0,
    nodes_file: Annotated[
        Path | None,
        typer.Option(
            "--nodes-file",
            metavar="N.toml",
            help="File with nodes, devices and links instead of the cluster's.",
            show_default=False,
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--simulate",
            metavar="OUT.png",
            help="Simulate the plan, and draw the pipeline's timeline.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="OUT.json",
            help="Simulate the plan, and write a trace for chrome://tracing or Perfetto.",
            show_default=False,
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Also print the arithmetic: the parts of each worker's memory and seconds."),
    ] = False,
    etcd: Etcd = None,
    certs: Certs = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Show which node would hold which layers, and why: a dry run that changes nothing and needs no GPU.

    With --nodes or --nodes-file the command needs no cluster: size one before you rent it. If no cluster is named
    and none runs here, the plan is for this machine. A job that does not fit is refused with the arithmetic.

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
    from headway.daemon.errors import ConfigError
    from headway.daemon.jobs.job_file import read_job_file
    from headway.daemon.origin.origin_config import model_opener
    from headway.daemon.preview.preview import equal_nodes, preview
    from headway.daemon.results.pipeline_picture import check_drawing

    if nodes and nodes_file is not None:
        raise ConfigError("excludes --nodes; give one of the two", "--nodes-file")
    if memory and not nodes:
        raise ConfigError("needs --nodes; give the number of nodes", "--memory")
    open_model = model_opener(job.parent, on_no_weights=_warn)
    spec, named = read_job_file(job, open_model=open_model)
    spec, has_data = _with_data(spec, job, named)
    if picture is not None:
        check_drawing()
    links: LinkAssumptions | None = None
    records: Sequence[NodeRecord]
    if nodes_file is not None:
        records, links = _from_file(nodes_file, spec, named)
    elif nodes:
        records = equal_nodes(nodes, memory_bytes=round(memory * (1 << 30)))
    elif _is_any_cluster(etcd, cluster):
        from headway.daemon.situation.outlook import as_fast_as_their_like

        async def work(session: "ClusterSession") -> "Sequence[NodeRecord]":
            _warn_of_checkpoints(spec, job, session.address.state_dir)
            return tuple(as_fast_as_their_like((await session.view()).nodes.values()).values())

        records = with_cluster(etcd, certs, cluster, work)
    else:
        records = (_this_machine(),)
        sys.stderr.write(
            "headway: no cluster runs here, so the plan is for this machine alone; --nodes N plans for more\n"
        )
    is_simulated = picture is not None or trace is not None
    told, run = preview(spec, records, named=named, links=links, is_simulated=is_simulated, has_data=has_data)
    if run is not None:
        _write(told, run, picture, trace)
    if as_json:
        say_json(told)
        return
    for line in [*told.lines, *(["", *told.arithmetic] if explain else [])]:
        say(line)
    for what, path in (("timeline", picture), ("trace", trace)):
        if path is not None:
            say(f"{what:8}  {path}")


def _warn_of_checkpoints(spec: "JobSpec", job: Path, root: Path | None) -> None:
    """Tell on stderr if the cluster would refuse the job's checkpoint folder. root: of relative ones."""
    from headway.daemon.client.checkpoint_folder import check_checkpoint_dir
    from headway.daemon.errors import ConfigError

    if root is not None:
        return
    try:
        check_checkpoint_dir(spec, job_file=job, root=None)
    except ConfigError as error:
        _warn(error)


def _warn(error: "ConfigError") -> None:
    sys.stderr.write(f"headway: `headway submit` would refuse the job: {error}\n")


def _with_data(spec: "JobSpec", job: Path, named: "Collection[str]") -> "tuple[JobSpec, bool]":
    """Return the job with what its data decides, and whether that is known: the data need not be on this machine.

    The built-in data decides something only for a few jobs, so it is not made for the others.

    Raises ConfigError for what `submit` would refuse.
    """
    from headway.daemon.jobs.resolve import BUILT_IN_SOURCE, check_adapter, default_cache_dir, has_data_here, with_data
    from headway.daemon.shards.data_source import index_at, why_no_answer
    from headway.daemon.shards.tokenizer_match import check_tokenizer

    check_adapter(spec, job)
    train = spec.train
    is_built_in = spec.data.source == BUILT_IN_SOURCE  # never of several sources, some of which are folders
    if not has_data_here(spec, job) or (is_built_in and not (train.epochs or train.eval_every or spec.origin.url)):
        return spec, False
    if why := why_no_answer(spec.data):
        sys.stderr.write(f"headway: the plan is made without the data: {why}\n")
        return spec, False
    spec = with_data(spec, job_file=job, cache_dir=default_cache_dir(), named=named, read_url=index_at)
    check_tokenizer(spec, job)
    return spec, True


def _is_any_cluster(etcd: str | None, cluster: Path | None) -> bool:
    """Return True if a cluster is named or a local one runs. A named cluster that does not answer is an error."""
    import os

    from headway.daemon.client.cluster_access import find_cluster
    from headway.daemon.errors import StoreUnreachableError

    if etcd or cluster or os.environ.get("HEADWAY_ETCD") or os.environ.get("HEADWAY_CLUSTER"):
        return True
    try:
        find_cluster()
    except StoreUnreachableError:
        return False
    return True


def _this_machine() -> "NodeRecord":
    """Return one node with the devices that a daemon on this machine would have."""
    from headway.daemon.machine_share import memory_bytes
    from headway.daemon.node.hardware import class_of, find_devices
    from headway.daemon.records.records import NodeRecord

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
    )


def _from_file(path: Path, spec: "JobSpec", named: "Collection[str]") -> "tuple[Sequence[NodeRecord], LinkAssumptions]":
    from headway.daemon.jobs.device_defaults import with_device_defaults
    from headway.daemon.jobs.typed_toml import read_text
    from headway.daemon.preview.nodes_file import parse_nodes

    found = parse_nodes(read_text(path, "nodes file"), str(path))
    devices = [device for node in found.records(spec.train) for device in node.devices]
    train = with_device_defaults(spec, devices, named=named).train  # a file's `tflops` are of the job's dtype
    return found.records(train), found.link_assumptions()


def _write(told: "PlanPreview", run: "Forecast", picture: Path | None, trace: Path | None) -> None:
    """Write the simulation's files. Raises ConfigError for a path that cannot be written."""
    import json

    from headway.daemon.errors import ConfigError
    from headway.daemon.preview.preview import worker_labels
    from headway.daemon.results.pipeline_picture import draw_pipeline
    from headway.daemon.results.pipeline_trace import chrome_trace

    labels = worker_labels(told.stages)
    path = picture
    try:
        if path is not None:
            title = (
                f"{told.job}: {run.step_seconds:.3g} s a batch simulated, {told.predicted_batch_seconds:.3g} predicted"
            )
            draw_pipeline(run.timeline, labels, path, window=run.shown, title=title)
        path = trace
        if path is not None:
            path.write_text(json.dumps(chrome_trace(run.timeline, labels)))
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror or error}", str(path)) from error
