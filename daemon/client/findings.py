"""One thing that `headway doctor` has looked at."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found, and where it is wrong, what to do."""

    what: str
    is_fine: bool
    found: str
    advice: str = ""
    """What to do; beside what is fine, a remark."""
