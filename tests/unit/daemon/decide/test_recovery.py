"""The coordinator's reactions to failures, one story at a time, on a simulated cluster in good order."""

from dataclasses import replace

import pytest

from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import CheckpointRecord, Desired, EventRecord, Phase, PlanRecord
from headway.daemon.decide.commands import MAX_EVENTS, MAX_TRIMMED, Command, Decision, Transaction
from headway.daemon.decide.coordinator import decide
from headway.daemon.decide.deadlines import LEASE_TTL_S, START_DEADLINE_S
from headway.daemon.decide.failures import CAUSE_GRACE_S, MOST_SILENT
from headway.daemon.decide.situation import LONGEST_PATIENCE_S
from headway.daemon.jobs.job import COMPILING_S, PLAIN_S, FaultSpec
from tests.rigs.recovery import lose, recovered, trained, workers
from tests.rigs.scenarios import cluster_of, events, plan, run_until, running_at_full_speed
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec
from tests.rigs.simulated_node import steady_view


def about_jobs(decision: Decision) -> list[Command]:
    """Return the decision without the record of the users' use."""
    return [command for command in decision.commands if command.job]


def test_killed_worker_costs_a_few_batches_and_a_new_timeline() -> None:
    """SIGKILL; a spare takes over: back to the newest boundary that nodes hold, on a new timeline, with a sentence."""
    cluster = trained("a", "b", batches=6)
    cluster.fail_worker("b")
    after = recovered(cluster)
    assert (after.source, after.boundary, after.source_timeline, after.timeline) == ("nodes", 4, 1, 2)
    assert after.ancestry == ((1, 4),)
    assert after.furthest >= 6
    assert {stage.node for stage in after.workers} == {"a", "b"}
    [told] = [text for text in events(cluster) if "SIGKILL" in text]
    assert told.startswith("The worker of stage ")
    assert "on node b was killed by SIGKILL; goes back to boundary 4 (" in told
    assert told.endswith("batches again), 2 stages on a and b")
    run_until(cluster, Phase.FINISHED)


def test_lost_node_is_planned_without_at_once() -> None:
    """etcd was there all the time: no grace, no settling; the others hold its layers."""
    cluster = trained("a", "b", "c", batches=6)
    victim = next(name for name in ("a", "b", "c") if name != cluster.leader)
    lose(cluster, victim)
    cluster.calm(max_rounds=1)
    assert cluster.phase("first").phase is Phase.RECOVERING
    after = decode(cluster.store.values[Keys.of("first", "next")], PlanRecord)
    assert victim not in {stage.node for stage in after.workers}
    assert (after.source, after.boundary) == ("nodes", 4)
    assert f"{Keys.FAILURES}{victim}/000000" in cluster.store.values
    run_until(cluster, Phase.FINISHED)


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


def test_second_failure_while_recovering_makes_another_plan() -> None:
    """Of `next`, a worker dies: another generation, the same boundary, one more death on the account."""
    cluster = trained("a", "b", batches=6)
    cluster.nodes["a"].workers[0].hangs = True  # keeps the first recovery from coming into force
    cluster.fail_worker("b")
    run_until(cluster, Phase.RECOVERING)
    cluster.calm(max_rounds=2)
    cluster.fail_worker("b")
    cluster.nodes["a"].workers[0].hangs = False
    failed_at = cluster.now
    after = recovered(cluster)
    assert cluster.now - failed_at < PLAIN_S / 10, "at once, not when it is late"
    assert (after.generation, after.timeline, after.boundary) == (3, 3, 4)
    assert after.ancestry == ((1, 4),)
    assert cluster.phase("first").failures.num_deaths == 2


def test_all_nodes_lost_waits_and_goes_on_from_the_checkpoint() -> None:
    """Nobody is left: it waits and says so; nodes that come begin at the newest checkpoint."""
    cluster = trained("a", "b", batches=14)
    saved = decode(cluster.store.values[Keys.of("first", "checkpoint")], CheckpointRecord)
    assert saved.boundary == 12, "the periodic checkpoint"
    for name in ("a", "b"):
        lose(cluster, name)
    cluster.leader = ""
    cluster.add_node("c")
    cluster.calm(until=lambda: cluster.phase("first").phase is Phase.RECOVERING)
    after = recovered(cluster)
    assert (after.source, after.boundary, after.source_timeline) == ("checkpoint", 12, 1)
    assert after.ancestry == ((1, 12),)
    assert after.timeline == after.generation
    run_until(cluster, Phase.FINISHED)


