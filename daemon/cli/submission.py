"""Commands that start a job, and that list the checkpoints from which it could start."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.daemon.cli.options import (
    JOB_FILE_HELP,
    AsJson,
    Certs,
    Cluster,
    Etcd,
    JobName,
    LinkKind,
    say,
    say_json,
    show_sending,
    with_cluster,
)

if TYPE_CHECKING:
    from headway.daemon.client.checkpoint_folder import FoundCheckpoint
    from headway.daemon.client.cluster_access import ClusterSession


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(submit)
    app.command()(checkpoints)


def submit(
    job: Annotated[
        Path | None,
        typer.Argument(metavar="[JOB.toml]", help=JOB_FILE_HELP),
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="Start from this checkpoint, or from the newest of a job's folder. Without JOB.toml: its own job.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="Start with the weights of this folder or URL, as `[model] from` does.",
            show_default=False,
        ),
    ] = None,
    are_changes_meant: Annotated[
        bool,
        typer.Option("--change", help="With --from: other rates, data, order and the like may follow the checkpoint."),
    ] = False,
    link: LinkKind = None,
    priority: Annotated[
        int | None,
        typer.Option(min=-10, max=10, help="Priority in the queue; overrides the job file.", show_default=False),
    ] = None,
    etcd: Etcd = None,
    certs: Certs = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Put a job in the queue: a new job, a job that continues from a checkpoint, or both.

    \b
    headway submit my-job.toml
    headway submit my-job.toml --model hf://Qwen/Qwen3-4B
    headway submit --from /mnt/checkpoints/my-job          that job, in a cluster that has lost everything else
    headway submit next.toml --from /mnt/checkpoints/my-job
    """
    import asyncio

    from headway.daemon.client import checkpoint_folder
    from headway.daemon.client.checkpoint_folder import check_checkpoint_dir, folder_access
    from headway.daemon.client.data_upload import Sent, send_missing
    from headway.daemon.client.job_requests import submit as submit_job
    from headway.daemon.errors import ConfigError
    from headway.daemon.jobs.changed_keys import Changes
    from headway.daemon.jobs.data_choices import epochs_text
    from headway.daemon.jobs.device_defaults import FILLED_IN, what_was_filled_in, with_those_of
    from headway.daemon.jobs.job_file import read_job_file
    from headway.daemon.jobs.rate_schedule import continued_schedule
    from headway.daemon.jobs.resolve import default_cache_dir, resolve_job
    from headway.daemon.origin.origin_config import model_opener, whole_path
    from headway.daemon.origin.submission import read_parts
    from headway.daemon.reports.safety_report import why_unprotected
    from headway.daemon.shards.data_source import index_at
    from headway.daemon.shards.tokenizer_match import check_tokenizer
    from headway.daemon.storage.checkpoint_names import MANIFEST

    if job is None and origin is None:
        raise ConfigError("name a job file, or a checkpoint with --from", "submit")
    if are_changes_meant and origin is None:
        raise ConfigError("needs --from: only the job of a checkpoint has keys to change", "--change")
    manifest = checkpoint_folder.read_checkpoint(origin) if origin is not None else None
    named: frozenset[str] | None = None
    if model is not None and job is None:
        raise ConfigError("needs JOB.toml: a checkpoint has its own weights", "--model")
    if job is not None:
        open_model = model_opener(job.parent)
        (spec, named), source = read_job_file(job, open_model=open_model, model_from=whole_path(model)), job
    else:
        assert manifest is not None
        spec, source = manifest.spec, Path(f"{manifest.checkpoint.url}/{MANIFEST}")
    spec = spec.with_link(link).with_priority(priority)
    if manifest is not None:
        if named is not None:
            spec, named = with_those_of(spec, manifest.spec, named=named), named | FILLED_IN
        checkpoint_folder.check_fits(spec, manifest, str(source))
        spec = continued_schedule(spec, manifest.spec, manifest.checkpoint.boundary, str(source))
        spec = replace(spec, origin=manifest.spec.origin)  # the weights are the checkpoint's

    async def work(session: "ClusterSession") -> None:
        view = await session.view()
        devices = [device for node in view.nodes.values() for device in node.devices]
        resolved = await asyncio.to_thread(
            resolve_job,
            spec,
            job_file=source,
            devices=devices,
            cache_dir=default_cache_dir(),
            named=named,
            read_url=index_at,
        )
        found = Changes()
        if manifest is not None and not manifest.is_sealed:
            sys.stderr.write("headway: the checkpoint's manifest has no digest: an earlier release wrote it\n")
        if manifest is not None:
            found = checkpoint_folder.changes_of(resolved, manifest, str(source), are_meant=are_changes_meant)
        are_nodes_asked = session.identity is not None
        root = session.address.state_dir
        check_checkpoint_dir(resolved, job_file=source, root=root, are_nodes_asked=are_nodes_asked)
        access = await folder_access(session, view, resolved.fault.checkpoint_dir)
        access.check(f"{source}:fault.checkpoint_dir")
        name, sent, warnings = spec.job.name, list[Sent](), list(access.warnings)
        if manifest is not None:
            await asyncio.to_thread(checkpoint_folder.check_files, manifest)
        else:
            await asyncio.to_thread(check_tokenizer, resolved, source)
            resolved = await asyncio.to_thread(read_parts, resolved)
        if name not in view.jobs:  # otherwise the job is refused, and nothing need move
            sent = await send_missing(session, resolved.data, warn=warnings.append, tell=show_sending)
        if manifest is None:
            await submit_job(session, resolved)
        else:
            first = checkpoint_folder.begin_with(manifest)
            await submit_job(session, resolved, checkpoint=first, generation=manifest.generation, changed=found.text)
        warning = why_unprotected(resolved, view.nodes)
        if as_json:
            boundary = manifest.checkpoint.boundary if manifest is not None else 0
            parent = manifest.job if manifest is not None else ""
            told = {"job": name, "boundary": boundary, "from": parent, "unprotected": warning}
            say_json({**told, "changed": [*found.of_recurrence, *found.others], "sent": sent, "warnings": warnings})
            return
        for each in sent:
            say(each.told)
        begins = ""
        if manifest is not None:
            begins = f" from batch {manifest.checkpoint.boundary} of {manifest.job} ({manifest.checkpoint.url})"
        say(f"{name}: submitted{begins}; `headway watch {name}` shows it")
        if found.text:
            say(f"changed: {found.text}")
        if resolved.train.epochs:
            say(f"{epochs_text(resolved.train.epochs)} of its data are {resolved.train.batches} batches")
        if filled_in := what_was_filled_in(spec, resolved):
            sys.stderr.write(f"headway: the job leaves some keys to the cards: {filled_in}\n")
        if warning:
            sys.stderr.write(f"headway: {name} is unprotected: {warning}\n")
        for line in warnings:
            sys.stderr.write(f"headway: {line}\n")

    with_cluster(etcd, certs, cluster, work)


