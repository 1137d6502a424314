"""The coordinator's decisions, one story at a time, on a simulated cluster in good order."""

from dataclasses import replace

import msgspec
import pytest

from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import (
    CheckpointRecord,
    Desired,
    NodeRecord,
    Phase,
    seen_key,
)
from headway.daemon.decide.cluster_view import SETTLE_S
from headway.daemon.decide.commands import Transaction
from headway.daemon.decide.conditions import node_saw_later_plan
from headway.daemon.decide.coordinator import TABLE, decide
from headway.daemon.decide.deadlines import CHANGE_RETRY_S, START_DEADLINE_S
from headway.daemon.decide.situation import JobSituation
from tests.rigs.scenarios import cluster_of, events, plan, run_until, running_at_full_speed
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec


def test_every_phase_has_a_way_out() -> None:
    """Each phase that is no end has rows, and some chain of rows leads from it to an end."""
    ends = {Phase.FINISHED, Phase.CANCELLED}
    reaching = set(ends)
    for _ in Phase:
        reaching |= {row.phase for row in TABLE if row.next_phase in reaching}
    assert reaching == set(Phase)


def test_job_waits_until_nodes_settle() -> None:
    """A job and a node are there: nothing starts before the set of nodes was still for SETTLE_S, then it does."""
    cluster = cluster_of("a")
    cluster.elect()
    leader = cluster.nodes["a"]
    cluster.deliver(leader)
    early = decide(leader.view, now=cluster.now + SETTLE_S / 2)
    assert not any(
        Keys.of("first", "next") in command.puts for command in early.commands if isinstance(command, Transaction)
    )
    assert early.wake_at == cluster.now + SETTLE_S
    [command] = decide(leader.view, now=cluster.now + SETTLE_S).commands
    assert isinstance(command, Transaction)
    assert Keys.of("first", "next") in command.puts


def test_waiting_costs_no_writes() -> None:
    """A job without nodes says what it waits for, once."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.submit(small_spec("first", min_nodes=3))
    cluster.calm(max_rounds=3)
    assert cluster.phase("first").reason == "waits for 2 more nodes (min_nodes = 3, 1 free)"
    revision = cluster.store.revision
    cluster.calm(max_rounds=20)
    assert cluster.store.revision == revision


def test_job_that_contradicts_itself_fails() -> None:
    """min_nodes above the number of layers is impossible: the job fails with the arithmetic."""
    cluster = cluster_of("a", min_nodes=9)
    run_until(cluster, Phase.FAILED)
    assert "5 layers" in cluster.phase("first").reason


def test_job_trains_to_the_end_and_leaves_a_checkpoint() -> None:
    """Three nodes: prepared, run, stopped at B by themselves, checkpointed; the manifest reads as the record."""
    cluster = cluster_of("a", "b", "c", batches=5)
    run_until(cluster, Phase.FINISHED)
    record = decode(cluster.store.values[Keys.of("first", "checkpoint")], CheckpointRecord)
    assert record.boundary == 5
    assert set(record.files) == {"embed", "block.0", "block.1", "block.2", "head", "journal"}
    manifest = cluster.manifests[record.url]
    assert decode(manifest, CheckpointRecord) == record
    assert msgspec.json.decode(manifest)["spec"]["train"]["batches"] == 5
    assert not {Keys.of("first", leaf) for leaf in ("plan", "next", "stop")} & cluster.store.values.keys()


def test_node_that_joins_is_used_without_losing_a_batch() -> None:
    """A third node joins: all prepare, the old plan stops at b, the new one goes on from b, and a sentence says so."""
    cluster = cluster_of("a", "b")
    running_at_full_speed(cluster)
    cluster.add_node("c")
    run_until(cluster, Phase.STOPPING)
    run_until(cluster, Phase.RUNNING)
    assert {stage.node for stage in plan(cluster).workers} == {"a", "b", "c"}
    assert plan(cluster).boundary > 0
    assert plan(cluster).source == "nodes"
    assert plan(cluster).timeline == 1
    assert any(text.startswith("Node c joined: 3 stages instead of 2, predicted 1.") for text in events(cluster))


def test_node_that_drains_is_planned_away() -> None:
    """One of two nodes drains: the other takes all layers, and the daemon may go."""
    cluster = cluster_of("a", "b")
    running_at_full_speed(cluster)
    cluster.drain("a")
    cluster.calm(until=lambda: "a" not in cluster.nodes)
    assert cluster.phase("first").phase is Phase.RUNNING
    assert [stage.node for stage in plan(cluster).workers] == ["b"]


def test_node_that_drains_while_workers_load_is_planned_away_when_they_run() -> None:
    """A worker is prepared for one plan at a time: the change waits until the plan in force runs everywhere."""
    cluster = cluster_of("a", "b")
    run_until(cluster, Phase.RUNNING)
    slow = cluster.nodes["b"].workers[0]
    slow.hangs = True
    cluster.drain("a")
    loaded_at = cluster.now + START_DEADLINE_S / 2
    cluster.calm(until=lambda: cluster.now >= loaded_at or cluster.phase("first").phase is not Phase.RUNNING)
    assert cluster.phase("first").phase is Phase.RUNNING
    assert cluster.now >= loaded_at
    slow.hangs = False
    cluster.calm(until=lambda: "a" not in cluster.nodes)
    assert cluster.phase("first").phase is Phase.RUNNING
    assert [stage.node for stage in plan(cluster).workers] == ["b"]


def test_all_nodes_drain_and_the_job_goes_on_later() -> None:
    """`up` is ended: every node drains at once; the job is saved, queued, and continues on the next node's coming."""
    cluster = cluster_of("a", "b")
    running_at_full_speed(cluster)
    for name in ("a", "b"):
        cluster.drain(name)
    cluster.calm(until=lambda: not cluster.nodes)
    assert cluster.phase("first").phase is Phase.QUEUED
    saved = decode(cluster.store.values[Keys.of("first", "checkpoint")], CheckpointRecord)
    cluster.add_node("z")
    run_until(cluster, Phase.RUNNING)
    assert (plan(cluster).source, plan(cluster).boundary) == ("checkpoint", saved.boundary)
    assert (plan(cluster).timeline, plan(cluster).ancestry) == (saved.timeline, ()), "nothing was rolled back"
    run_until(cluster, Phase.FINISHED)


