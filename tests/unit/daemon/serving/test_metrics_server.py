"""Slow and idle readers at the metrics port, over real HTTP; and how many jobs are labels."""

import contextlib
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Gauge

from headway.daemon.records.records import Phase, PhaseRecord
from headway.daemon.serving.metrics import MOST_JOBS, told_of
from headway.daemon.serving.metrics_server import MOST_REQUESTS, MetricsServer
from headway.daemon.view.job_view import JobView

LIMIT_S = 0.3
DEADLINE_S = 20.0


@pytest.fixture
def port() -> Iterator[int]:
    """Yield the port of a server with one gauge."""
    registry = CollectorRegistry()
    Gauge("things", "Some.", registry=registry).set(3)
    server = MetricsServer("127.0.0.1", 0, registry, limit_s=LIMIT_S)
    stop = server.start()
    yield int(server.server_address[1])
    stop()


def test_idle_readers_leave_room_for_others(port: int) -> None:
    """A hundred connections ask for nothing, or byte by byte: few threads serve them, and soon a scrape is answered."""
    num_threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S))
            with contextlib.suppress(OSError):
                one.sendall(b"GET /met")
        assert threading.active_count() <= num_threads + 2 * MOST_REQUESTS, "one serves, one watches the time"
        until, text = time.monotonic() + DEADLINE_S, ""
        while "things 3.0" not in text:
            assert time.monotonic() < until, "no scrape was answered"
            with contextlib.suppress(OSError):
                text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S).read().decode()


def test_one_address_cannot_keep_another_from_its_answer() -> None:
    """As many connections as there is room for come from one address, and stay: a scrape from another is answered."""
    registry = CollectorRegistry()
    Gauge("things", "Some.", registry=registry).set(3)
    server = MetricsServer("127.0.0.1", 0, registry, limit_s=DEADLINE_S)
    stop = server.start()
    try:
        with contextlib.ExitStack() as stack:
            address, source = ("127.0.0.1", int(server.server_address[1])), ("127.0.0.2", 0)
            for _ in range(2 * MOST_REQUESTS):
                stack.enter_context(socket.create_connection(address, timeout=DEADLINE_S))
            with socket.create_connection(address, timeout=DEADLINE_S, source_address=source) as one:
                one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                assert "things 3.0" in one.makefile().read()
    finally:
        stop()


def test_jobs_that_run_and_the_newest_of_the_others_have_metrics() -> None:
    """Ten times as many jobs as fit, the oldest still running: their number as labels stays what it is."""
    jobs = [JobView(name=f"job-{number}", phase=PhaseRecord(phase=Phase.FINISHED)) for number in range(10 * MOST_JOBS)]
    jobs[0] = replace(jobs[0], phase=PhaseRecord(phase=Phase.RUNNING))
    told = told_of(jobs)
    assert [told[0].name, told[-1].name, len(told)] == ["job-0", f"job-{10 * MOST_JOBS - 1}", MOST_JOBS]
