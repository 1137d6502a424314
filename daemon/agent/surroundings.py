"""The parts of the daemon that an agent uses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headway.daemon.etcd.client import EtcdClient
from headway.daemon.reach.reach_target import Reach
from headway.daemon.rpc.peer_client import NodeClient
from headway.daemon.rpc.rate_limit import OutgoingTransfers
from headway.daemon.runtime.activities import Activities
from headway.daemon.shards.library import DataLibrary
from headway.daemon.storage.state_store import StateStore
from headway.daemon.view.cluster_view import ClusterView


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The collaborators of one node's agent, during one incarnation."""

    node: str
    incarnation: str
    lease_id: Callable[[], int]
    """The node's present lease: after a lost lease the node takes another."""
    etcd: EtcdClient
    view: ClusterView
    store: StateStore
    library: DataLibrary
    client: NodeClient
    checkpoint_root: Path | None
    reach: Reach
    """Finds out whether ports of other nodes answer."""
    outgoing: OutgoingTransfers = field(default_factory=OutgoingTransfers)
    activities: Activities = field(default_factory=Activities)
    wrote_late: Callable[[str], None] = lambda _: None
    """Called with the job when a copy to its checkpoint folder ends after it was given up."""
    remembered: Callable[[], Mapping[str, int] | None] = lambda: None
    """Generations that this node has persisted, as in NodeState."""
