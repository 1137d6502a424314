"""What etcd says has changed since a revision: far less than a listing. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Changes:
    """What had changed below a prefix at one revision, without values."""

    revision: int
    """etcd's revision when it answered."""
    revisions: dict[str, int]
    """Revisions of the keys that were set since, and still existed."""
    num_keys: int
    """Number of all keys below the prefix."""
    cluster_id: int
    raft_term: int
