"""Copies a job's journal into `metrics.jsonl` whenever a boundary has been written."""

from pathlib import Path

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.coordination.boundaries import JOURNAL, lineage_of, restorable
from headway.daemon.coordination.cluster_view import ClusterView, JobView
from headway.daemon.errors import ConfigError, RecoveryError
from headway.daemon.node.peer_client import NodeClient
from headway.daemon.results.metrics_file import MetricsFile
from headway.stages.errors import PeerError, UnavailableError


class JournalCopy:
    """The metrics file of one job and the way to its journal. A file that is there already is gone on with."""

    def __init__(self, session: ClusterSession, job: str, path: Path) -> None:
        if session.identity is None:
            raise ConfigError("daemons answer only clients with a certificate; name its folder", "--certs")
        self.file = MetricsFile(path, is_resumed=True)
        self._job = job
        self._client = NodeClient(session.identity)
        self._written: set[tuple[int, int]] = set()

    async def close(self) -> None:
        """Close the file and the connections."""
        self.file.close()
        await self._client.close()

    async def on_view(self, view: ClusterView, job: JobView) -> None:
        """Copy what is new if a journal was written since the last call. A node that does not answer is asked later."""
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

    async def copy(self, view: ClusterView) -> int:
        """Append the batches that the file lacks; returns how many. Raises UnavailableError or RecoveryError."""
        if not view.nodes:
            raise UnavailableError("the cluster", "no node is up that could send the journal")
        failure: PeerError | RecoveryError | None = None
        for name in sorted(view.nodes):
            before = self.file.last_batch
            try:
                entries = self._client.journal(view.nodes[name].address, self._job, from_batch=before + 1)
                async for entry in entries:
                    self.file.append(
                        batch=entry.batch,
                        loss=entry.loss,
                        tokens=entry.tokens,
                        seconds=entry.seconds,
                        generation=entry.generation,
                    )
            except (PeerError, RecoveryError) as error:
                failure = error
                continue
            return self.file.last_batch - before
        assert failure is not None
        raise failure
