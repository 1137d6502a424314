"""Gaps of a device's compute stream in a trace of torch's profiler, and what caused each. Pure.

The trace is the JSON of `export_chrome_trace`: events with `cat`, `ts` and `dur` in µs. On a card, kernels have
`cat: kernel` and `args.stream`. On a CPU, the operations of the thread that computes take their place.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

LEAST_GAP_US: Final = 50.0
WAIT: Final = "headway: waits for a frame"
"""The annotation of the time in which the stage has nothing to launch."""
LEAST_OVERLAP: Final = 0.1
"""Of a gap, so that something counts as its cause."""
COPIES: Final = frozenset({"gpu_memcpy"})

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Gaps of the compute stream between its first and its last work, in µs."""

    span_us: float
    link_us: float = 0.0
    copy_us: float = 0.0
    launch_us: float = 0.0
    """Neither: the host launches too slowly, or another stage has the card."""
    longest_us: float = 0.0
    """Of those that a link or a copy caused."""

    @property
    def idle_share(self) -> float:
        """Return the share of the time in which a link or a copy kept the stream idle."""
        return (self.link_us + self.copy_us) / self.span_us

    @property
    def launch_share(self) -> float:
        """Return the share of the other gaps."""
        return self.launch_us / self.span_us


def gaps_in(trace: Mapping[str, Any]) -> Gaps:
    """Return the gaps of the busiest stream. Raises ValueError for a trace without any work."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    work = kernels or [event for event in events if event.get("cat") == "cpu_op"]
    by_stream: dict[object, list[Span]] = defaultdict(list)
    for event in work:
        stream = event.get("args", {}).get("stream") if kernels else event.get("tid")
        by_stream[stream].append(_span(event))
    if not by_stream:
        raise ValueError("the trace has no work of any stream")
    busiest = max(by_stream.values(), key=lambda spans: sum(end - begin for begin, end in spans))
    waits = merged(_span(e) for e in events if e.get("cat") == "user_annotation" and e.get("name") == WAIT)
    copies = merged(_span(event) for event in events if event.get("cat") in COPIES)
    return classify(merged(busiest), waits=waits, copies=copies)


def classify(busy: Sequence[Span], *, waits: Sequence[Span], copies: Sequence[Span]) -> Gaps:
    """Return the gaps above LEAST_GAP_US between spans of work, by cause. All spans are merged and in order."""
    found = {"link": 0.0, "copy": 0.0, "launch": 0.0}
    longest = 0.0
    for (_, begin), (end, _) in pairwise(busy):
        length = end - begin
        if length <= LEAST_GAP_US:
            continue
        shares = {"link": overlap(waits, (begin, end)), "copy": overlap(copies, (begin, end))}
        cause = max(shares, key=lambda name: shares[name])
        if shares[cause] < LEAST_OVERLAP * length:
            cause = "launch"
        else:
            longest = max(longest, length)
        found[cause] += length
    return Gaps(
        span_us=busy[-1][1] - busy[0][0],
        link_us=found["link"],
        copy_us=found["copy"],
        launch_us=found["launch"],
        longest_us=longest,
    )


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, those that touch as one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def overlap(spans: Sequence[Span], gap: Span) -> float:
    """Return the µs of a gap that merged spans cover."""
    begin, end = gap
    covered = 0.0
    for index in range(max(0, bisect_left(spans, (begin, begin)) - 1), len(spans)):
        first, last = spans[index]
        if first >= end:
            break
        covered += max(0.0, min(last, end) - max(first, begin))
    return covered


def _span(event: Mapping[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])
