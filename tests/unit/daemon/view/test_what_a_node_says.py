"""What a changed record of a node counts as: nothing new, a speed that was measured, or anything else."""

from dataclasses import fields, replace
from typing import Any

import pytest

from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import Device, NodeRecord, WorkerPort
from headway.daemon.view.cluster_view import ClusterView

NODE = NodeRecord(
    name="a",
    incarnation="a-1",
    address="10.0.0.1:7070",
    host="10.0.0.1",
    site="x",
    devices=(Device(kind="cpu", model="one"),),
    memory_bytes=1,
    arithmetic_class="c",
)
OTHERS: dict[type[Any], Any] = {str: "other", int: 7, float: 7.0, bool: True, dict: {"activity": "is away"}}
OF_FIELDS: dict[str, Any] = {
    "devices": (Device(kind="cpu", model="another"),),
    "workers": (WorkerPort(device_index=0, address="10.0.0.1:7071", incarnation="w"),),
    "down_devices": (0,),
}


def counts(before: NodeRecord, after: NodeRecord) -> tuple[int, int]:
    """Return by how much the second record raises the numbers of records and of changes for all jobs."""
    view = ClusterView()
    view.apply(Keys.node("a"), encode(before), mod_revision=1, create_revision=1)
    known = view.num_record_changes, view.num_changes
    view.apply(Keys.node("a"), encode(after), mod_revision=2, create_revision=1)
    return view.num_record_changes - known[0], view.num_changes - known[1]


@pytest.mark.parametrize("name", sorted({each.name for each in fields(NodeRecord)} - {"name", "generations"}))
def test_each_field_counts(name: str) -> None:
    """No field is forgotten, also none that a later release adds."""
    other = OF_FIELDS[name] if name in OF_FIELDS else OTHERS[type(getattr(NODE, name))]
    assert counts(NODE, replace(NODE, **{name: other})) == (1, 1)


def test_the_same_again_counts_as_nothing() -> None:
    """A record that is written again changes nothing."""
    assert counts(NODE, NODE) == (0, 0)


def test_a_measured_speed_costs_no_job() -> None:
    """Records of nodes have changed; what each job rests on has not."""
    (device,) = NODE.devices
    assert counts(NODE, replace(NODE, devices=(replace(device, speed=2.0, bfloat16_speed=3.0),))) == (1, 0)


def test_what_a_node_has_seen_is_no_record() -> None:
    """All nodes tell more of that with every plan of any job; answers may be others."""
    assert counts(NODE, replace(NODE, generations={"job": 3})) == (0, 1)
