"""Data that is sent to other nodes, from a file system that may hang."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.node.data_service import DataService
from headway.proto.control_pb2 import ReadRequest, ShardFile

NUM_READERS = 40
"""More than the threads that a daemon has for its other work."""


async def test_data_that_does_not_answer_holds_up_no_other_work(tmp_path: Path) -> None:
    """Other nodes ask for a shard on a mount that hangs; the threads that send layers are free."""
    path = tmp_path / "shard"
    os.mkfifo(path)  # whoever opens it waits for a writer

    async def found(*_: object) -> Path:
        return path

    library: Any = SimpleNamespace(found=found)
    service = DataService("a", ClusterView(), library)

    async def fetch() -> list[bytes]:
        return [piece async for piece in service.pieces(ReadRequest(shard=ShardFile(sha256="ab"))) if piece]

    fetching = [asyncio.create_task(fetch()) for _ in range(NUM_READERS)]
    try:
        for _ in range(20):  # while all of them come to that file
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 2.0) == "free"
    finally:
        writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        path.unlink()
        os.close(writer)
        for each in fetching:
            each.cancel()
        await asyncio.gather(*fetching, return_exceptions=True)
