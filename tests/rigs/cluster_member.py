"""A member of a cluster that a test plays."""

from types import SimpleNamespace
from typing import Any

from headway.daemon.decide.cluster_watch import Member


def member(node: str = "a", **known: Any) -> Member:
    """Return a node's member. known: its fields, and `view` in place of a cluster that is reachable."""
    cluster = SimpleNamespace(view=known.pop("view", None), is_reachable=True)
    around = {"incarnation": f"{node}-1", "etcd": None, "cluster": cluster, "lease_id": lambda: 1}
    return Member(node=node, **around | known)
