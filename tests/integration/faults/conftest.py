"""One cluster of four nodes for the faults that it survives, and the reference."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.integration.faults.ground import Ground, ground, recoveries

NUM_NODES = 4


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ground]:
    """Up for the whole run."""
    async with ground(tmp_path_factory.mktemp("faults"), num_nodes=NUM_NODES) as shared:
        yield shared


@pytest_asyncio.fixture(loop_scope="session")
async def field(shared: Ground) -> Ground:
    """The shared cluster with every node up again after the row before."""
    await shared.all_nodes_up(NUM_NODES)
    return shared


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How long each row's run stood still."""
    if recoveries:
        terminalreporter.section("seconds from the last strike to the next generation's first forward")
        for name, seconds in sorted(recoveries.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{seconds:7.2f} s  {name}")
