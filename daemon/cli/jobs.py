"""Commands about jobs."""

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headway.daemon.cli.options import (
    AsJson,
    AsJsonLines,
    Certs,
    Cluster,
    Etcd,
    JobName,
    OutDir,
    say,
    say_json,
    say_table,
    with_cluster,
)

if TYPE_CHECKING:
    from headway.daemon.client.cluster_access import ClusterSession

WAIT_TIMEOUT_S = 1200.0
"""Maximum wait of --wait. A job may need this long because workers first compile."""

Wait = Annotated[bool, typer.Option("--wait", help="Wait until the job has reached its new phase.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    jobs_app = typer.Typer(invoke_without_command=True)
    jobs_app.callback()(jobs)
    jobs_app.command("rm")(remove)
    jobs_app.command()(sign)
    app.add_typer(jobs_app, name="jobs")
    for command in (status, watch, events, logs, pause, resume, cancel, export):
        app.command()(command)


def jobs(
    context: typer.Context, etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None, as_json: AsJson = False
) -> None:
    """List jobs in the order of their submission; `jobs rm JOB` forgets a job that is over.

    \b
    headway jobs --json
    """
    if context.invoked_subcommand is not None:
        return
    from headway.daemon.reports.job_report import reports_in
    from headway.daemon.reports.set_aside import date_and_time, retired_line, vanished_jobs

    async def work(session: "ClusterSession") -> None:
        view = await session.view()
        reports = reports_in(view, view.jobs_in_order())
        if as_json:
            say_json(reports)
        elif not reports:
            say("no jobs; `headway submit JOB.toml` makes one")
        else:
            rows = [
                (
                    report.name,
                    report.user,
                    str(report.priority),
                    report.phase,
                    f"{0 if report.batch is None else report.batch + 1}/{report.batches}",
                    "" if report.loss is None else f"{report.loss:.4f}",
                    date_and_time(report.submitted_at),
                    report.reason,
                )
                for report in reports
            ]
            say_table(("job", "user", "priority", "phase", "batches", "loss", "submitted", "why"), rows)
        for name, text in vanished_jobs(view).items():
            sys.stderr.write(f"headway: job {name}: {text}\n")
        if view.retired and not as_json:
            say(retired_line(len(view.retired)))

    with_cluster(etcd, certs, cluster, work)


def remove(job: JobName, etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None) -> None:
    """Forget a job that is finished, failed, cancelled or paused. Its checkpoints stay.

    \b
    headway jobs rm my-job
    """
    from headway.daemon.client import job_requests

    _ask(job, job_requests.remove, etcd, certs, cluster)


def sign(
    names: Annotated[list[str], typer.Argument(metavar="JOB…", help="Jobs that go on.")],
    etcd: Etcd = None,
    certs: Certs = None,
    cluster: Cluster = None,
) -> None:
    """Sign jobs again with your certificate, so that they outlive the authority of the operator who submitted them.

    Nothing else of the jobs changes, and they train meanwhile. See `headway certs rotate`.

    \b
    headway jobs sign my-job
    """
    from headway.daemon.client.job_requests import sign as ask

    async def work(session: "ClusterSession") -> list[str]:
        return await ask(session, names)

    for line in with_cluster(etcd, certs, cluster, work):
        say(line)


def status(
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="The job's name; every job when not given.")] = "",
    daemon: Annotated[
        str, typer.Option("--daemon", metavar="HOST:PORT", help="Ask this daemon instead of etcd.", show_default=False)
    ] = "",
    etcd: Etcd = None,
    certs: Certs = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
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
    from headway.daemon.cli.job_status import show_status

    show_status(job, daemon=daemon, etcd=etcd, certs=certs, cluster=cluster, as_json=as_json)


def watch(
    job: JobName, etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None, as_json: AsJsonLines = False
) -> None:
    """Show a job until it is over.

    Batches since the newest restorable boundary are provisional: after a failure they are computed again. The new
    results have equal bits and replace the ones shown.

    \b
    headway watch my-job
    """
    from headway.daemon.client.job_watch import check_finished, follow_job
    from headway.daemon.reports.watch_view import open_display

    async def work(session: "ClusterSession") -> None:
        with open_display(as_json=as_json) as display:
            found = await session.while_reachable(follow_job(session, job, display=display))
        check_finished(found, where=f"`headway logs {job}`")

    with_cluster(etcd, certs, cluster, work)


def events(
    job: JobName, etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None, as_json: AsJson = False
) -> None:
    """Show why each plan changed, in sentences, and on stderr what ails its nodes now.

    \b
    headway events my-job
    """
    from headway.daemon.client.job_requests import job_of
    from headway.daemon.reports.job_report import ailments_of
    from headway.daemon.reports.set_aside import date_and_time

    async def work(session: "ClusterSession") -> None:
        view = await session.view()
        found = job_of(view, job)
        records = [found.events[number] for number in sorted(found.events)]
        for line in ailments_of(found, view.nodes):
            sys.stderr.write(f"headway: now {line}\n")
        if as_json:
            say_json(records)
            return
        for record in records:
            say(f"{date_and_time(record.at)}  generation {record.generation}  {record.text}")

    with_cluster(etcd, certs, cluster, work)


def logs(
    job: JobName,
    node: Annotated[str, typer.Option(help="Only this node's workers.", show_default=False)] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines as they are written.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of last lines of each worker; 0: all.")
    ] = 0,
    etcd: Etcd = None,
    certs: Certs = None,
    cluster: Cluster = None,
    as_json: AsJsonLines = False,
) -> None:
    """Show the output of a job's workers, through any daemon.

    \b
    headway logs my-job --follow
    """
    from headway.daemon.client.job_watch import read_logs

    async def work(session: "ClusterSession") -> None:
        import msgspec

        async for line in read_logs(session, job, node=node, follow=follow, last_lines=lines):
            if as_json:
                say(msgspec.json.encode({"node": line.node, "text": line.text}).decode())
            else:
                say(f"{line.node} | {line.text}")

    with_cluster(etcd, certs, cluster, work)


