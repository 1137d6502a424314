"""The requests that people make about jobs, as transactions: submit, pause, resume, cancel, remove.

Each request answers with one sentence.
"""

import getpass
import os
import secrets
import socket
import time

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.errors import ConfigError, ConflictError
from headway.daemon.jobs.job import JobSpec
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import (
    TERMINAL_PHASES,
    CheckpointRecord,
    Desired,
    DesiredRecord,
    EventRecord,
    NodeRecord,
    Phase,
    PhaseRecord,
    SpecRecord,
)
from headway.daemon.reports.retired_jobs import sentence_on
from headway.daemon.reports.set_aside import vanished_jobs
from headway.daemon.view.admission import why_refused
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView
from headway.daemon.view.retirement import retired_record

REMOVABLE_PHASES = TERMINAL_PHASES | {Phase.PAUSED}
MOST_NAMED = 20
"""Maximum number of jobs that an error names, the newest."""
MAX_ATTEMPTS = 5


async def submit(
    session: ClusterSession,
    spec: JobSpec,
    *,
    checkpoint: CheckpointRecord | None = None,
    generation: int = 0,
    changed: str = "",
) -> None:
    """Put a resolved job in the queue. Raises ConfigError when its name is in use.

    checkpoint: the start of the job. generation: the highest generation handed out before the checkpoint was written.
    changed: the keys in which the job differs from the checkpoint's, for its events.
    """
    from headway.daemon.etcd.transaction import Compare, Put
    from headway.daemon.rpc.job_signature import signed

    name = spec.job.name
    record = SpecRecord(
        spec=spec,
        uid=secrets.token_hex(8),
        parent=f"{checkpoint.origin_job}, boundary {checkpoint.boundary}" if checkpoint is not None else "",
        submitted_at=time.time(),
        submitted_by=submitter(),
    )
    if why := why_refused(record, name):
        raise ConfigError(why, f"job {name}")
    now = time.time()
    first = PhaseRecord(reason="submitted", generation=generation, since=now, num_events=1 if changed else 0)
    changes = [
        Put(Keys.of(name, "spec"), signed(record, session.identity)),
        Put(Keys.of(name, "desired"), encode(DesiredRecord())),
        Put(Keys.of(name, "phase"), encode(first)),
    ]
    if checkpoint is not None:
        changes.append(Put(Keys.of(name, "checkpoint"), encode(checkpoint)))
    if changed:
        event = EventRecord(at=now, text=f"Changed since {record.parent}: {changed}", generation=generation)
        changes.append(Put(Keys.event(name, 0), encode(event)))
    try:
        await session.client.transaction([Compare.absent(Keys.of(name, "spec"))], changes)
    except ConflictError as error:
        job = (await session.view()).jobs.get(name)
        phase = f" ({job.phase.phase})" if job else ""
        is_active = job is not None and job.phase.phase not in REMOVABLE_PHASES
        remedy = f"end that job with `headway cancel {name}`, and then" if is_active else "remove that job with"
        raise ConfigError(
            f"this name is in use{phase}; choose another, or {remedy} `headway jobs rm {name}`", f"job {name}"
        ) from error


