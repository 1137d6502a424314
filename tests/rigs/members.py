"""An etcd of several members on one machine."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.connection import EtcdAccess
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from headway.stages.sockets.tls_identity import TlsIdentity


def free_ports(count: int) -> list[int]:
    """Return different ports at which no process listens."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@asynccontextmanager
async def started_members(config: EtcdServerConfig, *, count: int = 3) -> AsyncIterator[list[EtcdServer]]:
    """Members of one cluster, each with a folder and ports of its own; a new leader is elected within half a second."""
    ports = free_ports(2 * count)
    names = [f"m{index}" for index in range(count)]
    peers = ",".join(f"{name}=https://{config.host}:{port}" for name, port in zip(names, ports[count:], strict=True))
    timing = {"heartbeat-interval": "50", "election-timeout": "500"}
    configs = [
        replace(
            config,
            data_dir=config.data_dir / name,
            log_file=config.log_file.with_name(f"{name}.log"),
            client_port=ports[index],
            peer_port=ports[count + index],
            flags={"name": name, "initial-cluster": peers, **timing},
        )
        for index, name in enumerate(names)
    ]
    starting = [asyncio.create_task(EtcdServer.start(each)) for each in configs]
    servers: list[EtcdServer] = []
    try:
        servers = await asyncio.gather(*starting)
        yield servers
    finally:
        await asyncio.gather(*(server.kill() for server in servers))


def access_to(servers: Iterable[EtcdServer], *, timeout_s: float = 10.0) -> EtcdAccess:
    """All members as endpoints, in this order."""
    servers = list(servers)
    identity = TlsIdentity.read(servers[0].config.certificates)
    return EtcdAccess(endpoints=tuple(server.endpoint for server in servers), identity=identity, timeout_s=timeout_s)


async def leader_of(servers: Iterable[EtcdServer]) -> EtcdServer:
    """The member that leads now."""
    for server in servers:
        async with EtcdClient(server.access()) as client:
            if (await client.status()).is_leader:
                return server
    raise AssertionError("no member leads")
