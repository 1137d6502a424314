"""`headway relay`: a small host that passes bytes on between nodes, with neither workers nor etcd.

It has the one port of a daemon, and behind it a service that answers who stands by. If it is told of etcd, it
renews its certificate as a daemon does, and hears no node that is revoked.
"""

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from headway.daemon.base.activities import Activities
from headway.daemon.base.addresses import split_address
from headway.daemon.base.errors import InvariantLostError
from headway.daemon.base.logging import configure_logs
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.connection import EtcdAccess
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.net.certificates import names_in, own_names, read_certificate
from headway.daemon.net.port_process import PortProcess
from headway.daemon.net.renewals import Renewals
from headway.daemon.node.identity import check_is_node, open_identity
from headway.daemon.node.relays import stand_by_replies
from headway.daemon.node.revocations import Revocations
from headway.daemon.node.stream_limits import StreamLimits, bind_node_service
from headway.proto import control_pb2, control_pb2_grpc
from headway.stages.sockets.open_files import raise_open_file_limit
from headway.stages.sockets.tls_identity import CERTIFICATE_FILE, RenewableIdentity

log = structlog.get_logger()

RENEWALS = "renewals"
"""Folder of renewed certificates, in the folder of the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Its settings."""

    listen: str
    certificates: Path
    etcd: tuple[str, ...] = ()
    """Members of etcd; none: its certificate is not renewed, and nobody counts as revoked."""
    most_streams: int = 0
    """0: what files allow."""
    mbit_s: float = 0.0
    """0: no limit."""


class RelayService(control_pb2_grpc.NodeServicer):
    """Lets nodes stand by, and refuses all else."""

    def __init__(self, front: PortProcess) -> None:
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
    identity = open_identity(config.certificates, config.certificates / RENEWALS)
    where = str(config.certificates / CERTIFICATE_FILE)
    certificate = read_certificate(identity.now().certificate, where)
    check_is_node(names_in(certificate), where, who="a relay")
    names = own_names(names_in(certificate))
    limits = StreamLimits()
    with tempfile.TemporaryDirectory(prefix="headway-relay-") as folder:
        server, port = bind_node_service(identity, "127.0.0.1", 0, stream_limits=limits)
        front = PortProcess(
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
        following = [asyncio.create_task(_follow(config, identity, names, limits))] if config.etcd else []
        log.info("relay_listens", port=front.port, certificate_until=certificate.not_valid_after_utc.isoformat())
        await over.wait()
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        service.ending.set()
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        front.close()
        await server.stop(0.5)


async def _follow(config: RelayConfig, identity: RenewableIdentity, names: Sequence[str], limits: StreamLimits) -> None:
    """Renew the certificate, and follow who is revoked. If etcd refuses this relay for good, it stays as it is."""
    access, activities = EtcdAccess(endpoints=config.etcd, identity=identity), Activities()
    async with EtcdClient(access) as etcd:
        cluster = ClusterWatch(etcd, view=ClusterView())
        cluster.leads = lambda: False
        renewals = Renewals(
            cluster,
            identity,
            name=next(iter(names), ""),
            folder=config.certificates / RENEWALS,
            tell=lambda reason: activities.trouble("certificate", reason),
        )
        revocations = Revocations(
            cluster,
            names=names,
            where=str(config.certificates / CERTIFICATE_FILE),
            revoke=limits.revoke,
            on_own=lambda error: log.error("certificate_revoked", reason=str(error)),
        )
        following = {"cluster watch": cluster.run, "renewals": renewals.run, "revocations": revocations.run}
        try:
            await activities.run(following)
        except InvariantLostError as error:
            log.error("etcd_not_followed", reason=str(error))
