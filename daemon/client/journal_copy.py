"""Copies a job's journal into `metrics.jsonl` whenever a boundary has been written."""

import asyncio
from pathlib import Path
from typing import Final

from headway.daemon.addresses import NodeEndpoint
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.errors import ConfigError, RecoveryError
from headway.daemon.results.metrics_file import MetricsFile
from headway.daemon.rpc.peer_client import NodeClient
from headway.daemon.situation.boundaries import lineage_of, restorable
from headway.daemon.storage.state_key import JOURNAL
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView
from headway.stages.errors import PeerError, UnavailableError

WHOLE_TIMEOUT_S: Final = 30.0
WHOLE_INTERVAL_S: Final = 0.1


class JournalCopy:
    """The metrics file of one job, and the source of its journal. An existing file is continued."""

    def __init__(self, session: ClusterSession, job: str, path: Path) -> None:
        if session.identity is None:
            raise ConfigError("daemons answer only clients with a certificate; name its folder", "--certs")
        self.file = MetricsFile(path, is_resumed=True)
        self._job = job
        self._session = session
        self._client = NodeClient(session.identity)
        self._written: set[tuple[int, int]] = set()

    async def close(self) -> None:
        """Close the file and the connections."""
        self.file.close()
        await self._client.close()

    async def on_view(self, view: ClusterView, job: JobView) -> None:
        """Copy new lines if a journal was written since the last call. A node that does not answer is asked later."""
        written = set(restorable(job, view.nodes)) if job.spec is not None else set()
        if lineage_of(job) is None:
            written |= {place for place in job.state if job.holders(*place, JOURNAL)}
        if job.checkpoint is not None:
            written.add((job.checkpoint.timeline, job.checkpoint.boundary))
        if not written <= self._written:
            try:
                await self.copy(view)
            except (PeerError, RecoveryError):
                return
            self._written |= written

    async def copy_whole(self, num_batches: int, *, timeout_s: float = WHOLE_TIMEOUT_S) -> None:
        """Copy until `num_batches` batches are there: a daemon may not know yet that the job has ended.

        Raises TimeoutError, naming what is missing and why.

        """
        reason = "no node has more batches"
        try:
            async with asyncio.timeout(timeout_s):
                while self.file.last_batch < num_batches - 1:
                    view = await self._session.view()
                    for name in sorted(view.nodes):
                        try:
                            await self._copy_from(view.nodes[name].endpoint)
                        except (PeerError, RecoveryError) as error:
                            reason = str(error)
                    if self.file.last_batch < num_batches - 1:
                        await asyncio.sleep(WHOLE_INTERVAL_S)
        except TimeoutError as error:
            have = self.file.last_batch + 1
            raise TimeoutError(
                f"journal of {self._job}: {have} of {num_batches} batches came within {timeout_s:g} s ({reason})"
            ) from error

    async def copy(self, view: ClusterView) -> int:
        """Append the batches that the file lacks; return their number. Raises UnavailableError or RecoveryError."""
        if not view.nodes:
            raise UnavailableError("the cluster", "no node is up that could send the journal")
        failure: PeerError | RecoveryError | None = None
        for name in sorted(view.nodes):
            try:
                return await self._copy_from(view.nodes[name].endpoint)
            except (PeerError, RecoveryError) as error:
                failure = error
        assert failure is not None
        raise failure

    async def _copy_from(self, endpoint: NodeEndpoint) -> int:
        before = self.file.last_batch
        async for entry in self._client.journal(endpoint, self._job, from_batch=before + 1):
            self.file.append(
                batch=entry.batch,
                loss=entry.loss,
                tokens=entry.tokens,
                seconds=entry.seconds,
                generation=entry.generation,
                eval_loss=entry.eval_loss if entry.HasField("eval_loss") else None,
            )
        return self.file.last_batch - before
