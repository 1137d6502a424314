"""Draining a node from outside: its record is marked, and the coordinator plans without it."""

from dataclasses import replace

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import node_of
from headway.daemon.errors import ConflictError
from headway.daemon.etcd.transaction import Compare, Put
from headway.daemon.records import Keys, NodeRecord, decode, encode

MAX_ATTEMPTS = 5


async def drain(session: ClusterSession, name: str) -> str:
    """Mark a node as draining, under its own lease, so that the mark goes with it. Raises ConfigError."""
    for _ in range(MAX_ATTEMPTS):
        entry = await session.client.get(Keys.node(name))
        if entry is None:
            node_of(await session.view(), name)  # raises, with the names that exist
            continue
        record = decode(entry.value, NodeRecord)
        if record.is_draining:
            return f"{name}: is draining already"
        try:
            await session.client.transaction(
                [Compare.unchanged(entry.key, entry.mod_revision)],
                [Put(entry.key, encode(replace(record, is_draining=True)), lease_id=entry.lease_id)],
            )
        except ConflictError:
            continue
        return f"{name}: its layers are being moved; `headway events JOB` tells how"
    raise ConflictError(f"node {name}", "its record keeps changing; try again")
