"""The leader writes down what users have used; whoever leads next, and whoever asks, goes on from there."""

import pytest

from headway.daemon.client.node_requests import report_shares
from headway.daemon.cluster.cluster_records import SharesRecord, UsageRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.commands import Transaction
from headway.daemon.decide.coordinator import decide
from headway.daemon.decide.usage import WRITTEN_EVERY_S
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec


def test_usage_is_written_once_a_minute_and_outlives_the_leader() -> None:
    """A job on two nodes for five minutes, with a new leader in between: ten device-minutes of its user, few writes."""
    cluster = SimulatedCluster()
    for name in ("a", "b"):
        cluster.add_node(name)
    cluster.submit(small_spec("first", batches=10**6), user="alice@host")
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RUNNING)
    began = cluster.now
    cluster.calm(until=lambda: cluster.now >= began + 150, max_rounds=1000)
    cluster.elect()
    cluster.calm(until=lambda: cluster.now >= began + 300, max_rounds=1000)
    record = decode(cluster.store.values[Keys.USAGE], UsageRecord)
    assert record.seconds["alice"] == pytest.approx(600.0, abs=2.5 * WRITTEN_EVERY_S)
    writes = [change for change in cluster.store.history if change.key == Keys.USAGE]
    assert 4 <= len(writes) <= 300 / WRITTEN_EVERY_S + 1
    [line] = report_shares(cluster.truth(), now=cluster.now)
    assert (line.user, line.num_devices, line.share) == ("alice", 2, 1.0)


def test_shares_are_of_those_who_have_jobs() -> None:
    """Alice with weight 3 and bob have jobs, carol has a weight alone: three quarters, a quarter, nothing."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.submit(small_spec("first"), user="alice@one")
    cluster.submit(small_spec("second"), user="bob@two")
    cluster.store.transact({}, {Keys.SHARES: encode(SharesRecord(weights={"alice": 3.0, "carol": 2.0}))})
    shares = {line.user: line.share for line in report_shares(cluster.truth(), now=cluster.now)}
    assert shares == {"alice": 0.75, "bob": 0.25, "carol": 0.0}


@pytest.mark.parametrize("is_newer", [False, True])
def test_a_count_that_cannot_be_read_is_replaced_unless_a_newer_release_wrote_it(is_newer: bool) -> None:
    """In both cases the leader does not repeat the decision."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.submit(small_spec("first", batches=10**6), user="alice@host")
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RUNNING)
    view, now = cluster.truth(), cluster.now
    written = b'{"format":2}' if is_newer else b"garbage"
    view.apply(Keys.USAGE, written, mod_revision=10**6, create_revision=10**6, now=now)
    later = now + 2 * WRITTEN_EVERY_S
    decision = decide(view, now=later)
    writes = [one for one in decision.commands if isinstance(one, Transaction) and Keys.USAGE in one.puts]
    assert [one.compare for one in writes] == ([] if is_newer else [{Keys.USAGE: 10**6}])
    assert decision.wake_at is None or decision.wake_at > later


def test_a_plan_without_its_submission_is_charged_to_no_user() -> None:
    """Keys of a listing are read at different moments, so the plan may be there first."""
    cluster = SimulatedCluster()
    for name in ("a", "b"):
        cluster.add_node(name)
    cluster.submit(small_spec("first", batches=10**6), user="alice@host")
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RUNNING)
    view = ClusterView()
    for number, (key, value) in enumerate(sorted(cluster.store.values.items())):
        view.apply(key, value, mod_revision=1, create_revision=1, now=cluster.now + number)
    assert {line.user for line in report_shares(view, now=cluster.now + 100)} == {"alice"}