def test_pause_and_resume() -> None:
    """A pause ends in a checkpoint and no plan; resume goes on from there, on the same timeline."""
    cluster = cluster_of("a")
    running_at_full_speed(cluster)
    cluster.want("first", Desired.PAUSED)
    run_until(cluster, Phase.PAUSED)
    assert Keys.of("first", "plan") not in cluster.store.values
    cluster.want("first", Desired.RUNNING)
    run_until(cluster, Phase.RUNNING)
    assert plan(cluster).timeline == 1
    assert plan(cluster).generation == 2


def test_node_that_comes_back_in_time_is_forgiven() -> None:
    """etcd lost the leases for a moment and the same daemon registers again: the job trains on."""
    cluster = cluster_of("a")
    running_at_full_speed(cluster)
    cluster.store.revoke(cluster.nodes["a"].lease)
    cluster.calm(max_rounds=20)
    assert cluster.phase("first").phase is Phase.RUNNING
    assert plan(cluster).generation == 1


@pytest.mark.parametrize(("wanted", "reached"), [(Desired.CANCELLED, Phase.CANCELLED), (Desired.PAUSED, Phase.PAUSED)])
@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.PREPARING, Phase.RUNNING, Phase.CHANGING, Phase.STOPPING])
def test_cancel_and_pause_work_in_every_phase(phase: Phase, wanted: Desired, reached: Phase) -> None:
    """Whatever the job is doing when it is asked, it gets there, and leaves no plan behind."""
    cluster = SimulatedCluster() if phase is Phase.QUEUED else cluster_of("a", "b")
    if phase is Phase.QUEUED:
        cluster.add_node("a")
        cluster.submit(small_spec("first", min_nodes=2))
        cluster.calm(max_rounds=3)
    elif phase in (Phase.CHANGING, Phase.STOPPING):
        running_at_full_speed(cluster)
        cluster.add_node("c")
    run_until(cluster, phase)
    cluster.want("first", wanted)
    run_until(cluster, reached)
    assert not {Keys.of("first", leaf) for leaf in ("plan", "next", "stop")} & cluster.store.values.keys()
    if reached is Phase.PAUSED:
        cluster.want("first", Desired.CANCELLED)
        run_until(cluster, Phase.CANCELLED)


