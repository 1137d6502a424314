"""Reads a job's worker output, through the first daemon that answers."""

from collections.abc import AsyncIterator

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import job_of, node_of
from headway.daemon.errors import ConfigError
from headway.daemon.rpc.peer_client import NodeClient
from headway.proto import control_pb2
from headway.stages.errors import PeerError, UnavailableError


async def read_logs(
    session: ClusterSession, job: str, *, node: str = "", follow: bool = False, last_lines: int = 0
) -> AsyncIterator[control_pb2.LogLine]:
    """Yield the lines of every node, or of one. Raises ConfigError for an unknown name, UnavailableError."""
    view = await session.view()
    job_of(view, job)
    if node:
        node_of(view, node)
    if session.identity is None:
        raise ConfigError("daemons answer only clients with a certificate; name its folder", "--certs")
    request = control_pb2.LogsRequest(job=job, node=node, follow=follow, last_lines=last_lines)
    client = NodeClient(session.identity)
    reasons: list[str] = []
    try:
        for name in sorted(view.nodes, key=lambda name: name != node):
            has_begun = False
            try:
                async for line in client.logs(view.nodes[name].endpoint, request):
                    has_begun = True
                    yield line
                return
            except PeerError as error:
                if has_begun:
                    raise
                reasons.append(str(error))
    finally:
        await client.close()
    raise UnavailableError("the cluster", "; ".join(reasons) or "no node is up that could send logs")
