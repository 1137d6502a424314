"""Lets this node, which others cannot dial, stand by at another node's port, again and again."""

import asyncio
from contextlib import aclosing
from typing import Final

import structlog

from headway.daemon.addresses import split_address
from headway.daemon.front.front_process import FrontProcess
from headway.daemon.rpc.peer_client import NodeClient
from headway.daemon.view.cluster_watch import ClusterWatch
from headway.stages.errors import PeerError

log = structlog.get_logger()

PAUSE_S: Final = 1.0
"""Pause before the next attempt."""


async def stand_by(front: FrontProcess, client: NodeClient, cluster: ClusterWatch, *, relay: str, node: str) -> None:
    """Stand by until cancelled. relay: the address at which another node is registered."""
    host, port = split_address(relay, "relay")
    while True:
        endpoint = next((each.endpoint for each in cluster.view.nodes.values() if each.address == relay), None)
        if endpoint is not None:
            try:
                numeric = await _numeric(host, port)
                async with aclosing(client.stand_by(endpoint, node)) as replies:
                    async for reply in replies:
                        front.stand_by((numeric, port), reply.token)
                        log.info("standing_by", relay=relay)
            except (PeerError, OSError) as error:
                log.warning("not_standing_by", relay=relay, reason=str(error))
            finally:
                front.stand_by(None)
        await asyncio.sleep(PAUSE_S)


async def _numeric(host: str, port: int) -> str:
    found = await asyncio.get_running_loop().getaddrinfo(host, port)
    return str(found[0][4][0])