def test_without_a_plan_it_waits_then_goes_on_or_pauses() -> None:
    """min_nodes = 2 and one is lost: recovering, with a reason; a pause is obeyed; resumed, it uses what nodes hold."""
    cluster = trained("a", "b", batches=6, min_nodes=2)
    victim = next(name for name in ("a", "b") if name != cluster.leader)
    lose(cluster, victim)
    cluster.calm(max_rounds=4)
    phase = cluster.phase("first")
    assert (phase.phase, phase.reason) == (Phase.RECOVERING, "waits for 1 more node (min_nodes = 2, 1 free)")
    revision = cluster.store.revision
    cluster.calm(max_rounds=20)
    assert cluster.store.revision == revision, "waiting costs no writes"
    cluster.want("first", Desired.PAUSED)
    run_until(cluster, Phase.PAUSED)
    cluster.add_node("c")
    cluster.want("first", Desired.RUNNING)
    run_until(cluster, Phase.RUNNING)
    assert (plan(cluster).source, plan(cluster).boundary, plan(cluster).ancestry) == ("nodes", 4, ((1, 4),))
    assert plan(cluster).furthest >= 6
    run_until(cluster, Phase.FINISHED)


def test_pause_that_is_wanted_while_recovering_comes_after() -> None:
    """It goes back first, and then stops for its checkpoint."""
    cluster = trained("a", "b", batches=6)
    cluster.fail_worker("a")
    run_until(cluster, Phase.RECOVERING)
    cluster.want("first", Desired.PAUSED)
    recovered(cluster)
    run_until(cluster, Phase.PAUSED)
    assert cluster.phase("first").lineage is None


def test_failed_job_keeps_its_state_and_resume_uses_it() -> None:
    """The same error on two nodes: FAILED with the rule and the traceback; resumed, it begins where nodes hold it."""
    cluster = trained("a", "b", batches=6)
    cluster.fail_worker("a", "node a: worker-0\nTraceback: bad", fault="ValueError: bad")
    recovered(cluster)
    cluster.fail_worker("b", "node b: worker-0\nTraceback: bad", fault="ValueError: bad")
    run_until(cluster, Phase.FAILED)
    phase = cluster.phase("first")
    assert phase.reason.endswith("(ValueError: bad); the same error occurred on a and b: ValueError: bad")
    assert phase.error.endswith("Traceback: bad")
    assert phase.lineage is not None
    cluster.calm(max_rounds=10)
    assert cluster.phase("first").phase is Phase.FAILED, "an old wish does not revive it"
    cluster.want("first", Desired.RUNNING)
    run_until(cluster, Phase.RUNNING)
    assert (plan(cluster).source, plan(cluster).boundary) == ("nodes", 4)
    run_until(cluster, Phase.FINISHED)


def test_device_without_a_worker_is_left_out() -> None:
    """No spare: the plan does without the device until its process is there again."""
    cluster = trained("a", "b", batches=6)
    cluster.fail_worker("b", has_spare=False)
    after = recovered(cluster)
    assert {stage.node for stage in after.workers} == {"a"}
    cluster.replace_worker("b")
    cluster.calm(until=lambda: len(plan(cluster).workers) == 2)


def complaint(cluster: SimulatedCluster, name: str) -> None:
    """A worker tells that a neighbour is gone; its process lives."""
    worker = cluster.nodes[name].workers[0]
    worker.failure = (worker.started, "the link to stage 1 is lost")


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_cause_is_told_whoever_reports_first(is_first: bool) -> None:
    """Stage 1 raises, and its neighbour's complaint comes before or after that: the RuntimeError is the reason."""
    cluster = trained("a", "b", batches=6)
    raising, other = plan(cluster).workers[1].node, plan(cluster).workers[0].node

    if is_first:
        complaint(cluster, other)
        cluster.calm(until=lambda: bool(cluster.facts().jobs["first"].failed_at))
        assert cluster.phase("first").phase is Phase.RUNNING, "it waits a moment for the cause"
    cluster.fail_worker(raising, "Traceback …\nRuntimeError: no", fault="RuntimeError: no")
    cluster.calm(max_rounds=1)
    if not is_first:
        complaint(cluster, other)
    run_until(cluster, Phase.RECOVERING)
    phase = cluster.phase("first")
    assert phase.reason.startswith(f"the worker of stage 1 on node {raising} failed (RuntimeError: no); goes back")
    assert phase.error.startswith("Traceback")
    assert [name for name, _ in phase.failures.faults] == ["RuntimeError: no"]
    run_until(cluster, Phase.FINISHED)


def test_a_job_that_goes_back_again_and_again_says_why() -> None:
    """One worker cannot write: from the third time on, status and events say how often it failed, and where."""
    cluster = trained("a", "b", batches=3)
    for _ in range(MOST_SILENT + 1):
        running_at_full_speed(cluster)
        cluster.fail_worker("b", "worker cpu:0: write: [Errno 28] No space left on device: '/store/head'")
        recovered(cluster)
    told = [text for text in events(cluster) if "times without a new boundary" in text]
    assert told
    assert all(f"it failed {MOST_SILENT + 1} times" in text for text in told)
    assert "[Errno 28] No space left on device: '/store/head'" in cluster.phase("first").reason
    assert cluster.phase("first").reason.endswith("after 10 it is given up")


