"""The rows' times, at the end."""

import pytest

from tests.rigs.fault_harness import recoveries


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How long each row's run stood still."""
    if recoveries:
        terminalreporter.section("seconds from the last strike to the next generation's first forward")
        for name, seconds in sorted(recoveries.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{seconds:7.2f} s  {name}")
