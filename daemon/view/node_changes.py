"""What a node's changed record counts as: nothing new, a measured speed, another place, another member. Pure.

Each record that counts for more than it says makes the leader judge all jobs again.
"""

from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from headway.daemon.records.measurements import ReachRecord
from headway.daemon.records.records import NodeRecord

_MEMBERSHIP = attrgetter(
    "incarnation",
    "is_draining",
    "stays_out",
    "down_devices",
    "site",
    "site_is_private",
    "arithmetic_class",
    "protocol",
)
_BESIDE_DEVICES = attrgetter(*({each.name for each in fields(NodeRecord)} - {"devices", "generations"}))
_WHEREABOUTS = attrgetter("incarnation", "protocol", "host", "site", "is_draining")


def is_another_member(before: NodeRecord | None, after: NodeRecord | None) -> bool:
    """Return whether what matters for plans has changed: any other change is only a heartbeat."""
    if before is None or after is None:
        return before is not after
    if _MEMBERSHIP(before) != _MEMBERSHIP(after):
        return True
    return _has_other_devices(before, after)


def _has_other_devices(before: NodeRecord, after: NodeRecord) -> bool:
    """Return whether more than measured speeds of devices has changed."""
    if before.devices == after.devices:
        return False
    return [each.unmeasured for each in before.devices] != [each.unmeasured for each in after.devices]


def says_more(before: NodeRecord | None, after: NodeRecord | None) -> bool:
    """Return whether more has changed than what a node has seen: of that, all tell more with every plan of any job."""
    if before is None or after is None:
        return before is not after
    return before.devices != after.devices or _BESIDE_DEVICES(before) != _BESIDE_DEVICES(after)


def says_more_than_speeds(before: NodeRecord | None, after: NodeRecord | None) -> bool:
    """Return whether more has changed than that, and than how fast its devices are."""
    if before is None or after is None:
        return before is not after
    return _BESIDE_DEVICES(before) != _BESIDE_DEVICES(after) or _has_other_devices(before, after)


def tells(reach: ReachRecord | None) -> tuple[Any, ...]:
    """Return the blocked ways of which a node tells, without their dates: decisions rest on nothing else."""
    if reach is None or not reach.facts:
        return ()
    return reach.incarnation, *(replace(fact, measured_at=0.0) for fact in reach.facts)


def whereabouts(node: NodeRecord | None) -> Any:
    """Return the fields that decide where copies of a job's state are, and whether they count."""
    return _WHEREABOUTS(node) if node is not None else None


def offers_more(before: NodeRecord, after: NodeRecord) -> bool:
    """Return whether plans may now use something of a node that they could not use before."""
    is_released = before.is_draining and not after.is_draining
    return is_released or not set(before.down_devices) <= set(after.down_devices)
