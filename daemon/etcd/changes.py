"""What etcd says has changed since a revision: far less than a listing. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed below a prefix, without values."""

    revision: int
    """Revision of the answer."""
    revisions: dict[str, int]
    """Revisions of the keys that were set since, and still exist."""
    num_keys: int
    """Number of all keys below the prefix."""
    cluster_id: int
    raft_term: int
