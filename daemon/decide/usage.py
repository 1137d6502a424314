"""Counts the recent device-seconds of each user: as jobs take and leave devices, with decay. Pure.

Every daemon counts while it watches etcd. The leader records its count once a minute, and the others continue from the
record. So a new leader loses nothing, and a cluster that was down counts no time. No two clocks are compared.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from headway.daemon.cluster.cluster_records import SharesRecord, UsageRecord

WRITTEN_EVERY_S: Final = 60.0
MAX_USERS: Final = 1000
"""Maximum number of users in the record: those with the largest use. Others count as newcomers."""
WORTH_REMEMBERING_S: Final = 1.0
"""A user with fewer device-seconds than this is forgotten."""
EQUAL_WITHIN: Final = 0.1
"""Fraction of a time slice. Users whose use differs by less count as equal; their jobs go first in, first out."""
LEAST_WEIGHT: Final = 0.01
MOST_WEIGHT: Final = 1000.0
LEAST_SLICE_S: Final = 1.0
LEAST_HALF_LIFE_S: Final = 60.0
LONGEST_S: Final = 30 * 86400.0
"""Maximum length of a slice and of a half-life."""
MOST_USED_S: Final = 1e12
"""Maximum use of one user: thirty thousand devices for a year."""
MAX_NAME: Final = 512
"""Maximum number of characters of a user's name."""


@dataclass(slots=True)
class UsageMeter:
    """Device-seconds by user at the time `at`."""

    seconds: dict[str, float] = field(default_factory=dict)
    at: float | None = None
    written_at: float | None = None
    """Time at which the record was last seen, or the meter began."""
    half_life_s: float = SharesRecord().half_life_s
    held: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Job to its user and its number of devices."""
    has_unwritten: bool = False
    """True if anything was used since the record was last seen."""

    def hold(self, job: str, user: str, num_devices: int, *, now: float) -> None:
        """Note how many devices a job has from now on."""
        before = self.held.get(job)
        if before == (user, num_devices) or (before is None and not num_devices):
            return
        self.advance(now)
        if num_devices:
            self.held[job] = user, num_devices
        else:
            del self.held[job]

    def read(self, record: UsageRecord, *, now: float) -> None:
        """Continue from the leader's record."""
        self.seconds, self.at, self.written_at, self.has_unwritten = dict(record.seconds), now, now, False

    def advance(self, now: float) -> None:
        """Count until now. The decay of use during the interval is exact."""
        if self.at is None:
            self.at = self.written_at = now
        elapsed_s = max(now - self.at, 0.0)
        if not elapsed_s:
            return
        self.seconds, self.at = self.read_out(now), now
        self.has_unwritten |= bool(self.held)

    def read_out(self, now: float) -> dict[str, float]:
        """Return device-seconds by user at a moment; the meter does not change."""
        elapsed_s = max(now - self.at, 0.0) if self.at is not None else 0.0
        kept = 2.0 ** (-elapsed_s / self.half_life_s)
        found = {user: seconds * kept for user, seconds in self.seconds.items()}
        # ∫ 2^(−t/h) dt from 0 to the elapsed time: the contribution of one device.
        added = self.half_life_s / math.log(2.0) * (1.0 - kept)
        for user, num_devices in self.held.values():
            found[user] = found.get(user, 0.0) + num_devices * added
        return found

    def due_at(self) -> float | None:
        """Return when the leader has to record the count; None: nobody has used anything since."""
        if self.written_at is None or not (self.held or self.has_unwritten):
            return None
        return self.written_at + WRITTEN_EVERY_S

    def record(self, *, now: float, written_at: float) -> UsageRecord:
        """Return the count as a record."""
        found = {user: round(seconds, 1) for user, seconds in self.read_out(now).items()}
        worth = sorted((user for user in found if found[user] >= WORTH_REMEMBERING_S), key=lambda user: -found[user])
        return UsageRecord(seconds={user: found[user] for user in sorted(worth[:MAX_USERS])}, at=written_at)


def why_no_shares(record: SharesRecord) -> str:
    """Return the error in a record of shares; empty: none."""
    if not all(LEAST_WEIGHT <= told <= MOST_WEIGHT for told in record.weights.values()):
        return f"a weight is between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}"
    if not LEAST_SLICE_S <= record.slice_s <= LONGEST_S:
        return f"a slice is between {LEAST_SLICE_S:g} and {LONGEST_S:g} seconds"
    if not LEAST_HALF_LIFE_S <= record.half_life_s <= LONGEST_S:
        return f"a half-life is between {LEAST_HALF_LIFE_S:g} and {LONGEST_S:g} seconds"
    return ""


def why_no_usage(record: UsageRecord) -> str:
    """Return the error in a record of use; empty: none."""
    if not all(0 <= seconds <= MOST_USED_S for seconds in record.seconds.values()):
        return "nobody can have used so many seconds"
    if any(len(user) > MAX_NAME for user in record.seconds):
        return f"a user's name has at most {MAX_NAME} characters"
    return ""


def per_share(seconds: Mapping[str, float], user: str, shares: SharesRecord) -> float:
    """Return a user's use divided by the weight: the user with the least is owed most."""
    return seconds.get(user, 0.0) / weight(user, shares)


def weight(user: str, shares: SharesRecord) -> float:
    """Return the weight of a user's share."""
    return shares.weights.get(user, 1.0)