def checkpoints(
    job: JobName,
    folder: Annotated[
        str | None,
        typer.Option(
            "--in", metavar="CHECKPOINT_DIR", help="Look in this folder, and ask no cluster.", show_default=False
        ),
    ] = None,
    etcd: Etcd = None,
    certs: Certs = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """List a job's checkpoints, oldest first. A checkpoint without its manifest is incomplete and cannot be used.

    \b
    headway checkpoints my-job
    headway checkpoints my-job --in s3://bucket/checkpoints
    """
    from headway.daemon.client.checkpoint_folder import list_checkpoints
    from headway.daemon.client.job_requests import find_job
    from headway.daemon.storage.checkpoint import resolve_checkpoint_dir

    async def work(session: "ClusterSession") -> tuple[str, str]:
        told = (await find_job(session, job)).submission
        assert told is not None
        return resolve_checkpoint_dir(told.spec.fault.checkpoint_dir, session.address.state_dir), told.uid

    base, uid = (folder.rstrip("/"), "") if folder else with_cluster(etcd, certs, cluster, work)
    found = list_checkpoints(f"{base}/{job}")
    if uid and any(f"/{uid}/" not in entry.url for entry in found):
        line = f"other submissions of the name {job} write there too; those of this job are below {base}/{job}/{uid}"
        sys.stderr.write(f"headway: {line}\n")
    if as_json:
        say_json(found)
        return
    for line in [_line(entry) for entry in found] or [f"{job}: no checkpoint yet"]:
        say(line)


def _line(entry: "FoundCheckpoint") -> str:
    from headway.daemon.reports.set_aside import date_and_time

    moment = date_and_time(entry.written_at) if entry.written_at else "?"
    size = f"{entry.size_bytes / 1e6:,.1f} MB"
    state = "complete" if entry.is_complete else "incomplete"
    return f"boundary {entry.boundary}  timeline {entry.timeline}  {moment}  {size}  {state}  {entry.url}"
