"""The requests that people make about nodes and users: drain or trust a node, weigh a user."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.terminal import counted
from headway.daemon.client.cluster_access import ClusterSession, change
from headway.daemon.client.job_requests import node_of
from headway.daemon.cluster.cluster_records import SharesRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import TERMINAL_PHASES
from headway.daemon.cluster.transaction import Change, Compare, Delete, Put
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.usage import (
    LEAST_HALF_LIFE_S,
    LEAST_SLICE_S,
    LEAST_WEIGHT,
    LONGEST_S,
    MOST_WEIGHT,
    per_share,
    weight,
)


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
    return any(stage.node == node for plan in (job.plan, job.next) if plan is not None for stage in plan.workers)


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
    what = [f"{counted(len(failures), 'failure')} forgotten"] if failures else []
    what += ["no longer draining"] if was_draining else []
    return f"{name}: {', '.join(what)}; plans may use it again"


async def _mark(session: ClusterSession, name: str, *, is_draining: bool) -> bool:
    """Set or remove the drain mark; return whether it changed. Raises ConfigError."""

    def marked(view: ClusterView) -> tuple[list[Compare], list[Change], bool]:
        key, record = Keys.node(name), node_of(view, name)
        if record.is_draining is is_draining:
            return [], [], False
        mark = Put(key, encode(replace(record, is_draining=is_draining)), keeps_lease=True)
        return [Compare.unchanged(key, view.revision_of(key))], [mark], True

    return await change(session, f"node {name}", marked)


MAX_USERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class UserShare:
    """One line of `headway shares`."""

    user: str
    weight: float
    share: float
    """Share of the cluster among the users who have jobs now; 0 for others."""
    used: float
    """Recent device-seconds; older use has decayed."""
    used_per_weight: float
    """Use per weight: the user with the least is served next."""
    num_jobs: int
    """Number of jobs that are not over."""
    num_devices: int


def report_shares(view: ClusterView, *, now: float | None = None) -> tuple[UserShare, ...]:
    """Return every user who has a weight, an active job or recent use; the user served next comes first."""
    shares, used = view.shares, view.usage.read_out(time.monotonic() if now is None else now)
    active = [job for job in view.jobs.values() if job.submission is not None]
    active = [job for job in active if job.phase.phase not in TERMINAL_PHASES]
    users = {*shares.weights, *used, *(job.user for job in active)}
    whole = sum(weight(user, shares) for user in {job.user for job in active})
    lines = []
    for user in users:
        own = [job for job in active if job.user == user]
        lines.append(
            UserShare(
                user=user,
                weight=weight(user, shares),
                share=weight(user, shares) / whole if own else 0.0,
                used=used.get(user, 0.0),
                used_per_weight=per_share(used, user, shares),
                num_jobs=len(own),
                num_devices=sum(len(job.devices) for job in own),
            )
        )
    return tuple(sorted(lines, key=lambda line: (line.used_per_weight, line.user)))


async def set_share(session: ClusterSession, user: str, told: float) -> str:
    """Set the weight of a user; the default is 1. Raises ConfigError."""
    if not user or len(user) > 128 or not user.isprintable():
        raise ConfigError("a user's name has 1 to 128 printable characters", "shares")
    if not LEAST_WEIGHT <= told <= MOST_WEIGHT:
        raise ConfigError(f"a weight is between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}, not {told:g}", f"user {user}")

    def changed(record: SharesRecord) -> SharesRecord:
        weights = {name: value for name, value in record.weights.items() if name != user}
        if told != 1.0:
            weights[user] = told
        if len(weights) > MAX_USERS:
            raise ConfigError(f"at most {MAX_USERS} users can have their own weight", f"user {user}")
        return replace(record, weights=dict(sorted(weights.items())))

    await _change(session, changed)
    return f"{user}: has weight {told:g}"


async def set_times(session: ClusterSession, *, slice_s: float | None, half_life_s: float | None) -> str:
    """Change the time slice of a started job, or the half-life of past use. Raises ConfigError."""
    for told, least, name in ((slice_s, LEAST_SLICE_S, "--slice"), (half_life_s, LEAST_HALF_LIFE_S, "--half-life")):
        if told is not None and not least <= told <= LONGEST_S:
            raise ConfigError(f"is between {least:g} and {LONGEST_S:g} seconds, not {told:g}", name)

    def changed(record: SharesRecord) -> SharesRecord:
        return replace(
            record,
            slice_s=record.slice_s if slice_s is None else slice_s,
            half_life_s=record.half_life_s if half_life_s is None else half_life_s,
        )

    return describe(await _change(session, changed))


def describe(record: SharesRecord) -> str:
    """Return the cluster's times on one line."""
    return f"a started job keeps its devices for {record.slice_s:g} s; past use halves every {record.half_life_s:g} s"


async def _change(session: ClusterSession, changed: Callable[[SharesRecord], SharesRecord]) -> SharesRecord:
    def changes_of(view: ClusterView) -> tuple[list[Compare], list[Change], SharesRecord]:
        record = changed(view.shares)
        unchanged = Compare.unchanged(Keys.SHARES, view.revision_of(Keys.SHARES))
        return [unchanged], [Put(Keys.SHARES, encode(record))], record

    return await change(session, "shares", changes_of)
