"""Gaps of a compute stream, by what caused them."""

import pytest
from gpu.stream_gaps import WAIT, gaps_in, merged, overlap


def event(cat: str, ts: float, dur: float, *, name: str = "", stream: int | None = None) -> dict[str, object]:
    """One event of a trace, as torch's profiler writes it."""
    args = {} if stream is None else {"stream": stream}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def test_a_gap_belongs_to_the_wait_or_copy_that_overlaps_it_most() -> None:
    """Four gaps: one of a wait, one of a copy, one of neither, one too short to count."""
    trace = {
        "traceEvents": [
            event("kernel", 0, 100, stream=7),
            event("user_annotation", 100, 180, name=WAIT),
            event("kernel", 300, 100, stream=7),
            event("gpu_memcpy", 410, 150, stream=9),
            event("kernel", 600, 100, stream=7),
            event("kernel", 900, 50, stream=7),
            event("kernel", 990, 10, stream=7),
            event("kernel", 120, 10, stream=9),  # of another stream: it computes nothing of the stage
            {"ph": "M", "name": "process_name"},
        ]
    }
    gaps = gaps_in(trace)
    assert (gaps.span_us, gaps.link_us, gaps.copy_us, gaps.launch_us) == (1000.0, 200.0, 200.0, 200.0)
    assert gaps.idle_share == pytest.approx(0.4)
    assert gaps.launch_share == pytest.approx(0.2)
    assert gaps.longest_us == 200.0


def test_a_wait_during_work_costs_nothing() -> None:
    """The host has launched ahead: it waits, and the stream is busy."""
    trace = {"traceEvents": [event("kernel", 0, 500, stream=7), event("user_annotation", 0, 490, name=WAIT)]}
    assert gaps_in(trace).idle_share == 0.0


def test_without_kernels_the_operations_of_the_cpu_are_the_work() -> None:
    """A trace of a CPU: operations nest, and annotations of others are no waits."""
    trace = {
        "traceEvents": [
            event("cpu_op", 0, 100),
            event("cpu_op", 10, 20),
            event("user_annotation", 100, 100, name="something else"),
            event("cpu_op", 200, 100),
        ]
    }
    gaps = gaps_in(trace)
    assert (gaps.link_us, gaps.copy_us, gaps.launch_us) == (0.0, 0.0, 100.0)


def test_a_trace_without_work_is_refused() -> None:
    """Then the profiler saw nothing, and a share of 0 would be a lie."""
    with pytest.raises(ValueError, match="no work"):
        gaps_in({"traceEvents": [event("user_annotation", 0, 1, name=WAIT)]})


def test_overlaps_count_each_moment_once() -> None:
    """Spans that touch are one."""
    spans = merged([(5, 10), (0, 5), (8, 12), (20, 30)])
    assert spans == [(0, 12), (20, 30)]
    assert overlap(spans, (10, 25)) == 7.0
    assert overlap(spans, (12, 20)) == 0.0
