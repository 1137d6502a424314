"""Parts that tests of leadership share."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from headway.daemon.blobs.file_threads import Beat
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import LeaderRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.cluster_watch import ClusterWatch
from headway.daemon.decide.commands import Decision, WriteManifest
from headway.daemon.leader.leadership import CheckpointFolders, Decide, JobTroubles, Leadership
from tests.integration.conftest import Etcd

DEADLINE_S = 30.0


WriteFile = Callable[[str, bytes, Beat], None]


class Folders(CheckpointFolders):
    """Manifests are written by a function of the test."""

    def __init__(self, write_file: WriteFile, **settings: Any) -> None:
        super().__init__(None, **settings)
        self._write_file = write_file

    def write(self, command: WriteManifest, beat: Beat) -> None:
        self._write_file(command.url, command.manifest, beat)


def nothing_to_do(view: ClusterView, *, now: float) -> Decision:
    """A coordinator that is content."""
    return Decision()


def no_manifest(url: str, manifest: bytes, beat: Beat) -> None:
    """No test that uses this writes one."""
    raise AssertionError(url)


class Candidate:
    """One daemon's share of the election."""

    def __init__(
        self,
        client: EtcdClient,
        name: str,
        *,
        decide: Decide,
        write_manifest: WriteFile,
        leads_at_first: bool = True,
    ) -> None:
        """leads_at_first: its view has the records for the leader from the start."""
        self.client = client
        self.cluster = ClusterWatch(client)
        if not leads_at_first:
            self.cluster.leads = lambda: self.leadership.is_leading
        self.wrote_late: list[str] = []
        record = LeaderRecord(node=name, incarnation="1")
        self.told: list[tuple[str, str]] = []
        """Troubles of jobs that it told, with an empty reason at the end of each."""
        self.leadership = Leadership(
            client,
            self.cluster,
            record=record,
            ttl_s=1,
            decide=decide,
            folders=Folders(write_manifest, silence_s=2.0, wrote_late=self.wrote_late.append),
            troubles=JobTroubles(tell=lambda job, reason: self.told.append((job, reason))),
        )
        self.watching = asyncio.create_task(self.cluster.run())
        self.standing = asyncio.create_task(self.leadership.run())

    async def until_leading(self) -> None:
        """Return when it knows that it leads."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.leadership.is_leading:
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Resign and end."""
        for task in (self.standing, self.watching):
            task.cancel()
            await asyncio.wait([task])


@asynccontextmanager
async def candidate(
    etcd: Etcd, name: str, *, decide: Decide = nothing_to_do, write_manifest: WriteFile = no_manifest
) -> AsyncIterator[Candidate]:
    """A candidate with a client of its own."""
    async with etcd.client() as client:
        found = Candidate(client, name, decide=decide, write_manifest=write_manifest)
        try:
            yield found
        finally:
            await found.stop()