def pause(job: JobName, wait: Wait = False, etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None) -> None:
    """Stop a job after the batches that it has begun, and write a checkpoint.

    \b
    headway pause my-job --wait
    """
    from headway.daemon.client import job_requests
    from headway.daemon.records.records import Phase

    _ask(job, job_requests.pause, etcd, certs, cluster, wait_for=frozenset({Phase.PAUSED}) if wait else None)


def resume(job: JobName, wait: Wait = False, etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None) -> None:
    """Let a paused or failed job continue from the newest state that is left: state that nodes hold, or its checkpoint.

    \b
    headway resume my-job
    """
    from headway.daemon.client import job_requests
    from headway.daemon.records.records import Phase

    _ask(job, job_requests.resume, etcd, certs, cluster, wait_for=frozenset({Phase.RUNNING}) if wait else None)


def cancel(job: JobName, wait: Wait = False, etcd: Etcd = None, certs: Certs = None, cluster: Cluster = None) -> None:
    """End a job now, without a checkpoint.

    \b
    headway cancel my-job
    """
    from headway.daemon.client import job_requests
    from headway.daemon.records.records import Phase

    _ask(job, job_requests.cancel, etcd, certs, cluster, wait_for=frozenset({Phase.CANCELLED}) if wait else None)


def export(
    job: JobName,
    out: OutDir,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model that `headway export` did not write.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Default: that of the folder from which the job started, else float32.", show_default=False),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Add a job's adapters to the weights beside them.")] = False,
    etcd: Etcd = None,
    certs: Certs = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Write a job's newest boundary as a folder that AutoModelForCausalLM opens.

    A job with an [adapter] gives a folder that PEFT opens; --merge gives the whole model. An earlier export in the
    folder stays until the new one is complete. Files that belong to no model stay.

    \b
    headway export my-job --out exported
    headway export my-job --out exported --dtype bfloat16
    headway export my-job --out exported --merge
    """
    from headway.daemon.client.export import export as export_job
    from headway.daemon.terminal import behind

    async def work(session: "ClusterSession") -> None:
        def show(done: int, total: int) -> None:
            if sys.stderr.isatty():
                drawn = behind(sys.stderr)
                drawn.write(f"\rlayer {done}/{total} " + ("\n" if done == total else ""))
                drawn.flush()

        def warn(line: str) -> None:
            sys.stderr.write(f"headway: {line}\n")

        boundary = await export_job(
            session, job, out, force=force, dtype=dtype, merge=merge, on_warning=warn, on_layer=show
        )
        if as_json:
            say_json({"job": job, "boundary": boundary.number, "out": str(out)})
        else:
            say(f"{out}: the model after {boundary.number} batches")

    with_cluster(etcd, certs, cluster, work)


def _ask(
    job: str,
    request: Callable[["ClusterSession", str], Coroutine[Any, Any, str]],
    etcd: str | None,
    certs: Path | None,
    cluster: Path | None,
    wait_for: frozenset[Any] | None = None,
) -> None:
    async def work(session: "ClusterSession") -> None:
        answer = await request(session, job)
        if wait_for is not None:
            from headway.daemon.client.job_watch import wait_for_phase

            found = await wait_for_phase(session, job, wait_for, timeout_s=WAIT_TIMEOUT_S)
            answer = f"{job}: {found.phase.phase}"
        say(answer)

    with_cluster(etcd, certs, cluster, work)
