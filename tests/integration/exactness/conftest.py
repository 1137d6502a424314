"""One running cluster of five nodes for all jobs of this folder, and the reference beside it."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from headway.daemon.base.fault_points import ENVIRONMENT
from headway.daemon.local.cluster import LocalCluster
from tests.integration.exactness.training import MAX_NODES, WITHOUT_SPARES
from tests.rigs.paces import pace_faults


@pytest.fixture(scope="package")
def paces_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The faults file of the cluster's processes: not there, unless a test sets a pace."""
    return tmp_path_factory.mktemp("paces") / "paces"


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory, paces_file: Path) -> AsyncIterator[LocalCluster]:
    """Five nodes, up while this folder's tests run; each job takes as many of them as it is allowed."""
    async with LocalCluster(
        tmp_path_factory.mktemp("cluster"),
        num_nodes=MAX_NODES,
        node_settings=WITHOUT_SPARES,
        environment={ENVIRONMENT: str(paces_file)},
    ) as running:
        yield running


@pytest.fixture
def set_pace(paces_file: Path) -> Iterator[Callable[[float], None]]:
    """Sets the least seconds of each layer's forward, so that a short job outlasts what happens to it. 0: none.

    A stage has a pace only if one was set when the stage began.
    """

    def set_pace(forward_s: float) -> None:
        fresh = paces_file.with_suffix(".new")
        fresh.write_text("".join(json.dumps(fault) + "\n" for fault in pace_faults(forward_s)))
        fresh.replace(paces_file)

    yield set_pace
    paces_file.unlink(missing_ok=True)