def test_a_dropped_change_is_tried_again_later() -> None:
    """The joining node's worker fails while it prepares. Training continues, and the change is retried later."""
    cluster = cluster_of("a")
    running_at_full_speed(cluster)
    cluster.add_node("b")
    cluster.nodes["b"].workers[0].hangs = True
    run_until(cluster, Phase.CHANGING)
    cluster.nodes["b"].workers[0].hangs = False
    cluster.nodes["b"].workers[0].failure = (2, "Traceback: no such device")
    run_until(cluster, Phase.RUNNING)
    assert plan(cluster).generation == 1
    given_up_at = cluster.now
    run_until(cluster, Phase.CHANGING)
    assert cluster.now - given_up_at >= CHANGE_RETRY_S - 1
    cluster.calm(until=lambda: plan(cluster).generation == 3)


def test_a_change_that_is_given_up_again_and_again_is_tried_less_often() -> None:
    """A node never gets ready. Training continues, and the pauses double until another node comes."""
    cluster = cluster_of("a", batches=100_000)
    running_at_full_speed(cluster)
    cluster.add_node("b")
    cluster.nodes["b"].workers[0].hangs = True
    pauses = []
    for _ in range(4):
        run_until(cluster, Phase.CHANGING)
        run_until(cluster, Phase.RUNNING, max_rounds=4000)
        given_up_at = cluster.now
        run_until(cluster, Phase.CHANGING, max_rounds=4000)
        pauses.append(cluster.now - given_up_at)
    assert plan(cluster).generation == 1
    for pause, factor in zip(pauses, (1, 2, 4, 8), strict=True):
        assert factor * CHANGE_RETRY_S - 1 <= pause <= factor * CHANGE_RETRY_S + 5
    run_until(cluster, Phase.RUNNING, max_rounds=4000)
    given_up_at = cluster.now
    cluster.calm(max_rounds=3)
    cluster.add_node("c")
    run_until(cluster, Phase.CHANGING)
    assert cluster.now - given_up_at <= CHANGE_RETRY_S + 5


def test_jobs_are_served_first_in_first_out() -> None:
    """One device, three jobs: each waits and says for whom; the order is that of submission."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    for name in ("zebra", "ant", "bee"):
        cluster.submit(small_spec(name, batches=4))
    run_until(cluster, Phase.RUNNING, "zebra")
    assert cluster.phase("ant").reason == "waits for devices of job zebra"
    assert cluster.phase("bee").reason == "waits for its turn after job ant"
    cluster.calm(until=lambda: cluster.phase("bee").phase is Phase.FINISHED)
    finished = [
        change.key
        for change in cluster.store.history
        if change.value and b"Finished" in change.value and "/events/" in change.key
    ]
    assert [key.split("/")[3] for key in finished] == ["zebra", "ant", "bee"]


def test_job_that_cannot_run_does_not_block_the_next() -> None:
    """The first job wants three nodes, one is there: the second runs."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.submit(small_spec("large", min_nodes=3))
    cluster.submit(small_spec("small", batches=4))
    run_until(cluster, Phase.FINISHED, "small")
    assert cluster.phase("large").phase is Phase.QUEUED


def test_two_jobs_share_the_cluster_by_devices() -> None:
    """The first job takes two nodes at most: the second starts at once on the third."""
    cluster = SimulatedCluster()
    for name in ("a", "b", "c"):
        cluster.add_node(name)
    cluster.submit(small_spec("first", batches=50, max_nodes=2))
    cluster.submit(small_spec("second", batches=50))
    cluster.calm(until=lambda: cluster.phase("second").phase is Phase.RUNNING)
    assert cluster.phase("first").phase is Phase.RUNNING
    cluster.calm(until=lambda: cluster.phase("second").phase is Phase.FINISHED)


