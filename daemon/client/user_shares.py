"""The shares of users: the weights that an administrator has set, and each user's recent use."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.errors import ConfigError, ConflictError
from headway.daemon.records.cluster_records import SharesRecord
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import TERMINAL_PHASES
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.usage import (
    LEAST_HALF_LIFE_S,
    LEAST_SLICE_S,
    LEAST_WEIGHT,
    LONGEST_S,
    MOST_WEIGHT,
    per_share,
    weight,
)

MAX_ATTEMPTS = 5
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
    from headway.daemon.etcd.transaction import Compare, Put

    for _ in range(MAX_ATTEMPTS):
        view = await session.view()
        record = changed(view.shares)
        try:
            compare = Compare.unchanged(Keys.SHARES, view.revision_of(Keys.SHARES))
            await session.client.transaction([compare], [Put(Keys.SHARES, encode(record))])
        except ConflictError:
            continue
        return record
    raise ConflictError("shares", "keep changing; try again")
