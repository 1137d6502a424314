"""The parts of an etcd transaction: comparisons, and changes that happen only if all comparisons hold. Pure."""

from dataclasses import dataclass
from typing import Self

from headway.proto import etcd_pb2


@dataclass(frozen=True, slots=True)
class Compare:
    """One condition on one key."""

    key: str
    mod_revision: int | None
    """Revision of its last change; 0: it does not exist; None: it exists."""

    @classmethod
    def absent(cls, key: str) -> Self:
        """Require that the key does not exist."""
        return cls(key, 0)

    @classmethod
    def present(cls, key: str) -> Self:
        """Require that the key exists."""
        return cls(key, None)

    @classmethod
    def unchanged(cls, key: str, mod_revision: int) -> Self:
        """Require that the key was last changed in this revision; 0: it does not exist."""
        return cls(key, mod_revision)


@dataclass(frozen=True, slots=True)
class Put:
    """Set a key. lease_id 0: it stays until it is deleted."""

    key: str
    value: bytes
    lease_id: int = 0
    keeps_lease: bool = False
    """True: the key exists, and keeps the lease that it has."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key, or every key that begins with it. Deleting an absent key is no error."""

    key: str
    is_prefix: bool = False


Change = Put | Delete


def transaction_request(compare: tuple[Compare, ...], changes: tuple[Change, ...]) -> etcd_pb2.TxnRequest:
    """Return etcd's message for: if every comparison holds, make every change, all in one revision.

    Raises ValueError when a key is changed twice, which etcd would refuse.
    """
    keys = [change.key for change in changes]
    if len(set(keys)) != len(keys):
        raise ValueError("a transaction may change each key once")
    return etcd_pb2.TxnRequest(
        compare=[_compare_message(condition) for condition in compare],
        success=[_change_message(change) for change in changes],
    )


def _compare_message(condition: Compare) -> etcd_pb2.Compare:
    return etcd_pb2.Compare(
        key=to_bytes(condition.key),
        target=etcd_pb2.Compare.MOD,
        result=etcd_pb2.Compare.GREATER if condition.mod_revision is None else etcd_pb2.Compare.EQUAL,
        mod_revision=condition.mod_revision or 0,
    )


def _change_message(change: Change) -> etcd_pb2.RequestOp:
    if isinstance(change, Put):
        key, lease, keeps = to_bytes(change.key), change.lease_id, change.keeps_lease
        put = etcd_pb2.PutRequest(key=key, value=change.value, lease=lease, ignore_lease=keeps)
        return etcd_pb2.RequestOp(request_put=put)
    return etcd_pb2.RequestOp(request_delete_range=delete_request(change))


def delete_request(change: Delete) -> etcd_pb2.DeleteRangeRequest:
    """Return etcd's message for one deletion."""
    key = to_bytes(change.key)
    return (
        etcd_pb2.DeleteRangeRequest(key=range_start(key), range_end=prefix_end(key))
        if change.is_prefix
        else (etcd_pb2.DeleteRangeRequest(key=key))
    )


def to_bytes(key: str) -> bytes:
    """Return a key as etcd's bytes."""
    return key.encode("utf-8", "surrogateescape")


def to_text(key: bytes) -> str:
    """Return a key as text. A key that is no text comes back unchanged by `to_bytes`."""
    return key.decode("utf-8", "surrogateescape")


def range_start(prefix: bytes) -> bytes:
    """Return the first key of the range of a prefix; etcd knows no empty key."""
    return prefix or b"\0"


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with a prefix: the first key after them, in etcd's notation.

    An empty prefix, or one of 0xff alone, has no end: etcd writes that as a zero byte.
    """
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else b"\0"


def range_of(prefix: str, below: str) -> tuple[bytes, bytes]:
    """Return start and end of the range of a prefix, as far as its keys sort before `below`; empty: all of them."""
    return range_start(to_bytes(prefix)), to_bytes(below) if below else prefix_end(to_bytes(prefix))
