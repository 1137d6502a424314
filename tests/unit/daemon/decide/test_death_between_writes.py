"""A process dies right before or right after one of its writes: readers see what is true, and the jobs go on."""

from itertools import permutations

import pytest

from headway.daemon.cluster.cluster_records import SharesRecord, UsageRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.usage import WRITTEN_EVERY_S
from tests.rigs.mortal_etcd import MortalStore, WriterDiedError
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec
from tests.rigs.simulated_node import steady_view

REACH = Keys.reach("")
NAMES = ("a", "b", "c")
STEP_S = 1.0


class MortalCluster(SimulatedCluster):
    """Three nodes; the process of a name that dies is followed by another one at once."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        self.store = self.mortal = MortalStore()
        self.num_deaths = 0
        self.was_blocked: set[tuple[str, str]] = set()
        for name in NAMES:
            self.add_node(name)

    def live(self, num_rounds: int) -> None:
        """Everybody does what is due, in good order; readers are asked after every death."""
        self.was_blocked |= self.blocked
        for _ in range(num_rounds):
            for name in NAMES:
                try:
                    self.deliver(self.nodes[name])
                    self.act(self.nodes[name])
                except WriterDiedError:
                    self._follow(name)
            try:
                if self.leader in self.nodes:
                    self.deliver(self.nodes[self.leader])
                self.lead()
            except WriterDiedError:
                self._follow(self.leader)
            self.train()
            self.now += STEP_S

    def _follow(self, name: str) -> None:
        self.num_deaths += 1
        self.kill(name)
        self._look()
        self.expire(name)
        self._look()
        self.add_node(name)
        self._look()

    def _look(self) -> None:
        """A reader that comes now: every record is whole, and no process is blamed for what another one was."""
        view = self.truth()
        assert not view.unreadable
        for way in view.blocked.ways:
            assert (way.source, way.target) in self.was_blocked, way
        assert view.reach.keys() <= view.nodes.keys(), "what a node found goes with the node"


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("number", [1, 3, 4, 6])
def test_a_node_that_dies_while_it_reports_blocked_pairs_is_not_blamed(number: int, is_written: bool) -> None:
    """The writer of the n-th fact dies while pairs become blocked and heal. The job finishes."""
    cluster = MortalCluster()
    cluster.submit(small_spec("j", batches=60, min_nodes=2))
    cluster.mortal.counts = lambda key: key.startswith(REACH)
    cluster.mortal.deaths = {number: is_written}
    for blocked in ({("a", "b")}, {("a", "b"), ("c", "b")}, {("b", "c")}, set()):
        cluster.blocked = blocked
        cluster.live(40)
    cluster.calm(until=lambda: cluster.phase("j").phase is Phase.FINISHED)
    assert cluster.num_deaths == 1
    assert not cluster.truth().blocked


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_a_leader_that_dies_while_it_counts_usage_loses_at_most_a_minute(number: int, is_written: bool) -> None:
    """The writer of the n-th count dies; no user has used more device time than there was."""
    cluster = MortalCluster()
    cluster.submit(small_spec("j", batches=10**6), user="alice@host")
    cluster.mortal.counts = lambda key: key == Keys.USAGE
    cluster.mortal.deaths = {number: is_written}
    began = cluster.now
    cluster.live(round(240 / STEP_S))
    assert cluster.num_deaths == 1
    record = decode(cluster.store.values[Keys.USAGE], UsageRecord)
    assert cluster.now - 2 * WRITTEN_EVERY_S <= record.at <= cluster.now
    counted_s = len(NAMES) * (record.at - began)
    assert counted_s - len(NAMES) * WRITTEN_EVERY_S <= record.seconds["alice"] <= counted_s


def test_shares_and_use_mean_the_same_in_whatever_order_they_are_read() -> None:
    """Neither the order of a listing nor a death between the writes changes the decayed count."""
    cluster = MortalCluster()
    cluster.submit(small_spec("j", batches=10**6), user="alice@host")
    cluster.live(20)
    shares = encode(SharesRecord(weights={"alice": 2.0}, half_life_s=600.0))
    used = encode(UsageRecord(seconds={"alice": 100.0, "bob": 50.0}))
    cluster.store.transact({}, {Keys.SHARES: shares})
    cluster.store.transact({}, {Keys.USAGE: used})
    found = set()
    for order in permutations([Keys.of("j", "spec"), Keys.of("j", "plan"), Keys.SHARES, Keys.USAGE]):
        view = steady_view()
        for key in order:
            _apply(view, cluster, key)
        reading = view.usage.read_out(cluster.now + 600.0)
        found.add(
            (tuple(sorted((user, round(seconds, 6)) for user, seconds in reading.items())), view.shares.half_life_s)
        )
    assert len(found) == 1, found


def _apply(view: ClusterView, cluster: SimulatedCluster, key: str) -> None:
    created, modified = cluster.store.revisions[key]
    view.apply(key, cluster.store.values[key], mod_revision=modified, create_revision=created, now=cluster.now)
