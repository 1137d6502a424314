"""Finds the leases that keep a daemon's records in etcd, so that a daemon with proof of its death can revoke them."""

from headway.daemon.etcd.client import EtcdClient
from headway.daemon.records.cluster_records import LeaderRecord
from headway.daemon.records.format import UnreadableRecordError, decode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import NodeRecord

Record = NodeRecord | LeaderRecord


async def leases_of(etcd: EtcdClient, node: str, incarnation: str) -> list[int]:
    """Return the leases of one incarnation of a daemon. An unreadable record names no daemon, and hides no other
    record.
    """
    found: list[int] = []
    places: tuple[tuple[str, type[Record]], ...] = ((Keys.node(node), NodeRecord), (Keys.LEADER, LeaderRecord))
    for key, kind in places:
        entry = await etcd.get(key)
        if entry is None or not entry.lease_id:
            continue
        try:
            record = decode(entry.value, kind)
        except UnreadableRecordError:
            continue
        if record.incarnation == incarnation:
            found.append(entry.lease_id)
    return found
