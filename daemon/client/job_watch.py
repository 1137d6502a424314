"""Follows a job to its end: shows its progress, and reports its end."""

import asyncio
from collections.abc import Awaitable, Callable

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import job_of
from headway.daemon.errors import JobFailedError
from headway.daemon.records.records import TERMINAL_PHASES, Desired, Phase
from headway.daemon.reports.watch_view import Display, LossHistory, snapshot
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView

OnView = Callable[[ClusterView, JobView], Awaitable[None]]


async def follow_job(
    session: ClusterSession,
    name: str,
    *,
    display: Display,
    on_view: OnView | None = None,
) -> JobView:
    """Show a job until it has ended; return it.

    on_view is awaited with every state of the cluster, including the last, before it is shown. Raises ConfigError when
    the job does not exist or is removed while it is watched.
    """
    history = LossHistory()
    views = session.follow()
    try:
        async for view in views:
            job = job_of(view, name)
            if on_view is not None:
                await on_view(view, job)
            if (shown := snapshot(view, name, history)) is not None:
                display.show(shown)
            if job.phase.phase in TERMINAL_PHASES and not is_resumed(job):
                return job
    finally:
        await views.aclose()
    raise AssertionError("a cluster is followed for ever")


async def wait_for_phase(session: ClusterSession, name: str, phases: frozenset[Phase], *, timeout_s: float) -> JobView:
    """Wait until a job has one of some phases, or has ended. Raises TimeoutError with its present phase."""
    job: JobView | None = None
    views = session.follow()
    try:
        async with asyncio.timeout(timeout_s):
            async for view in views:
                job = job_of(view, name)
                if job.phase.phase in phases | TERMINAL_PHASES and not is_resumed(job):
                    return job
    except TimeoutError as error:
        now = job.phase.phase if job else "unknown"
        raise TimeoutError(f"job {name}: still {now} after {timeout_s:g} s") from error
    finally:
        await views.aclose()
    raise AssertionError("a cluster is followed for ever")


def is_resumed(job: JobView) -> bool:
    """Return whether a failed job was asked to continue and the leader has not answered yet."""
    wanted = job.desired
    return job.phase.phase is Phase.FAILED and wanted.state is Desired.RUNNING and wanted.request > job.phase.request


def check_finished(job: JobView, *, where: str) -> None:
    """Raise JobFailedError unless the job has finished. where: the file or command that shows more."""
    if job.phase.phase is Phase.FINISHED:
        return
    lines = job.phase.error.strip().splitlines()
    raise JobFailedError(
        job.name, job.phase.phase.value, job.phase.reason, last_line=traceback_line(lines), where=where
    )


def traceback_line(lines: list[str]) -> str:
    """Return the line of a failed worker's text that names the exception: the first line after the last traceback.

    Without a traceback it is the first line, which says how the worker ended; its log follows.

    """
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
    for line in lines[starts[-1] + 1 :] if starts else []:
        if line and not line[0].isspace():
            return line
    return lines[0] if lines else ""
