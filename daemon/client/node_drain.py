"""The requests that people make about nodes: drain a node, undo the drain, or trust the node again."""

from dataclasses import replace

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import node_of
from headway.daemon.errors import ConfigError, ConflictError
from headway.daemon.etcd.transaction import Compare, Delete, Put
from headway.daemon.records.format import UnreadableRecordError, decode, encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import NodeRecord
from headway.daemon.view.job_view import JobView

MAX_ATTEMPTS = 5


async def drain(session: ClusterSession, name: str) -> str:
    """Mark a node as draining, under the node's lease, so that the mark ends with the lease. Raises ConfigError."""
    if not await _mark(session, name, is_draining=True):
        return f"{name}: is already draining"
    view = await session.view()
    jobs = [job.name for job in view.jobs_in_order() if _works_for(name, job)]
    if not jobs:
        return f"{name}: holds layers of no job, and takes no work until `headway nodes release {name}`"
    more = f", and also those of {', '.join(jobs[1:])}" if jobs[1:] else ""
    return f"{name}: its layers are being moved; `headway events {jobs[0]}` shows the moves{more}"


def _works_for(node: str, job: JobView) -> bool:
    """Return whether a job's plan, or the next one, gives a node layers."""
    return any(stage.node == node for plan in (job.plan, job.next) if plan is not None for stage in plan.stages)


async def release(session: ClusterSession, name: str) -> str:
    """Forget a node's failures and its drain mark, so that plans may use it again. Raises ConfigError."""
    view = await session.view()
    failures = view.failures.get(name, {})
    if name not in view.nodes and not failures:
        node_of(view, name)  # raises ConfigError with the names that exist
    if failures:
        await session.client.transaction([], [Delete(f"{Keys.FAILURES}{name}/", is_prefix=True)])
    was_draining = name in view.nodes and await _mark(session, name, is_draining=False)
    if not failures and not was_draining:
        return f"{name}: is neither draining nor in quarantine"
    what = [f"{len(failures)} failure{'s' * (len(failures) != 1)} forgotten"] if failures else []
    what += ["no longer draining"] if was_draining else []
    return f"{name}: {', '.join(what)}; plans may use it again"


async def _mark(session: ClusterSession, name: str, *, is_draining: bool) -> bool:
    """Set or remove the drain mark; return whether it changed. Raises ConfigError."""
    for _ in range(MAX_ATTEMPTS):
        entry = await session.client.get(Keys.node(name))
        if entry is None:
            node_of(await session.view(), name)  # raises ConfigError with the names that exist
            continue
        try:
            record = decode(entry.value, NodeRecord)
        except UnreadableRecordError as error:
            raise ConfigError(f"its record cannot be read: {error}", f"node {name}") from error
        if record.is_draining is is_draining:
            return False
        try:
            await session.client.transaction(
                [Compare.unchanged(entry.key, entry.mod_revision)],
                [Put(entry.key, encode(replace(record, is_draining=is_draining)), lease_id=entry.lease_id)],
            )
        except ConflictError:
            continue
        return True
    raise ConflictError(f"node {name}", "its record keeps changing; try again")
