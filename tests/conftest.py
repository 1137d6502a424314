"""Keeps tests of one cluster in one process, and prints, at the end of a run, the seconds that each suite took."""

import os
from collections import defaultdict
from pathlib import PurePosixPath

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# The same examples in every run; to look for others: pytest --hypothesis-profile=explore.
# No deadlines: on a loaded machine any example may take long.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("repeatable")

# Channels that tests open themselves go to this machine, also behind a web proxy.
os.environ |= {"no_grpc_proxy": "127.0.0.1,localhost"}

SHARED_CLUSTERS = {
    "tests/integration/exactness/": "fault harness",
    "tests/integration/faults/": "fault harness",
    "tests/integration/worker/": "workers",
    "tests/integration/cli/": "commands",
    "tests/machines/": "machines",
}
"""Folders whose tests share a running cluster, and its name."""

_seconds: defaultdict[str, float] = defaultdict(float)
_counts: defaultdict[str, int] = defaultdict(int)


class ClusterScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives all tests of a shared cluster to one process; every other test goes wherever there is time."""

    def _split_scope(self, nodeid: str) -> str:
        return next((name for folder, name in SHARED_CLUSTERS.items() if nodeid.startswith(folder)), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Schedule by cluster if the command line says `--dist loadscope`."""
    return ClusterScheduling(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A suite is a folder below tests/unit, tests/integration and so on."""
    suite = "/".join(PurePosixPath(report.nodeid.split("::")[0]).parts[:3])
    _seconds[suite] += report.duration
    _counts[suite] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The suites, slowest first."""
    terminalreporter.section("seconds per suite")
    for suite in sorted(_seconds, key=lambda name: -_seconds[name]):
        terminalreporter.write_line(f"{_seconds[suite]:7.1f} s  {_counts[suite]:5d} tests  {suite}")
