"""A local cluster whose etcd has three members."""

import asyncio
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.daemon.local.cluster import LocalCluster
from headway.daemon.local.processes import EtcdServer, EtcdServerConfig
from tests.rigs.backup import etcdctl
from tests.rigs.members import leader_of, started_members


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

    async def lose_member(self, number: int) -> None:
        """SIGKILL a member, and delete its data."""
        if number == 0:
            await self.stop_etcd()
        await self.members[number].kill()
        shutil.rmtree(self.members[number].config.data_dir)

    async def start_alone(self, more: Mapping[str, str]) -> None:
        """Start the first member again with its own options and these."""
        await self.stop_etcd()
        first = self.members[0]
        options = {name: value for name, value in first.config.flags.items() if name != "force-new-cluster"}
        first.config = replace(first.config, flags={**options, **more})
        await self.start_etcd()

    async def add_member(self, number: int, command: str, options: Mapping[str, str]) -> None:
        """Add the successor of a lost member at its ports, by the page's command and options."""
        lost, name = self.members[number], self.members[number].config.flags["name"]
        url = f"https://{lost.config.host}:{lost.peer_port}"
        _, verb, noun, _, flag, _ = command.split()
        while True:
            try:
                await asyncio.to_thread(etcdctl, self.members[0], verb, noun, name, flag, url)
                break
            except subprocess.CalledProcessError as error:
                # It takes no other member until the one before has been connected for some seconds.
                if b"unhealthy cluster" not in error.stderr:
                    raise
                await asyncio.sleep(0.5)
        known = ",".join(
            f"{member.config.flags['name']}=https://{member.config.host}:{member.peer_port}"
            for member in self.members[: number + 1]
        )
        flags = {**lost.config.flags, **options, "name": name, "initial-cluster": known}
        port = int(lost.endpoint.rpartition(":")[2])
        config = replace(lost.config, client_port=port, peer_port=lost.peer_port, flags=flags)
        self.members[number] = await EtcdServer.start(config)
        self._stack.push_async_callback(self.members[number].kill)

    async def stop(self) -> None:
        """The cluster first: it needs them."""
        await super().stop()
        await self._stack.aclose()

    async def _start_etcd(self, config: EtcdServerConfig) -> EtcdServer:
        self.members = await self._stack.enter_async_context(started_members(config))
        return self.members[0]
