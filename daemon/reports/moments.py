"""Formats moments for people, by this machine's clock. A record may hold any number: `?` replaces an invalid date."""

import time


def date_and_time(at: float) -> str:
    """Return seconds since the epoch as `2026-11-22 17:25:03`."""
    return _written(at, "%Y-%m-%d %H:%M:%S")


def time_of_day(at: float) -> str:
    """Return seconds since the epoch as `17:25:03`."""
    return _written(at, "%H:%M:%S")


def _written(at: float, form: str) -> str:
    try:
        return time.strftime(form, time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "?"
