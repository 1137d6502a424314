"""Lists names in a sentence. Pure."""

from collections.abc import Sequence


def listed(names: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
