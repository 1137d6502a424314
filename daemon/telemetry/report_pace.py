"""How often a node writes measurements to etcd that change no plan: the larger the cluster, the less often. Pure.

Every daemon receives every record. So the rate of such records is limited for the whole cluster, and not for each node.
"""

from typing import Final

CLUSTER_PER_S: Final = 20.0
"""Maximum rate of one kind of report, of all nodes together, in records per second."""


def interval_s(least_s: float, num_nodes: int) -> float:
    """Return the interval of one node's reports of one kind, in a cluster of so many nodes."""
    return max(least_s, num_nodes / CLUSTER_PER_S)
