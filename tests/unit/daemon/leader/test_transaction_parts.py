"""A decision about many lost nodes fits etcd's limit, and the decision itself stays one step."""

from dataclasses import replace

import pytest

from headway.daemon.cluster.format import decode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Phase, PlanRecord
from headway.daemon.decide.commands import Transaction, parts
from tests.rigs.mortal_etcd import MortalStore, WriterDiedError
from tests.rigs.simulated_cluster import SimulatedCluster
from tests.rigs.transaction_parts import running_on

NUM_NODES = 130


def decided(num_leased: int) -> Transaction:
    leased = {Keys.failure(f"node-{number}", 0): (b"{}", 600) for number in range(num_leased)}
    return Transaction(
        job="j", reason="r", compare={"phase": 7}, puts={"phase": b"", "next": b""}, deletes=("stop",), leased=leased
    )


def test_a_decision_without_notes_is_one_transaction() -> None:
    assert parts(decided(0)) == (decided(0),)


def test_notes_follow_the_decision_which_waits_for_no_lease() -> None:
    """Nothing is lost, no part is too large, and the first has all that was compared and decided, and no note."""
    whole = decided(300)
    first, *notes = parts(whole)
    assert first == replace(whole, leased={})
    assert all(not part.compare and not part.puts and not part.deletes for part in notes)
    assert [len(part.leased) for part in notes] == [128, 128, 44]
    assert [entry for part in notes for entry in part.leased.items()] == list(whole.leased.items())


def lose_all_but(cluster: SimulatedCluster, *survivors: str) -> None:
    """All other nodes die at once, and their leases end."""
    cluster.leader = ""
    for name in [name for name in cluster.nodes if name not in survivors]:
        cluster.kill(name)
        cluster.expire(name)


def test_a_hundred_and_thirty_nodes_lost_at_once_are_recovered_from() -> None:
    """All nodes of a plan die: one decision, all failures noted, and the job trains on the node that is left."""
    cluster = running_on(NUM_NODES, "survivor")
    lose_all_but(cluster, "survivor")
    cluster.lead()
    assert cluster.phase("first").phase is Phase.RECOVERING
    noted = [key for key in cluster.store.values if key.startswith(Keys.FAILURES)]
    assert len(noted) == NUM_NODES
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RUNNING)
    plan = decode(cluster.store.values[Keys.of("first", "plan")], PlanRecord)
    assert {stage.node for stage in plan.workers} == {"survivor"}
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.FINISHED)


@pytest.mark.parametrize(("number", "is_written", "num_notes"), [(1, False, 0), (1, True, 128), (2, False, 128)])
def test_a_leader_that_dies_between_the_parts_has_decided(number: int, is_written: bool, num_notes: int) -> None:
    """It dies after the decision, or between two parts of notes: those are lost at most, and the next one goes on."""
    survivors = ("one", "other")
    store = MortalStore(counts=lambda key: key.startswith(Keys.FAILURES), deaths={number: is_written})
    cluster = running_on(NUM_NODES, *survivors, store=store)
    lose_all_but(cluster, *survivors)
    with pytest.raises(WriterDiedError):
        cluster.lead()
    assert cluster.phase("first").phase is Phase.RECOVERING
    assert sum(key.startswith(Keys.FAILURES) for key in store.values) == num_notes
    assert not cluster.truth().unreadable
    [left] = lose_leader(cluster)
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.FINISHED)
    assert sum(key.startswith(Keys.FAILURES) for key in store.values) <= NUM_NODES + 1
    assert left in cluster.nodes


def lose_leader(cluster: SimulatedCluster) -> list[str]:
    """Returns the nodes that are left."""
    leader = cluster.leader
    cluster.kill(leader)
    cluster.expire(leader)
    return list(cluster.nodes)
