"""A decision that was written once already: what it rests on has moved, so writing it again changes nothing."""

from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Desired, Phase
from headway.daemon.decide.commands import Transaction
from headway.daemon.decide.coordinator import decide
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec


def test_a_move_that_touches_the_phase_alone_is_written_once() -> None:
    """Two leaders decide from one view to run a paused job: the second write is refused."""
    cluster = SimulatedCluster()
    cluster.submit(small_spec("first"))
    cluster.want("first", Desired.PAUSED)
    [pause] = decide(cluster.truth(), now=cluster.now).commands
    assert isinstance(pause, Transaction)
    assert cluster.store.transact(pause.compare, pause.puts, pause.deletes)
    cluster.want("first", Desired.RUNNING)
    [one] = decide(cluster.truth(), now=cluster.now).commands
    [other] = decide(cluster.truth(), now=cluster.now).commands
    assert isinstance(one, Transaction)
    assert isinstance(other, Transaction)
    assert Keys.of("first", "phase") in one.puts
    assert cluster.store.transact(one.compare, one.puts, one.deletes)
    assert not cluster.store.transact(other.compare, other.puts, other.deletes)
    assert cluster.phase("first").phase is Phase.QUEUED
