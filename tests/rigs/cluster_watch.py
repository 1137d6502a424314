"""Parts that tests of cluster watch share."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.records import Desired
from headway.daemon.decide.cluster_watch import ClusterWatch

DEADLINE_S = 30.0


@asynccontextmanager
async def watching(client: EtcdClient, *, leads: Callable[[], bool] = lambda: True) -> AsyncIterator[ClusterWatch]:
    """A watch that runs inside the block."""
    cluster = ClusterWatch(client)
    cluster.leads = leads
    running = asyncio.create_task(cluster.run())
    try:
        yield cluster
    finally:
        running.cancel()
        await asyncio.wait([running])


async def until_desired(cluster: ClusterWatch, desired: Desired) -> None:
    """Return when the view has this wish."""
    async with asyncio.timeout(DEADLINE_S):
        while "j" not in cluster.view.jobs or cluster.view.jobs["j"].desired.state is not desired:
            await cluster.changed(cluster.version)
