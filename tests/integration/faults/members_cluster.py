"""A local cluster whose etcd has three members."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.etcd_server import EtcdServer, EtcdServerConfig
from tests.integration.etcd.members import leader_of, started_members


class MembersCluster(LocalCluster):
    """Its first member is the one that `stop_etcd` and `start_etcd` are about."""

    def __init__(self, state_dir: Path, **settings: Any) -> None:
        super().__init__(state_dir, **settings)
        self.members: list[EtcdServer] = []
        self._stack = AsyncExitStack()

    @property
    def etcd_endpoints(self) -> tuple[str, ...]:
        """All three."""
        return tuple(member.endpoint for member in self.members)

    async def kill_leading_member(self) -> None:
        """SIGKILL the member that leads, for good."""
        leader = await leader_of(self.members)
        if leader is self.members[0]:
            await self.stop_etcd()
        else:
            await leader.kill()

    async def stop(self) -> None:
        """The cluster first: it needs them."""
        await super().stop()
        await self._stack.aclose()

    async def _start_etcd(self, config: EtcdServerConfig) -> EtcdServer:
        self.members = await self._stack.enter_async_context(started_members(config))
        return self.members[0]
