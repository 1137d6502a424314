"""`headway web` inside a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headway.daemon.client.cluster_access import ClusterAddress
from headway.daemon.client.web import Listening, serve

PLAIN = Listening(host="127.0.0.1", port=0)


@asynccontextmanager
async def served(address: ClusterAddress, listening: Listening = PLAIN) -> AsyncIterator[str]:
    """Serve the pages, and give their address with the token."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(address, listening, on_ready=ready.set_result))

    def tell(task: "asyncio.Task[Any]") -> None:
        if not ready.done() and not task.cancelled():
            ready.set_exception(task.exception() or AssertionError("it ended"))

    serving.add_done_callback(tell)
    try:
        yield await ready
    finally:
        serving.cancel()
        await asyncio.wait({serving})
