"""The coordinator's decisions, one story at a time, on a simulated cluster in good order."""

from dataclasses import replace

import msgspec
import pytest

from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import (
    PROTOCOL_VERSION,
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
from headway.daemon.decide.deadlines import CHANGE_RETRY_S
from headway.daemon.decide.situation import JobSituation
from tests.rigs.scenarios import cluster_of, plan, run_until, running_at_full_speed
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
    """A daemon of another version registers: the plan does without it, and a job that needs it says so."""
    cluster = cluster_of("a", "b")
    node = cluster.nodes["b"]
    fields = msgspec.to_builtins(node.record) | {"protocol": 99}
    node.record = msgspec.convert(fields, NodeRecord)
    cluster.store.transact({}, {Keys.node("b"): encode(node.record)}, lease=node.lease)
    run_until(cluster, Phase.RUNNING)
    assert [stage.node for stage in plan(cluster).workers] == ["a"]
    cluster.submit(small_spec("second", min_nodes=2))
    cluster.calm(max_rounds=20)
    assert f"node b speaks protocol 99, the leader {PROTOCOL_VERSION}" in cluster.phase("second").reason
    assert not any(key.startswith(Keys.FAILURES) for key in cluster.store.values)


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
