"""The coordinator's reactions to failures, one story at a time, on a simulated cluster in good order."""

from dataclasses import replace

import pytest

from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import GoodputRecord
from headway.daemon.cluster.records import CheckpointRecord, Desired, EventRecord, Phase, PlanRecord, WorkerPart
from headway.daemon.decide.commands import MAX_EVENTS, MAX_OUTLINES, MAX_TRIMMED, Command, Decision, Transaction
from headway.daemon.decide.coordinator import decide
from headway.daemon.decide.deadlines import LEASE_TTL_S
from headway.daemon.decide.situation import LONGEST_PATIENCE_S
from headway.daemon.reports.goodput_report import goodput_of_plans, report_goodput
from tests.rigs.recovery import lose, recovered, trained, workers
from tests.rigs.scenarios import events, plan, run_until
from tests.rigs.simulated_cluster import SimulatedCluster
from tests.rigs.simulated_node import steady_view


def about_jobs(decision: Decision) -> list[Command]:
    """Return the decision without the record of the users' use."""
    return [command for command in decision.commands if command.job]


def test_absence_right_after_an_outage_is_forgiven_for_one_lease() -> None:
    """etcd came back a moment ago without the node's key: it counts as lost only after LEASE_TTL_S."""
    cluster = trained("a", "b", batches=6)
    lose(cluster, next(name for name in ("a", "b") if name != cluster.leader))
    view = steady_view()
    view.set_in_sight(False, now=cluster.now)
    view.set_in_sight(True, now=cluster.now)
    for key, value in cluster.store.values.items():
        created, modified = cluster.store.revisions[key]
        view.apply(key, value, mod_revision=modified, create_revision=created, now=cluster.now)
    early = decide(view, now=cluster.now + LEASE_TTL_S - 0.1)
    assert early.commands == ()
    assert early.wake_at == cluster.now + LEASE_TTL_S
    assert len(decide(view, now=cluster.now + LEASE_TTL_S).commands) == 1
    view.set_in_sight(False, now=cluster.now)
    assert decide(view, now=cluster.now + 1000).commands == (), "out of sight, nothing is known"


def test_a_recovery_waits_for_records_that_an_outage_took() -> None:
    """The outage outlasts a lease; the records come back with the nodes, and save much recomputation."""
    cluster = trained("a", "b", batches=10)
    cluster.nodes["a"].workers[0].hangs = True
    cluster.fail_worker("b")
    run_until(cluster, Phase.RECOVERING)
    began, back = cluster.now, cluster.now + 60.0
    view = steady_view()
    told = [(key, value, cluster.store.revisions[key]) for key, value in cluster.store.values.items()]
    for key, value, (created, modified) in told:
        view.apply(key, value, mod_revision=modified, create_revision=created, now=began)
    assert decode(cluster.store.values[Keys.of("first", "next")], PlanRecord).source == "nodes"
    view.set_in_sight(False, now=began)
    files = [row for row in told if "/state/" in row[0]]
    for key, _, (_, modified) in files:
        view.apply(key, None, mod_revision=modified + 1000, create_revision=0, now=back)
    view.set_in_sight(True, now=back)
    early = decide(view, now=back + 0.1)
    assert (about_jobs(early), early.wake_at) == ([], back + LEASE_TTL_S), "`next` stays, until all have been heard"
    [command] = about_jobs(decide(view, now=back + LEASE_TTL_S))
    assert isinstance(command, Transaction)
    assert "nodes that held boundary 8 are gone" in command.reason
    for key, value, (created, _) in files:
        view.apply(key, value, mod_revision=5000, create_revision=created, now=back + 0.2)
    assert about_jobs(decide(view, now=back + 0.2)) == [], "it has what it is about to load"


def test_a_start_survives_an_outage_that_took_its_file_records() -> None:
    """The plan is in force, some workers still load, and the records come back with their nodes' leases."""
    cluster = trained("a", "b", batches=10)
    cluster.fail_worker("b")
    recovered(cluster)
    view = steady_view()
    for key, value in cluster.store.values.items():
        created, modified = cluster.store.revisions[key]
        if "/state/" not in key:
            view.apply(key, value, mod_revision=modified, create_revision=created, now=cluster.now)
    assert any(
        isinstance(command, Transaction) and "nodes that held boundary 8 are gone" in command.reason
        for command in decide(view, now=cluster.now).commands
    ), "etcd was there all the time: the files are lost"
    back = cluster.now + 60.0
    view.set_in_sight(False, now=cluster.now)
    view.set_in_sight(True, now=back)
    early = decide(view, now=back + 0.1)
    about_jobs = [command for command in early.commands if command.job]
    assert (about_jobs, early.wake_at) == ([], back + LEASE_TTL_S)


