"""The requests that people make about jobs, as transactions; and what a daemon knows of them while etcd is away.

Each request answers with one sentence.
"""

import getpass
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import ConfigError, ConflictError
from headway.daemon.client.cluster_access import ClusterSession, change, first_answer, names_of, node_client
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import (
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
from headway.daemon.cluster.transaction import Change, Compare, Delete, Put
from headway.daemon.decide.admission import why_refused
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.retirement import retired_record
from headway.daemon.jobs.job import JobSpec
from headway.daemon.reports.job_report import JobReport, duration
from headway.daemon.reports.node_list import sentence_on, vanished_jobs
from headway.proto.control_pb2 import StatusReply
from headway.stages.errors import ProtocolError
from headway.stages.sockets.tls_identity import TlsIdentity

REMOVABLE_PHASES = TERMINAL_PHASES | {Phase.PAUSED}
MOST_NAMED = 20
"""Maximum number of jobs that an error names, the newest."""


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

    name = spec.job.name
    mine = names_of(session.identity)
    if mine and session.address.state_dir is not None:
        mine = ()  # a local cluster has one certificate for everybody
    record = SpecRecord(
        spec=spec,
        uid=secrets.token_hex(8),
        parent=f"{checkpoint.origin_job}, boundary {checkpoint.boundary}" if checkpoint is not None else "",
        submitted_at=time.time(),
        submitted_by=f"{mine[0]}@{socket.gethostname()}" if mine else submitter(),
    )
    if why := why_refused(record, name):
        raise ConfigError(why, f"job {name}")
    now = time.time()
    first = PhaseRecord(reason="submitted", generation=generation, since=now, num_events=1 if changed else 0)
    changes = [
        Put(Keys.of(name, "spec"), encode(record)),
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
            raise ConfigError(why, f"job {name}")
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

    def removed(view: ClusterView) -> tuple[list[Compare], list[Change], JobView]:
        job, key = job_of(view, name), Keys.of(name, "phase")
        if job.phase.phase not in REMOVABLE_PHASES:
            raise ConfigError(f"is {job.phase.phase}; first `headway cancel {name}`", f"job {name}")
        left = Put(Keys.retired(name), encode(retired_record(view, job, now=time.time())))
        unchanged = Compare.unchanged(key, view.revision_of(key))
        return [unchanged], [left, Delete(Keys.job(name), is_prefix=True)], job

    return f"{name}: removed{_kept(session, await change(session, f'job {name}', removed))}"


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

    def requested(view: ClusterView) -> tuple[list[Compare], list[Change], JobView]:
        job, key = job_of(view, name), Keys.of(name, "desired")
        if job.phase.phase in refuse:
            raise ConfigError(f"is {job.phase.phase} already{remedy}", f"job {name}")
        record = DesiredRecord(state=wanted, request=max(job.desired.request, job.phase.request) + 1)
        is_there = Compare.present(Keys.of(name, "spec"))
        return [is_there, Compare.unchanged(key, view.revision_of(key))], [Put(key, encode(record))], job

    return await change(session, f"job {name}", requested)


def node_of(view: ClusterView, name: str) -> NodeRecord:
    """Return a node of a view. Raises ConfigError with the names that exist."""
    node = view.nodes.get(name)
    if (unreadable := view.unreadable.get(Keys.node(name))) is not None:
        raise ConfigError(f"its record cannot be read: {unreadable.reason}", f"node {name}")
    if node is None:
        known = ", ".join(sorted(view.nodes)) or "no node is up"
        raise ConfigError(f"no such node; these nodes are up: {known}", f"node {name}")
    return node


ANSWER_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStatus:
    """One daemon's answer."""

    node: str
    etcd_reachable: bool
    etcd_away_s: float
    waits_for: str
    jobs: dict[str, Any]
    """Job to its report, as plain values."""

    @classmethod
    def of(cls, reply: StatusReply) -> Self:
        """Return a daemon's reply. Raises ValueError, RecursionError for one that cannot be read."""
        return cls(
            node=reply.node,
            etcd_reachable=reply.etcd_reachable,
            etcd_away_s=reply.etcd_away_s,
            waits_for=reply.waits_for,
            jobs=msgspec.json.decode(reply.jobs),
        )

    def report(self, job: str) -> JobReport:
        """Return the report of one job. Raises ConfigError with the names that the daemon knows."""
        if job not in self.jobs:
            known = ", ".join(self.jobs) or "none"
            raise ConfigError(f"no such job; node {self.node} knows {known}", f"job {job}")
        return msgspec.convert(self.jobs[job], JobReport)

    @property
    def line(self) -> str:
        """Return a line that says whether etcd answers and, if it does not, what waits for it."""
        if self.etcd_reachable:
            return f"node {self.node} reaches etcd"
        return (
            f"etcd has been away for {duration(self.etcd_away_s)}, says node {self.node}; training continues; "
            f"these wait for etcd: {self.waits_for}"
        )


async def ask_daemons(daemons: Sequence[NodeEndpoint], identity: TlsIdentity | None) -> DaemonStatus:
    """Return the answer of the first daemon that answers. Raises UnavailableError, naming all, when none does."""

    async def ask(daemon: NodeEndpoint) -> DaemonStatus:
        try:
            return DaemonStatus.of(await client.status(daemon, timeout_s=ANSWER_TIMEOUT_S))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"node at {daemon.address}", f"sent an unreadable status: {error}") from error

    async with node_client(identity) as client:
        return await first_answer(daemons, ask)