def test_a_complaint_without_a_cause_is_a_cause_after_a_moment() -> None:
    """A link is lost and no other cause appears: the job goes back after `CAUSE_GRACE_S`, and no node is charged."""
    cluster = trained("a", "b", batches=6)
    complaint(cluster, plan(cluster).workers[0].node)
    began = cluster.now
    run_until(cluster, Phase.RECOVERING)
    assert CAUSE_GRACE_S <= cluster.now - began <= CAUSE_GRACE_S + 2.0
    assert not any(key.startswith(Keys.FAILURES) for key in cluster.store.values)
    assert cluster.phase("first").failures.num_deaths == 1


def test_node_in_quarantine_is_left_out() -> None:
    """Its workers died three times: plans do without it, and the wait names it."""
    cluster = trained("a", "b", batches=6)
    cluster.quarantine_after = 3
    for _ in range(3):
        cluster.fail_worker("b")
        recovered(cluster)
        cluster.calm(max_rounds=4)
    assert {stage.node for stage in plan(cluster).workers} == {"a"}


def test_worker_that_does_not_start_is_left_out_of_the_next_plan() -> None:
    """All were ready, one never runs: after START_DEADLINE_S the job goes on without it."""
    cluster = cluster_of("a", "b")
    run_until(cluster, Phase.RUNNING)
    cluster.nodes["b"].workers[0].hangs = True
    began = cluster.now
    run_until(cluster, Phase.RECOVERING)
    assert cluster.now - began >= START_DEADLINE_S
    assert any("on node b did not start in time" in text for text in events(cluster))
    cluster.calm(until=lambda: {stage.node for stage in plan(cluster).workers} == {"a"})


@pytest.mark.parametrize("victim", [0, 1])
def test_worker_that_does_not_stop_is_left_out_and_the_pause_comes_after(victim: int) -> None:
    """A pause is asked for and one stage hangs: the job goes back without it, and pauses."""
    cluster = trained("a", "b", batches=6)
    name = plan(cluster).workers[victim].node
    cluster.nodes[name].workers[0].hangs = True
    cluster.want("first", Desired.PAUSED)
    run_until(cluster, Phase.PAUSED)
    assert any(f"stage {victim} on node {name} did not" in text for text in events(cluster))


@pytest.mark.parametrize(
    ("compiles", "deadline_s", "how"),
    [(False, PLAIN_S, "within 120 s"), (True, COMPILING_S, "within 600 s, with its layers compiled")],
)
def test_worker_that_does_not_get_ready_lets_the_job_try_again(*, compiles: bool, deadline_s: float, how: str) -> None:
    """It hangs in its imports: the plan is dropped after its time and counted, and the job tries again."""
    cluster = SimulatedCluster()
    cluster.add_node("a")
    spec = small_spec("first")
    cluster.submit(replace(spec, train=replace(spec.train, compile=compiles)))
    cluster.nodes["a"].workers[0].hangs = True
    run_until(cluster, Phase.PREPARING)
    began = cluster.now
    run_until(cluster, Phase.QUEUED, max_rounds=2000)
    assert deadline_s <= cluster.now - began < deadline_s + 2
    assert events(cluster)[-1] == f"The new plan is dropped: stage 0 on a not ready {how}"
    assert cluster.phase("first").failures.num_deaths == 1
    assert f"{Keys.FAILURES}a/000000" in cluster.store.values
    cluster.nodes["a"].workers[0].hangs = False
    run_until(cluster, Phase.FINISHED)


def test_error_while_preparing_fails_the_job() -> None:
    """The worker told of an error before anything was trained: it would do so again."""
    cluster = cluster_of("a")
    run_until(cluster, Phase.PREPARING)
    cluster.nodes["a"].workers[0].failure = (1, "worker-0: the data has another SHA-256")
    run_until(cluster, Phase.FAILED)
    assert "the worker of stage 0 on node a failed" in cluster.phase("first").reason


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


def test_drained_node_is_not_planned_with_while_recovering() -> None:
    """A member of `next` begins to drain: another plan without it; if all drain, back on them and then saved."""
    cluster = trained("a", "b", "c", batches=6)
    cluster.fail_worker("a")
    run_until(cluster, Phase.RECOVERING)
    cluster.drain("b")
    after = recovered(cluster)
    assert "b" not in {stage.node for stage in after.workers}
    cluster = trained("a", "b", batches=6)
    cluster.fail_worker("a")
    run_until(cluster, Phase.RECOVERING)
    for name in ("a", "b"):
        cluster.drain(name)
    cluster.calm(until=lambda: Keys.of("first", "checkpoint") in cluster.store.values)


def test_without_snapshots_it_begins_at_the_checkpoint_or_the_beginning() -> None:
    """snapshot_every = 0: nobody holds anything."""
    cluster = SimulatedCluster()
    for name in ("a", "b"):
        cluster.add_node(name)
    cluster.submit(small_spec("first", batches=60, fault=FaultSpec(snapshot_every=0, checkpoint_every=0)))
    running_at_full_speed(cluster)
    cluster.fail_worker("a")
    after = recovered(cluster)
    assert (after.source, after.boundary, after.ancestry, after.timeline) == ("initial", 0, (), 2)
