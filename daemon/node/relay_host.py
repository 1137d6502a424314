"""`headway relay`: a small host that passes bytes on between nodes, with neither workers nor etcd.

It is the front of a daemon's one port, and behind it a service that answers who stands by.
"""

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from headway.daemon.addresses import split_address
from headway.daemon.errors import ConfigError
from headway.daemon.front.front_process import FrontProcess
from headway.daemon.runtime.logging import configure_logs
from headway.daemon.serving.service import bind_node_service, stand_by_replies
from headway.proto import control_pb2, control_pb2_grpc
from headway.stages.sockets.open_files import raise_open_file_limit
from headway.stages.sockets.tls_identity import TlsIdentity

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Its settings."""

    listen: str
    certificates: Path
    most_streams: int = 0
    """0: what files allow."""
    mbit_s: float = 0.0
    """0: no limit."""


class RelayService(control_pb2_grpc.NodeServicer):
    """Lets nodes stand by, and refuses all else."""

    def __init__(self, front: FrontProcess) -> None:
        self._front = front
        self.ending = asyncio.Event()

    async def StandBy(  # noqa: N802
        self, request: control_pb2.StandByRequest, context: Any
    ) -> AsyncIterator[control_pb2.StandByReply]:
        """Let the caller's own node stand by, as long as the stream lasts."""
        log.info("node_stands_by", peer=request.node)
        async for reply in stand_by_replies(request, context, self._front.standing_by, self.ending):
            yield reply


def run(config: RelayConfig) -> int:
    """Serve until SIGTERM; return 0. Raises ConfigError."""
    configure_logs("info", "auto", node="relay")
    raise_open_file_limit()
    asyncio.run(_serve(config))
    return 0


async def _serve(config: RelayConfig) -> None:
    try:
        identity = TlsIdentity.read(config.certificates)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", str(error.filename)) from error
    with tempfile.TemporaryDirectory(prefix="headway-relay-") as folder:
        server, port = bind_node_service(identity, "127.0.0.1", 0)
        front = FrontProcess(
            *split_address(config.listen, "listen"),
            daemon_port=port,
            folder=Path(folder),
            most_passages=config.most_streams,
            most_bytes_per_s=config.mbit_s * 1e6 / 8,
            tells=True,
        )
        service = RelayService(front)
        control_pb2_grpc.add_NodeServicer_to_server(service, server)
        await server.start()
        serving = asyncio.create_task(front.run(), name="shared port")
        over = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, over.set)
        log.info("relay_listens", port=front.port)
        await over.wait()
        service.ending.set()
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        front.close()
        await server.stop(0.5)
