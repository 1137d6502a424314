"""Finds what a mistyped path means: the nearest name that is there."""

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Final

_CUTOFF: Final = 0.75
"""Likeness of names; more than that of short names with one ending."""
_MOST_NAMES: Final = 4096
"""Of a folder that are looked at."""


def near(path: Path, others: Iterable[str] = ()) -> str:
    """Return the hint for a path that is not there, with the nearest name beside it; empty: no name is near.

    The one wrong part of the path may be a folder. others: names that are no files, which count too.
    """
    whole, rest = path.absolute(), Path()
    try:
        if whole.exists():
            return ""
        while not whole.parent.exists():
            whole, rest = whole.parent, whole.name / rest
        beside = islice(whole.parent.iterdir(), _MOST_NAMES)
        names = [*others, *(entry.name for entry in beside if (entry / rest).exists())]
    except (OSError, ValueError):  # a folder that nobody may read; a name that is too long, or has a zero character
        return ""
    close = get_close_matches(whole.name, names, n=1, cutoff=_CUTOFF)
    return f"; did you mean `{Path(close[0]) / rest}`?" if close else ""
