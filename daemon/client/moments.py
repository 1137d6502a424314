"""A moment as people read it, by this machine's clock. A record may hold any number: `?` is what no calendar has."""

import time


def date_and_time(at: float) -> str:
    """`2026-11-22 17:25:03`, of seconds since the epoch."""
    return _written(at, "%Y-%m-%d %H:%M:%S")


def time_of_day(at: float) -> str:
    """`17:25:03`, of seconds since the epoch."""
    return _written(at, "%H:%M:%S")


def _written(at: float, form: str) -> str:
    try:
        return time.strftime(form, time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "?"
