"""Decides when a failed activity restarts, and how long it counts as ailing. Pure."""

from dataclasses import dataclass
from typing import Final

from headway.daemon.base.errors import shortened

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 30.0
HEALTHY_AFTER_S: Final = 60.0
"""An activity that ran for this time has recovered: its next failure counts as the first."""
JITTER: Final = 0.5
"""Share of a pause that chance takes away, so that the daemons of a cluster do not retry in step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The health of one activity since its daemon started. Times are seconds of a monotonic clock."""

    num_failures: int = 0
    num_in_a_row: int = 0
    """Failures in a row, each soon after the last restart."""
    resumes_at: float = 0.0
    """Time at which it restarts after the last failure."""
    reason: str = ""
    """The last error, in one line."""

    def failed(self, reason: str, *, began_at: float, now: float, chance: float) -> "Health":
        """Return the health after one more failure. began_at: when this attempt began; chance: from 0 to 1, for the
        jitter.
        """
        in_a_row = 1 if now - began_at >= HEALTHY_AFTER_S else self.num_in_a_row + 1
        return Health(
            num_failures=self.num_failures + 1,
            num_in_a_row=in_a_row,
            resumes_at=now + pause_s(in_a_row, chance=chance),
            reason=shortened(reason),
        )

    def is_ailing(self, now: float) -> bool:
        """Return whether it waits for its restart, or has not run long enough since."""
        return self.num_failures > 0 and now < self.resumes_at + HEALTHY_AFTER_S

    @property
    def sentence(self) -> str:
        """Return a sentence about an ailing activity, for people."""
        times = "failed" if self.num_in_a_row == 1 else f"failed {self.num_in_a_row} times in a row"
        return f"{times} and was restarted: {self.reason}"


def pause_s(num_in_a_row: int, *, chance: float) -> float:
    """Return the pause before a restart: it doubles with every failure in a row, up to a limit."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_in_a_row - 1, 30))
    return longest * (1.0 - JITTER * chance)
