"""When an activity that failed begins again, and how long it counts as ailing. Pure."""

from dataclasses import dataclass
from typing import Final

from headway.daemon.errors import shortened

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 30.0
HEALTHY_AFTER_S: Final = 60.0
"""An activity that ran so long has recovered: its next failure counts as a first one."""
JITTER: Final = 0.5
"""Share of a pause that chance takes away, so that the daemons of a cluster do not retry in step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """One activity since its daemon started. Times are seconds of a monotonic clock."""

    num_failures: int = 0
    num_in_a_row: int = 0
    """Failures, each of them soon after the restart before."""
    resumes_at: float = 0.0
    """When it begins again after the last failure."""
    reason: str = ""
    """The last error, in one line."""

    def failed(self, reason: str, *, began_at: float, now: float, chance: float) -> "Health":
        """After one more failure. began_at: when this attempt began; chance: from 0 to 1, for the jitter."""
        in_a_row = 1 if now - began_at >= HEALTHY_AFTER_S else self.num_in_a_row + 1
        return Health(
            num_failures=self.num_failures + 1,
            num_in_a_row=in_a_row,
            resumes_at=now + pause_s(in_a_row, chance=chance),
            reason=shortened(reason),
        )

    def is_ailing(self, now: float) -> bool:
        """Whether it waits for its restart, or has not run long enough since."""
        return self.num_failures > 0 and now < self.resumes_at + HEALTHY_AFTER_S

    @property
    def sentence(self) -> str:
        """What people read about an activity that ails."""
        times = "failed" if self.num_in_a_row == 1 else f"failed {self.num_in_a_row} times in a row"
        return f"{times} and was restarted: {self.reason}"


def pause_s(num_in_a_row: int, *, chance: float) -> float:
    """Before a restart: doubles with every failure in a row, up to a limit."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_in_a_row - 1, 30))
    return longest * (1.0 - JITTER * chance)
