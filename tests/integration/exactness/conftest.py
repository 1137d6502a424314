"""One running cluster of five nodes for all jobs of this folder, and the reference beside it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headway.daemon.local.cluster import LocalCluster
from tests.integration.exactness.training import MAX_NODES, WITHOUT_SPARES


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Five nodes, up while this folder's tests run; each job takes as many of them as it is allowed."""
    async with LocalCluster(
        tmp_path_factory.mktemp("cluster"), num_nodes=MAX_NODES, node_settings=WITHOUT_SPARES
    ) as running:
        yield running