def submitter() -> str:
    """Return `user@host`. In a container whose user has no name, use the user's number."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


async def find_job(session: ClusterSession, name: str) -> JobView:
    """Return a job by name. Raises ConfigError with the names that exist."""
    return job_of(await session.view(), name)


def job_of(view: ClusterView, name: str) -> JobView:
    """Return a job of a view. Raises ConfigError with the names that exist."""
    job = view.jobs.get(name)
    if job is None or job.submission is None:
        if why := view.why_set_aside(name):
            raise ConfigError(f"{why}; delete its keys, or write them again", f"job {name}")
        if name in (vanished := vanished_jobs(view)):
            raise ConfigError(vanished[name], f"job {name}")
        if name in view.retired:
            raise ConfigError(sentence_on(view.retired[name]), f"job {name}")
        known = [other.name for other in view.jobs_in_order()]
        hint = "there are no jobs; `headway submit JOB.toml` makes one"
        if known:
            more = f" and {len(known) - MOST_NAMED} older ones" if len(known) > MOST_NAMED else ""
            hint = f"there are {', '.join(known[-MOST_NAMED:])}{more}"
        raise ConfigError(f"no such job; {hint}", f"job {name}")
    return job


async def pause(session: ClusterSession, name: str) -> str:
    """Ask a job to stop and write a checkpoint."""
    job = await _request(session, name, Desired.PAUSED, refuse=TERMINAL_PHASES)
    return f"{name}: is already paused" if job.phase.phase is Phase.PAUSED else f"{name}: pause requested"


async def resume(session: ClusterSession, name: str) -> str:
    """Ask a paused or failed job to continue from the newest state: state that nodes hold, or its checkpoint."""
    if why := (await find_job(session, name)).refusal:
        raise ConfigError(
            f"{why}; the job cannot continue: cancel it, and submit a job that keeps the rule", f"job {name}"
        )
    over = frozenset({Phase.FINISHED, Phase.CANCELLED})
    remedy = f"; `headway jobs rm {name}` and `headway submit --from CHECKPOINT` make a new job of its checkpoint"
    job = await _request(session, name, Desired.RUNNING, refuse=over, remedy=remedy)
    if job.phase.phase not in (Phase.PAUSED, Phase.FAILED):
        return f"{name}: continues; it is {job.phase.phase} now"
    start = f"batch {job.checkpoint.boundary}" if job.checkpoint else "the beginning"
    newer = ", or from a newer boundary that nodes hold" if job.phase.lineage is not None else ""
    return f"{name}: continues from {start}{newer}"


async def cancel(session: ClusterSession, name: str) -> str:
    """Ask a job to end now; its checkpoints stay."""
    await _request(session, name, Desired.CANCELLED, refuse=frozenset({Phase.FINISHED, Phase.CANCELLED}))
    return f"{name}: cancel requested"


async def remove(session: ClusterSession, name: str) -> str:
    """Forget a job that is over or paused. Its checkpoint folder stays. Raises ConfigError while it is active."""
    from headway.daemon.etcd.transaction import Compare, Delete, Put

    for _ in range(MAX_ATTEMPTS):
        view = await session.view()
        job = job_of(view, name)
        if job.phase.phase not in REMOVABLE_PHASES:
            raise ConfigError(f"is {job.phase.phase}; first `headway cancel {name}`", f"job {name}")
        key = Keys.of(name, "phase")
        left = Put(Keys.retired(name), encode(retired_record(view, job, now=time.time())))
        try:
            await session.client.transaction(
                [Compare.unchanged(key, view.revision_of(key))], [left, Delete(Keys.job(name), is_prefix=True)]
            )
        except ConflictError:
            continue
        return f"{name}: removed{_kept(session, job)}"
    raise ConflictError(f"job {name}", "keeps changing; try again")


def _kept(session: ClusterSession, job: JobView) -> str:
    if job.checkpoint is None:
        return ""
    url, root = job.checkpoint.url, session.address.state_dir
    is_relative = "://" not in url and not url.startswith("/")
    return f"; its checkpoint stays at {root / url if root is not None and is_relative else url}"


async def _request(
    session: ClusterSession, name: str, wanted: Desired, *, refuse: frozenset[Phase], remedy: str = ""
) -> JobView:
    """Write the requested phase with a new request number. Return the job before the request."""
    from headway.daemon.etcd.transaction import Compare, Put

    for _ in range(MAX_ATTEMPTS):
        view = await session.view()
        job = job_of(view, name)
        if job.phase.phase in refuse:
            raise ConfigError(f"is {job.phase.phase} already{remedy}", f"job {name}")
        key = Keys.of(name, "desired")
        record = DesiredRecord(state=wanted, request=max(job.desired.request, job.phase.request) + 1)
        try:
            await session.client.transaction(
                [Compare.present(Keys.of(name, "spec")), Compare.unchanged(key, view.revision_of(key))],
                [Put(key, encode(record))],
            )
        except ConflictError:
            continue
        return job
    raise ConflictError(f"job {name}", "keeps changing; try again")


def node_of(view: ClusterView, name: str) -> NodeRecord:
    """Return a node of a view. Raises ConfigError with the names that exist."""
    node = view.nodes.get(name)
    if node is None:
        known = ", ".join(sorted(view.nodes)) or "no node is up"
        raise ConfigError(f"no such node; these nodes are up: {known}", f"node {name}")
    return node
