"""What happens in the course of a recovery, and when: milestones of the daemons' and workers' histories after a kill.

Each is the time since the kill, of the last of several that have to happen unless it says "first".
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headway.daemon.base.logging import MONOTONIC

Event = Mapping[str, Any]
Claim = Callable[[Event, int], bool]
"""Tells whether an event is such a milestone of the recovery to a generation."""


def _goal(action: str) -> Claim:
    return lambda event, generation: (
        event["event"] == "goal_set" and event["action"] == action and event["generation"] == generation
    )


def _is_ready(event: Event, generation: int) -> bool:
    return bool(event["event"] == "worker_changed" and event["prepared"] == generation > event["generation"])


def _record(event: Event, generation: int) -> bool:
    return event["event"] == "record_written" and f"/workers/{generation:08d}/" in str(event["key"])


def _is_end(event: Event, _: int) -> bool:
    return event["event"] in ("worker_exited", "dead_daemons_lease_revoked")


def _decision(event: Event, _: int) -> bool:
    return str(event["event"]) == "decision_written"


MILESTONES: tuple[tuple[str, Claim, bool], ...] = (
    ("its end is noticed, first", _is_end, True),
    ("next is written, first", _decision, True),
    ("workers are to prepare, first", _goal("prepare"), True),
    ("workers are to prepare", _goal("prepare"), False),
    ("prepared", _is_ready, False),
    ("records of workers, first", _record, True),
    ("records of workers", _record, False),
    ("plan is written", _decision, False),
    ("workers are to start, first", _goal("start"), True),
    ("workers are to start", _goal("start"), False),
)


def milestones(events: Iterable[Event], *, killed_at: float, generation: int, resumed_at: float) -> dict[str, float]:
    """Seconds from a kill to each milestone before the first work of the new generation."""
    between = [event for event in events if killed_at <= float(event[MONOTONIC]) <= resumed_at]
    starts = [float(event[MONOTONIC]) for event in between if _goal("start")(event, generation)]
    found = {}
    for name, claim, is_first in MILESTONES:
        # Records are written again when their workers run.
        until = min(starts, default=resumed_at) if claim in (_record, _decision) else resumed_at
        times = [
            float(event[MONOTONIC])
            for event in between
            if float(event[MONOTONIC]) <= until and claim(event, generation)
        ]
        if times:
            found[name] = (min(times) if is_first else max(times)) - killed_at
    return found | {"first forward": resumed_at - killed_at}


def medians(timelines: list[dict[str, float]]) -> str:
    """A line for each milestone: its median and its spread, in milliseconds."""
    lines = []
    for name in (*(name for name, _, _ in MILESTONES), "first forward"):
        times = sorted(timeline[name] * 1e3 for timeline in timelines if name in timeline)
        if times:
            lines.append(f"  {name:28} {statistics.median(times):7.0f} ms   [{times[0]:.0f}, {times[-1]:.0f}]")
    return "\n".join(lines)
