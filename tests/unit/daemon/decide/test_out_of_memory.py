"""A stage is larger than its device, on a simulated cluster: the next plan asks for less, and nobody has failed."""

from dataclasses import replace

from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import MemoryShortage, ProfileRecord
from headway.daemon.cluster.records import (
    Desired,
    Failure,
    Phase,
    PlanRecord,
    WorkerPart,
    WorkerState,
)
from headway.daemon.decide.failures import MAX_DEATHS, MAX_SAME_BATCH, shortages_now
from headway.daemon.decide.situation import PlanHealth
from tests.rigs.recovery import recovered
from tests.rigs.scenarios import events, plan, run_until, running_at_full_speed
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

MIB = 1 << 20
UNKNOWN = MemoryShortage(wanted_bytes=MIB)
"""torch says how much it wanted, and not how much there was."""


def training(*names: str, memory_bytes: int = 0, num_blocks: int = 6) -> SimulatedCluster:
    """The job `first` trains on nodes with so much memory each."""
    cluster = SimulatedCluster()
    for name in names:
        cluster.add_node(name, memory_bytes=memory_bytes)
    cluster.submit(small_spec("first", batches=400, num_blocks=num_blocks))
    running_at_full_speed(cluster)
    return cluster


def part(of: PlanRecord, node: str) -> WorkerPart | None:
    return next((stage for stage in of.workers if stage.node == node), None)


def predicted(of: PlanRecord, node: str) -> int:
    stage = part(of, node)
    return stage.device_bytes if stage is not None else 0


def charged(cluster: SimulatedCluster) -> int:
    return sum(map(len, cluster.facts().failures.values()))


def test_the_next_plan_asks_less_of_the_device_and_nobody_has_failed() -> None:
    """Node a gets a smaller stage; neither a failure of the node nor one of the job is counted."""
    cluster = training("a", "b")
    before = plan(cluster)
    cluster.run_out_of_memory("a", UNKNOWN)
    after = recovered(cluster)
    assert 0 < predicted(after, "a") <= 0.9 * predicted(before, "a")
    assert cluster.phase("first").failures.num_deaths == 0
    assert charged(cluster) == 0
    assert any("on node a ran out of memory (it wanted 1 MiB)" in text for text in events(cluster))


def test_the_same_plan_is_not_tried_again_however_often_memory_runs_out() -> None:
    """More often than any budget allows: each plan asks less of the device than the one before, until it has none."""
    cluster = training("a", "b", num_blocks=12)
    asked = [predicted(plan(cluster), "a")]
    while asked[-1]:
        cluster.run_out_of_memory("a", UNKNOWN)
        asked.append(predicted(recovered(cluster), "a"))
        assert asked[-1] < 0.95 * asked[-2]
        cluster.calm(max_rounds=3)
    assert len(asked) > MAX_SAME_BATCH
    assert cluster.phase("first").failures.num_deaths == 0
    assert cluster.phase("first").phase is Phase.RUNNING