def spend(cluster: SimulatedCluster, *, earlier: dict[str, float], **seconds: float) -> None:
    """Each worker of the plan in force tells how it spent its seconds."""
    for position, worker in enumerate(plan(cluster).workers):
        record = GoodputRecord(node=worker.node, incarnation=worker.node, seconds=seconds, earlier=earlier)
        key = Keys.goodput("first", plan(cluster).generation, position)
        cluster.store.transact({}, {key: encode(record)}, lease=cluster.nodes[worker.node].lease)
    cluster.calm(max_rounds=3)


def test_what_a_lost_node_has_spent_is_not_forgotten() -> None:
    """Three workers spend 20 s under a plan; one is lost, and its records go; the others go on, and 4 s of waiting
    prove to be recovery. The report has the 60 s, then the 20 s of two workers, and their sum: the job's own.
    """
    cluster = trained("a", "b", "c", batches=10)
    before = plan(cluster).generation
    spend(cluster, earlier={}, **{"useful": 16.0, "waiting:stage 1": 4.0})
    lose(cluster, next(worker.node for worker in plan(cluster).workers if worker.node != cluster.leader))
    after = recovered(cluster)
    assert len(after.workers) == 2
    spend(cluster, earlier={"useful": 16.0, "waiting:stage 1": 4.0}, useful=22.0, recovery=8.0)
    for view in (cluster.nodes[cluster.leader].view, cluster.truth()):
        found = goodput_of_plans(view.jobs["first"])
        assert found == {before: {"useful": 48.0, "waiting": 4.0}, after.generation: {"useful": 12.0, "recovery": 16.0}}
        assert report_goodput(view.jobs["first"]).seconds == {"useful": 60.0, "recovery": 16.0, "waiting": 4.0}
    cluster.want("first", Desired.PAUSED)
    run_until(cluster, Phase.PAUSED)
    assert cluster.truth().jobs["first"].spent_s == {"useful": 60.0, "recovery": 16.0, "waiting": 4.0}


def test_node_that_comes_and_goes_does_not_hold_a_recovery_up() -> None:
    """Hoping for files that it may bring ends after LONGEST_PATIENCE_S."""
    cluster = trained("a", "b", batches=10)
    for name in ("a", "b"):
        lose(cluster, name)
    cluster.add_node("c")
    run_until(cluster, Phase.RECOVERING)
    view = steady_view()
    for key, value in cluster.store.values.items():
        created, modified = cluster.store.revisions[key]
        if "/next" not in key:
            view.apply(key, value, mod_revision=modified, create_revision=created, now=0.0)
    begins_at = None
    for at in range(1, int(2 * LONGEST_PATIENCE_S)):
        view.nodes_changed_at = float(at)
        commands = [command for command in decide(view, now=float(at)).commands if isinstance(command, Transaction)]
        if begins_at is None and any(Keys.of("first", "next") in command.puts for command in commands):
            begins_at = at
    assert begins_at == LONGEST_PATIENCE_S


def test_worker_records_of_old_plans_are_deleted() -> None:
    """However often a job recovers, etcd keeps only the records of its last plans."""
    cluster = trained("a", "b", batches=6)
    for _ in range(3):
        cluster.fail_worker("b")
        recovered(cluster)
        cluster.calm(max_rounds=40)
    generations = {int(key.split("/workers/")[1].split("/")[0]) for key in cluster.store.values if "/workers/" in key}
    assert plan(cluster).generation >= 4
    assert min(generations) >= plan(cluster).generation - 1


def test_etcd_from_an_older_backup_is_noticed() -> None:
    """Nodes know plan 2, etcd knows 1: a plan above both, on a new timeline."""
    cluster = trained("a", "b", batches=6)
    backup = cluster.store.backup()
    cluster.add_node("c")
    recovered(cluster)
    cluster.calm(max_rounds=10)
    cluster.restore(backup)
    after = recovered(cluster)
    assert after.generation == 3
    assert any("Nodes know plan 2, which etcd has forgotten" in text for text in events(cluster))
    run_until(cluster, Phase.FINISHED)


def test_after_a_restore_of_etcd_the_leader_waits_one_lease() -> None:
    """A new view decides nothing for one lease time, because a node may know a later plan."""
    cluster = trained("a", "b", batches=6)
    view = steady_view()
    view.start_anew(now=cluster.now)
    for key, value in cluster.store.values.items():
        if not key.startswith(Keys.NODES):
            created, modified = cluster.store.revisions[key]
            view.apply(key, value, mod_revision=modified, create_revision=created, now=cluster.now)
    early = decide(view, now=cluster.now + LEASE_TTL_S - 0.1)
    assert (early.commands, early.wake_at) == ((), cluster.now + LEASE_TTL_S)
    assert decide(view, now=cluster.now + LEASE_TTL_S).commands


