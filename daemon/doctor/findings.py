"""A finding of `headway doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check and, if something is wrong, the remedy."""

    what: str
    is_fine: bool
    found: str
    advice: str = ""
    """The remedy; in a good finding, a remark."""
    outcomes: tuple[str, ...] = ()
    """What came of each dialled port, as `outcome.py` names it."""
