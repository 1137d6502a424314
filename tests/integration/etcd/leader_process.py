"""A candidate in a process of its own, to be killed: `leader_process.py ENDPOINT CERTIFICATES`."""

import asyncio
import sys
from pathlib import Path

from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.cluster.connection import EtcdAccess
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.decide.commands import Decision
from headway.daemon.leader.leadership import CheckpointFolders, Leadership
from headway.stages.sockets.tls_identity import TlsIdentity


def nothing_to_do(view: ClusterView, *, now: float) -> Decision:
    """A coordinator that is content."""
    return Decision()


async def main(endpoint: str, certificates: Path) -> None:
    """Stand for leader until killed."""
    async with EtcdClient(EtcdAccess(endpoints=(endpoint,), identity=TlsIdentity.read(certificates))) as client:
        cluster = ClusterWatch(client)
        leadership = Leadership(
            client,
            cluster,
            record=LeaderRecord(node="victim", incarnation="1"),
            ttl_s=1,
            decide=nothing_to_do,
            folders=CheckpointFolders(None),
        )
        await asyncio.gather(cluster.run(), leadership.run())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
