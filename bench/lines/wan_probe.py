"""A daemon's own probe of an emulated line: its service in one process, its client in the other."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc.aio
from rigs import pipeline_processes
from rigs.pipeline_processes import Host

from headway.daemon.agent.probing import measure
from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.blobs.peer_client import NodeClient
from headway.daemon.cluster.measurements import LinkProbe
from headway.daemon.node.service import NodeService
from headway.daemon.node.stream_limits import bind_node_service
from headway.proto import control_pb2, control_pb2_grpc
from headway.stages.sockets.tls_identity import TlsIdentity

TIMEOUT = timedelta(seconds=100)
_servers: list[grpc.aio.Server] = []
"""Servers of this process, kept for its life."""


class Probed(control_pb2_grpc.NodeServicer):
    """The part of a daemon's service that a probe calls."""

    Probe = NodeService.Probe

    async def Describe(self, request: control_pb2.DescribeRequest, context: Any) -> control_pb2.DescribeReply:  # noqa: ARG002, N802
        """A ping."""
        return control_pb2.DescribeReply()


@dataclass(frozen=True, slots=True)
class BeProbed:
    """A task: the second process serves probes; where."""

    certificates: Path

    def run(self, host: Host) -> str:
        """Of the host."""
        if not host.rank:
            return ""
        return host._loop.run(self._serve(), timeout=TIMEOUT, what="a server for probes")

    async def _serve(self) -> str:
        server, port = bind_node_service(TlsIdentity.read(self.certificates), pipeline_processes.HOST, 0)
        control_pb2_grpc.add_NodeServicer_to_server(Probed(), server)
        await server.start()
        _servers.append(server)
        return f"{pipeline_processes.HOST}:{port}"


@dataclass(frozen=True, slots=True)
class Probe:
    """A task: the first process measures the way to the second, over a connection of its own."""

    certificates: Path
    address: str

    def run(self, host: Host) -> LinkProbe | None:
        """Of the host."""
        return None if host.rank else host._loop.run(self._measure(), timeout=TIMEOUT, what="a probe")

    async def _measure(self) -> LinkProbe:
        client = NodeClient(TlsIdentity.read(self.certificates))
        try:
            return await measure(client, NodeEndpoint("node", self.address))
        finally:
            await client.close()
