"""`headway run`: a cluster for one job, from the job file to the model folder."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from headway.daemon.base.errors import ConfigError, RecoveryError
from headway.daemon.base.machine_share import memory_bytes, num_cores
from headway.daemon.client.checkpoint_folder import check_checkpoint_dir
from headway.daemon.client.cluster_access import ClusterSession, unless
from headway.daemon.client.job_picture import TracedPipeline, draw_job, traced
from headway.daemon.client.job_requests import job_of, submit
from headway.daemon.client.job_watch import JournalCopy, check_finished, follow_job
from headway.daemon.client.preview import equal_nodes, preview
from headway.daemon.client.submission import Link, read_draft
from headway.daemon.cluster.records import TERMINAL_PHASES, Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.outlook import as_fast_as_their_like
from headway.daemon.jobs.device_defaults import with_those_of
from headway.daemon.jobs.job import JobSpec
from headway.daemon.local.cards import local_devices, machine_cards
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.models.model_place import make_out
from headway.daemon.models.origin_config import read_parts
from headway.daemon.plan.cluster_plan import size
from headway.daemon.plan.schedule_choice import with_chosen_schedule
from headway.daemon.reports.metrics_file import METRICS_NAME, read_rows
from headway.daemon.reports.picture import Picture
from headway.daemon.reports.report_page import check_report, write_report
from headway.daemon.reports.watch_view import Display
from headway.stages.errors import PeerError

MODEL_NAME = "model"
FAILURE_NAME = "failure.log"
REPORT_NAME = "report.html"
TRACED_AT = 0.8
"""Share of the batches after which the pipeline is looked at, for the report."""
LAST_ROWS_S = 120.0
"""Time for the writers of [report] to take the last rows."""
ENDS_WITHIN_S = 10.0
"""Time for them to close what they write, when they are asked to end."""
DEATH_GRACE_S = 60.0
"""Time after the death of a process of the cluster for the coordinator to decide about the job."""

OnView = Callable[[LocalCluster, ClusterView, JobView], Awaitable[None]]


async def run_job(
    job_file: Path,
    *,
    num_nodes: int,
    most_nodes: int = 0,
    link: Link | None = None,
    out: Path,
    state_dir: Path | None = None,
    display: Display,
    force: asyncio.Event,
    etcd_binary: Path | None = None,
    on_view: OnView | None = None,
    environment: Mapping[str, str] | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> tuple[JobView, Picture | None]:
    """Train a job in its own cluster and write DIR/metrics.jsonl, DIR/report.html and DIR/model/; return the ended job
    and its picture, which is None if the cluster did not tell it.

    most_nodes: number of nodes with those that join later. environment: variables of every daemon.
    on_start: is called when nothing that the user wrote is at fault, and a cluster starts.

    An interrupted run continues when it is started again with its folder. Raises ConfigError, UnavailableError, and
    JobFailedError when the job did not finish.
    """
    state_dir = state_dir or out / "state"
    starting = LocalCluster(
        state_dir,
        num_nodes=num_nodes,
        most_nodes=most_nodes,
        etcd_binary=etcd_binary,
        force=force,
        environment=environment,
    )
    draft = read_draft(job_file, link=link)
    spec = draft.resolved_here(local_devices())
    check_report(out / REPORT_NAME)
    make_out(out, out / MODEL_NAME)  # all of the user's mistakes are reported before a cluster starts
    check_checkpoint_dir(spec, job_file=job_file, root=state_dir)
    if max(1.0, cores := num_cores()) < num_nodes and not machine_cards(environment):
        sys.stderr.write(f"headway: {crowding(spec, num_nodes, num_cores=cores, memory_bytes=memory_bytes())}\n")
    spec = read_parts(spec)
    on_start()
    async with (
        starting as cluster,
        ClusterSession(cluster.address) as session,
    ):
        if cluster.card_sharing:
            sys.stderr.write(f"headway: {cluster.card_sharing}\n")
        await _submit_or_continue(session, spec, out, named=draft.named or frozenset())
        training = _train(cluster, session, spec.job.name, out, display, on_view)
        job, picture = await unless(training, cluster.guard(grace_s=DEATH_GRACE_S))
        if job.phase.phase is Phase.FAILED:
            (out / FAILURE_NAME).write_text(job.phase.error + "\n", encoding="utf-8")
        check_finished(job, where=str(out / FAILURE_NAME))
        return job, picture


def crowding(spec: JobSpec, num_nodes: int, *, num_cores: float, memory_bytes: int) -> str:
    """Return a sentence on a machine with fewer cores than it is to have nodes.

    Raises ConfigError, with the planner's reason, for a job that does not fit into the memory of so many nodes.
    """

    def seconds(number: int) -> float:
        nodes = equal_nodes(number, memory_bytes=memory_bytes // number, num_cores=num_cores)
        return preview(spec, nodes)[0].plan.predicted_batch_seconds

    fewer = max(1, int(num_cores), spec.placement.min_nodes, sum(spec.placement.replicas))
    beside = f", {seconds(fewer):.3g} s with --nodes {fewer}" if fewer < num_nodes else ""
    return (
        f"{num_nodes} nodes share {num_cores:g} {'core' if num_cores == 1 else 'cores'} and {size(memory_bytes)} of "
        f"this machine: {seconds(num_nodes):.3g} s a batch predicted{beside}"
    )


async def _submit_or_continue(session: ClusterSession, spec: JobSpec, out: Path, *, named: Collection[str]) -> None:
    """Queue the job, or continue the one that an earlier run on this folder left: it decides what the file leaves
    open. named: the file's keys. Raises ConfigError for another one.
    """
    view = await session.view()
    found = view.jobs.get(spec.job.name)
    if found is None or found.spec is None:
        nodes = [*as_fast_as_their_like(view.nodes.values()).values()]
        spec, schedule = await asyncio.to_thread(with_chosen_schedule, spec, nodes)
        if schedule:
            sys.stderr.write(f"headway: {schedule}\n")
        (out / METRICS_NAME).unlink(missing_ok=True)
        (out / FAILURE_NAME).unlink(missing_ok=True)
        await submit(session, spec)
    elif found.spec != with_those_of(spec, found.spec, named=named):
        raise ConfigError("holds another job of this name; name another folder with --out", str(out))
    elif found.phase.phase in TERMINAL_PHASES and found.phase.phase is not Phase.FINISHED:
        raise ConfigError(
            f"holds this job, which is {found.phase.phase}; delete the folder, or name another with --out",
            str(out),
        )


async def _train(
    cluster: LocalCluster,
    session: ClusterSession,
    name: str,
    out: Path,
    display: Display,
    on_view: OnView | None,
) -> tuple[JobView, Picture | None]:
    from headway.daemon.client.export import export  # imports torch, which a refused job does not need
    from headway.daemon.models.adapter_folder import add_last_batch

    journal = JournalCopy(session, name, out / METRICS_NAME)
    spec = job_of(await session.view(), name).spec
    follower = await _write_elsewhere(cluster, spec) if spec is not None and spec.report.options else None
    tracing: asyncio.Task[tuple[TracedPipeline | None, str]] | None = None

    async def on_change(view: ClusterView, job: JobView) -> None:
        nonlocal tracing
        if on_view is not None:
            await on_view(cluster, view, job)
        await journal.on_view(view, job)  # last: a node may be slow to tell its rows
        if tracing is None and job.spec and job.progress and job.progress.batch >= TRACED_AT * job.spec.train.batches:
            tracing = asyncio.create_task(traced(session, name))

    try:
        with display:
            job = await follow_job(session, name, display=display, on_view=on_change)
        if job.phase.phase is Phase.FINISHED:
            await journal.copy_whole(job.checkpoint.boundary if job.checkpoint is not None else 0)
            await export(session, name, out / MODEL_NAME)
            try:
                for last in read_rows(out / METRICS_NAME)[-1:]:
                    add_last_batch(out / MODEL_NAME, last.as_json())
            except (ConfigError, OSError) as error:  # the model is complete all the same
                sys.stderr.write(f"headway: the model does not name its last batch: {error}\n")
        else:
            with suppress(PeerError, RecoveryError):
                await journal.copy(await session.view())
        picture = await draw_report(session, name, out, tracing)
        if follower is not None:
            with suppress(TimeoutError):  # it is told below, by what it did not write
                async with asyncio.timeout(LAST_ROWS_S):
                    await follower.wait()
        return job, picture
    finally:
        if tracing is not None:
            tracing.cancel()
        if follower is not None and follower.returncode != 0:
            sys.stderr.write("headway: [report] is not written to its end\n")
            if follower.returncode is None:
                follower.terminate()
                with suppress(TimeoutError):
                    async with asyncio.timeout(ENDS_WITHIN_S):
                        await follower.wait()
                if follower.returncode is None:
                    follower.kill()
                    await follower.wait()
        await journal.close()


async def _write_elsewhere(cluster: LocalCluster, spec: JobSpec) -> asyncio.subprocess.Process | None:
    """Start what writes a job's [report], in a process of its own: whatever becomes of it, the job goes on."""
    command = [sys.executable, "-m", "headway.daemon.cli.main", "history", spec.job.name, "--follow"]
    where = ["--cluster", str(cluster.state_dir), *spec.report.options]
    nowhere = asyncio.subprocess.DEVNULL
    try:
        return await asyncio.create_subprocess_exec(*command, *where, stdin=nowhere, stdout=nowhere)
    except OSError as error:
        sys.stderr.write(f"headway: [report] is not written: {error.strerror}\n")
        return None


async def draw_report(
    session: ClusterSession, name: str, out: Path, tracing: asyncio.Task[tuple[TracedPipeline | None, str]] | None
) -> Picture | None:
    """Write the report. Whatever goes wrong costs the report alone: the model is written."""
    try:
        pipeline = (await tracing)[0] if tracing is not None else None
        picture = await draw_job(session, name, rows=read_rows(out / METRICS_NAME), pipeline=pipeline)
        write_report(picture, out / REPORT_NAME)
    except Exception as error:
        sys.stderr.write(f"headway: no report: {type(error).__name__}: {error}\n")
        return None
    return picture