def test_a_prediction_that_was_too_low_is_raised_on_all_devices_of_the_model() -> None:
    """torch says that 1.5 times the prediction was not enough: that counts for node b too."""
    cluster = training("a", "b")
    before = plan(cluster)
    needed = predicted(before, "a") * 3 // 2
    cluster.run_out_of_memory("a", MemoryShortage(wanted_bytes=needed // 10, allocated_bytes=needed - needed // 10))
    recovered(cluster)
    (shortage,) = cluster.phase("first").shortages
    assert (shortage.node, shortage.device_index) == ("a", 0)
    assert 1.5 <= shortage.demand < 1.52
    assert shortage.room_bytes < needed


def test_an_absurd_report_of_one_node_leaves_the_others_as_they_were() -> None:
    """A node of 1 GiB says that it needed 16 EiB: only its own stage gets smaller, and the job goes on."""
    cluster = training("a", "b", memory_bytes=1 << 30)
    before = plan(cluster)
    cluster.run_out_of_memory("a", MemoryShortage(wanted_bytes=(1 << 64) - 1, allocated_bytes=MIB))
    after = recovered(cluster)
    assert predicted(after, "a") <= 0.9 * predicted(before, "a")
    assert predicted(after, "b") >= predicted(before, "b")
    assert [shortage.demand for shortage in cluster.phase("first").shortages] == [1.0]


def test_memory_that_runs_out_for_ever_leaves_another_job_alone() -> None:
    """The first job's every plan runs out, until nothing is left to try: it waits, and the second keeps its plan."""
    cluster = SimulatedCluster()
    for name in ("a", "b", "c", "d"):
        cluster.add_node(name)
    for name in ("first", "second"):
        cluster.submit(small_spec(name, batches=4000, num_blocks=4, max_nodes=2))
        cluster.calm(max_rounds=30)
    other = plan(cluster, "second")
    for _ in range(40):
        cluster.run_out_of_memory(plan(cluster).workers[0].node, UNKNOWN)
        cluster.calm(max_rounds=20)
        if cluster.phase("first").phase is not Phase.RUNNING:
            break
    assert (cluster.phase("first").phase, charged(cluster)) == (Phase.RECOVERING, 0)
    assert cluster.phase("first").reason == "waits for devices of job second"
    assert (cluster.phase("second").phase, plan(cluster, "second")) == (Phase.RUNNING, other)


def test_another_leader_knows_where_memory_ran_out() -> None:
    """All of it is in etcd: after the leader and the other node are lost, the device still gets less."""
    cluster = training("a", "b", "c")
    cluster.run_out_of_memory("a", UNKNOWN)
    room = predicted(recovered(cluster), "a")
    for name in ("b", "c"):
        if cluster.leader != "a" or name == "b":
            cluster.kill(name)
            cluster.expire(name)
            break
    cluster.calm(max_rounds=60)
    assert cluster.phase("first").shortages
    assert predicted(plan(cluster), "a") <= room / 0.85


def test_a_job_that_fits_nowhere_any_more_waits_and_says_what_would_help() -> None:
    """Both devices are too small: the job waits, is not failed, and continues when a larger device comes."""
    whole = training("a").facts().jobs["first"].plan
    assert whole is not None
    cluster = training("a", memory_bytes=int(whole.workers[0].device_bytes * 1.05))
    cluster.run_out_of_memory("a", UNKNOWN)
    run_until(cluster, Phase.RECOVERING)
    cluster.calm(max_rounds=30)
    phase = cluster.phase("first")
    assert phase.phase is Phase.RECOVERING
    assert "does not fit" in phase.reason
    assert "out of memory there before, plans give a:0 at most" in phase.reason
    assert 'recompute = "auto"' in phase.reason
    assert "devices with more memory would help" in phase.reason
    cluster.add_node("big", memory_bytes=3 * whole.workers[0].device_bytes)
    run_until(cluster, Phase.RUNNING)
    assert predicted(plan(cluster), "big") > 0


def test_the_failure_of_another_worker_still_counts() -> None:
    """At the same moment a worker is killed: that one is charged."""
    cluster = training("a", "b", "c")
    cluster.run_out_of_memory("a", UNKNOWN)
    cluster.fail_worker("b")
    recovered(cluster)
    cluster.calm(max_rounds=3)
    assert cluster.phase("first").failures.num_deaths == 1 < MAX_DEATHS
    assert charged(cluster) == 1


def test_a_measured_peak_above_the_prediction_counts_in_the_next_plan() -> None:
    """One node has room for all by the prediction, and not with half as much again: its stage there gets smaller."""
    whole = training("a").facts().jobs["first"].plan
    assert whole is not None
    room = int(whole.workers[0].device_bytes * 1.1)
    cluster = training("a", "b", memory_bytes=room)
    profile = ProfileRecord(generation=1, peak_bytes=1, predicted_bytes=1, demand=1.5, device_kind="cpu")
    cluster.store.transact({}, {Keys.profile("first", "a", 0): encode(profile)}, lease=cluster.nodes["a"].lease)
    cluster.fail_worker("a")
    after = recovered(cluster)
    assert max(stage.device_bytes for stage in after.workers) * 1.5 <= room


def test_a_user_who_resumes_the_job_is_obeyed() -> None:
    """The card may be free by now: what memory taught is forgotten with the failures."""
    cluster = training("a", "b")
    cluster.run_out_of_memory("a", UNKNOWN)
    recovered(cluster)
    assert cluster.phase("first").shortages
    cluster.want("first", Desired.PAUSED)
    run_until(cluster, Phase.PAUSED)
    assert cluster.phase("first").shortages
    cluster.want("first", Desired.RUNNING)
    run_until(cluster, Phase.RUNNING)
    assert cluster.phase("first").shortages == ()


def test_a_shortage_keeps_its_model_when_the_node_has_gone() -> None:
    """The report may outlive the daemon: what it taught of the model stays, and no shortage without a model appears."""
    cluster = training("a", "b")
    before = plan(cluster)
    cluster.run_out_of_memory("a", MemoryShortage(wanted_bytes=MIB, allocated_bytes=2 * predicted(before, "a")))
    view = cluster.facts()
    job = view.jobs["first"]
    position = next(index for index, stage in enumerate(before.workers) if stage.node == "a")
    shortage = MemoryShortage(wanted_bytes=MIB, allocated_bytes=2 * predicted(before, "a"))
    job.workers[before.generation, position] = replace(
        job.workers[before.generation, position],
        state=WorkerState.FAILED,
        failure=Failure("out of memory", shortage=shortage),
    )
    health = PlanHealth(plan=before, job=job, view=view, now=0.0)
    (known,) = shortages_now(job, view, (health,))
    assert (known.kind, known.demand > 1.9) == ("cpu", True)
    del view.nodes["a"]
    assert shortages_now(job, view, (health,)) == ()
    job.phase = replace(job.phase, shortages=(known,))
    assert shortages_now(job, view, (health,)) == (known,)