def test_periodic_checkpoints_are_written_and_old_ones_deleted() -> None:
    """Every 12 batches, two are kept; their manifests are there and no other's."""
    cluster = trained("a", "b", batches=52)
    record = decode(cluster.store.values[Keys.of("first", "checkpoint")], CheckpointRecord)
    assert record.boundary == 48
    assert sorted(cluster.manifests) == sorted((record.url, *record.earlier))
    assert [url.rpartition("-")[2] for url in record.earlier] == ["0000000036"]
    assert record.dropped == ()


def test_a_due_checkpoint_is_completed_after_a_rollback_to_its_boundary() -> None:
    """Durable storage is away from 12 on. The job goes back to 12 and completes the old timeline's checkpoint."""
    cluster = trained("a", "b", batches=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "_make_durable", lambda *_: None)
        cluster.calm(until=lambda: all(worker.applied >= 13 for worker in workers(cluster)))
        cluster.calm(max_rounds=2)
        cluster.fail_worker("b")
        assert recovered(cluster).ancestry == ((1, 12),)
    cluster.calm(max_rounds=2)
    saved = decode(cluster.store.values[Keys.of("first", "checkpoint")], CheckpointRecord)
    assert (saved.timeline, saved.boundary, saved.ancestry) == (1, 12, ())
    for name in ("a", "b"):
        lose(cluster, name)
    cluster.leader = ""
    cluster.add_node("c")
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RECOVERING)
    assert recovered(cluster).ancestry == ((1, 12),)
    run_until(cluster, Phase.FINISHED)


def test_the_newest_events_stay() -> None:
    """Each new event beyond MAX_EVENTS deletes an old one; a large old surplus shrinks bit by bit."""
    cluster = trained("a", "b", batches=6)
    old = encode(EventRecord(at=0.0, text="of old", generation=1))
    num_old = MAX_EVENTS + 2 * MAX_TRIMMED
    for number in range(num_old):
        cluster.store.transact({}, {Keys.event("first", number): old})
    phase = cluster.phase("first")
    cluster.store.transact({}, {Keys.of("first", "phase"): encode(replace(phase, num_events=num_old))})
    for _ in range(2):
        cluster.fail_worker("b")
        recovered(cluster)
        cluster.calm(max_rounds=40)
    numbers = sorted(int(key.rpartition("/")[2]) for key in cluster.store.values if "/events/" in key)
    assert numbers == list(range(cluster.phase("first").num_events - MAX_EVENTS, cluster.phase("first").num_events))


def test_an_event_keeps_who_held_which_layers() -> None:
    """A worker dies: the events say that training was interrupted, and which plan came into force, layer by layer."""
    cluster = trained("a", "b", batches=6)
    cluster.fail_worker("b")
    recovered(cluster)
    cluster.calm(max_rounds=40)
    job = cluster.truth().jobs["first"]
    told = [job.events[number] for number in sorted(job.events)]
    assert [record.is_failure for record in told].count(True) == 1
    assert job.plan is not None
    assert job.spec is not None
    newest = [record.plan for record in told if record.plan is not None][-1]
    assert newest == job.plan.outline(job.spec.layers)
    assert (newest.stages[0].first, newest.stages[-1].last) == (0, len(job.spec.layers) - 1)


def test_a_long_past_plan_of_many_stages_loses_its_layers() -> None:
    """A hundred stages on a thousand nodes: few bytes an event, and only the newest events have them."""
    layers = tuple(f"block.{number}" for number in range(100))
    part = WorkerPart(node="", node_incarnation="", device_index=0, layers=(), depth=1)
    workers = tuple(replace(part, node=f"node-{number}", layers=(layers[number // 10],)) for number in range(1000))
    outline = PlanRecord(generation=1, timeline=1, workers=workers).outline(layers)
    assert [stage.num_others for stage in outline.stages] == [9] * 100
    many = encode(EventRecord(at=0.0, text="of old", generation=1, plan=outline))
    assert len(many) < 4000
    cluster = trained("a", "b", batches=6)
    cluster.store.transact({}, {Keys.event("first", number): many for number in range(MAX_OUTLINES)})
    phase = cluster.phase("first")
    cluster.store.transact({}, {Keys.of("first", "phase"): encode(replace(phase, num_events=MAX_OUTLINES))})
    cluster.fail_worker("b")
    recovered(cluster)
    cluster.calm(max_rounds=40)
    told = [decode(cluster.store.values[Keys.event("first", number)], EventRecord) for number in range(8)]
    kept = [len(record.plan.stages) for record in told if record.plan is not None]
    assert kept[0] == 0
    assert kept[-1] == 100