def test_generation_is_above_what_any_node_has_seen() -> None:
    """A node remembers generation 41 from before etcd lost its data: the next plan is 42."""
    cluster = cluster_of("a")
    node = cluster.nodes["a"]
    node.record = replace(node.record, generations={"first": 41})
    cluster.store.transact({}, {Keys.node("a"): encode(node.record)}, lease=node.lease)
    cluster.generations["first"] = 41
    run_until(cluster, Phase.RUNNING)
    assert plan(cluster).generation == 42


def test_a_new_submission_under_an_old_name_is_another_job() -> None:
    """Generation 41 of the earlier job is no later plan of this one, but its number is not used again."""
    cluster = cluster_of("a")
    node = cluster.nodes["a"]
    before = {"first": 41, seen_key("first", "another uid"): 41}
    node.record = replace(node.record, generations=before)
    cluster.store.transact({}, {Keys.node("a"): encode(node.record)}, lease=node.lease)
    view = cluster.truth()
    situation = JobSituation(job=view.jobs["first"], view=view, now=cluster.now, written_at=0.0)
    assert (situation.known_generation, situation.generation) == (0, 42)
    assert not node_saw_later_plan(situation)
    run_until(cluster, Phase.FINISHED, max_rounds=800)
    assert node.record.generation_seen("first", "uid of first") == 42
    assert replace(node.record, generations={"first": 41}).generation_seen("first", "uid of first") == 41


def test_node_of_another_protocol_is_not_planned_with() -> None:
    """A daemon of another version registers: the plan does without it."""
    cluster = cluster_of("a", "b")
    node = cluster.nodes["b"]
    fields = msgspec.to_builtins(node.record) | {"protocol": 99}
    node.record = msgspec.convert(fields, NodeRecord)
    cluster.store.transact({}, {Keys.node("b"): encode(node.record)}, lease=node.lease)
    run_until(cluster, Phase.RUNNING)
    assert [stage.node for stage in plan(cluster).workers] == ["a"]


def test_stale_decision_changes_nothing() -> None:
    """A decision is taken, then people cancel, then it is written: the transaction fails on `desired`."""
    cluster = cluster_of("a")
    cluster.now += SETTLE_S
    view = cluster.truth()
    [command] = decide(view, now=cluster.now + SETTLE_S).commands
    cluster.want("first", Desired.CANCELLED)
    assert isinstance(command, Transaction)
    assert not cluster.store.transact(command.compare, command.puts, command.deletes)


def test_two_jobs_decided_from_one_view_do_not_both_get_devices() -> None:
    """Both transactions compare `placement`: the second fails and is decided again."""
    cluster = SimulatedCluster()
    for name in ("a", "b"):
        cluster.add_node(name)
    for name in ("first", "second"):
        cluster.submit(small_spec(name, max_nodes=1))
    commands = decide(cluster.truth(), now=cluster.now + SETTLE_S).commands
    transactions = [command for command in commands if isinstance(command, Transaction)]
    done = [cluster.store.transact(command.compare, command.puts, command.deletes) for command in transactions]
    assert done == [True, False]


def test_missing_records_fail_the_job_instead_of_hanging_it() -> None:
    """Somebody deletes the plan by hand: the job fails and says what is wrong."""
    cluster = cluster_of("a")
    running_at_full_speed(cluster)
    view = cluster.truth()
    view.apply(
        Keys.of("first", "plan"), None, mod_revision=cluster.store.revision + 1, create_revision=0, now=cluster.now
    )
    [command] = decide(view, now=cluster.now).commands
    assert isinstance(command, Transaction)
    assert "records in etcd are incomplete" in command.reason


def test_a_node_that_was_there_from_the_start_has_not_joined() -> None:
    """Two jobs on two nodes; one ends, and the other moves to the node that it left: nobody says that it joined."""
    cluster = SimulatedCluster()
    for name in ("a", "b"):
        cluster.add_node(name)
    cluster.submit(small_spec("short", batches=3, max_nodes=1))
    cluster.submit(small_spec("first", batches=200))
    run_until(cluster, Phase.FINISHED, "short")
    cluster.calm(until=lambda: len({stage.node for stage in plan(cluster).workers}) == 2, max_rounds=400)
    told = " ".join(events(cluster))
    assert "joined" not in told
    assert "idle until now, can be used: 2 stages instead of 1" in told
