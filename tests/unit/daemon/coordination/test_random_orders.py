"""The coordinator among simulated nodes: thousands of orders of events, with everything checked at every decision."""

import random
import time
from typing import Any

import pytest

from headway.daemon.jobs.job import FaultSpec
from headway.daemon.records.cluster_records import SharesRecord
from headway.daemon.records.format import decode, encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import CheckpointRecord, Desired, Phase
from headway.daemon.situation import plans as plan_cache
from tests.fakes.replicated_plans import answer_with_replicas
from tests.fakes.simulated_cluster import SimulatedCluster, small_spec
from tests.fakes.simulated_etcd import Store

FINAL = (Phase.FINISHED, Phase.CANCELLED)
JOBS = ("first", "second")
KIND = ("join", "join", "drain", "pause", "resume", "elect")
CRUEL = (*KIND, "crash", "expire", "fail", "fail", "fail", "again", "lapse", "no spare", "spare", "leader", "cancel")
EVENTS_A_MINUTE = 100_000
BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 40))]


def chaos(
    cluster: SimulatedCluster, *, num_steps: int, chance: random.Random, may_crash: bool, may_restore: bool = False
) -> None:
    """Random steps, and now and then a join, a drain, a wish; with may_crash, failures of every kind too."""
    backup: Store | None = None
    for _ in range(num_steps):
        cluster.random_step()
        if chance.random() > (0.01 if may_crash else 0.02):
            continue
        what = chance.choice(CRUEL if may_crash else KIND)
        if may_restore and chance.random() < 0.1:
            if backup is None or chance.random() < 0.5:
                backup = cluster.store.backup()
            else:
                cluster.restore(backup)
                backup = None
        happen(cluster, what, chance)


def happen(cluster: SimulatedCluster, what: str, chance: random.Random) -> None:
    """One thing that people or machines do."""
    living = sorted(name for name, node in cluster.nodes.items() if node.is_alive)
    victim = chance.choice(living) if living else ""
    match what:
        case "join" if len(cluster.nodes) < 6:
            cluster.add_node(f"n{cluster.num_incarnations}", speed=chance.choice((1.0, 1.0, 2.0)))
        case "pause" | "resume":
            cluster.want(chance.choice(JOBS), Desired.PAUSED if what == "pause" else Desired.RUNNING)
        case "elect":
            cluster.elect()
        case "expire":
            for name in [name for name, node in cluster.nodes.items() if not node.is_alive]:
                cluster.expire(name)
        case "leader":
            cluster.lead(crashes=chance.choice(("before", "between", "after")))
        case "spare":
            for name in [name for name in living if cluster.nodes[name].workers[0].is_down]:
                cluster.replace_worker(name)
        case "drain" if victim:
            cluster.drain(victim)
        case "crash" if victim:
            cluster.kill(victim)
        case "fail" | "no spare" if victim:
            cluster.fail_worker(victim, has_spare=what == "fail")
        case "lapse" if victim:
            cluster.lapse(victim)
        case "again" if victim:  # its daemon starts anew, in no time
            cluster.kill(victim)
            cluster.expire(victim)
            cluster.add_node(victim)


def settle(cluster: SimulatedCluster) -> None:
    """The dead are gone, a few nodes are there, both jobs are wanted."""
    for name in [name for name, node in cluster.nodes.items() if not node.is_alive]:
        cluster.expire(name)
    for node in cluster.nodes.values():
        cluster.replace_worker(node.name)
    for index in range(2):
        cluster.add_node(f"late{index}")
    for job in JOBS:
        cluster.want(job, Desired.RUNNING)


@pytest.fixture
def stages_have_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator's planner makes plans such as 2-1-2."""
    monkeypatch.setattr(plan_cache, "answer", answer_with_replicas)


def build(seed: int, *, num_groups: int = 1) -> tuple[SimulatedCluster, random.Random]:
    chance = random.Random(seed + 1_000_000)
    cluster = SimulatedCluster(seed)
    cluster.quarantine_after = chance.choice((0, 0, 3))
    cluster.planning.takes_time = seed % 3 > 0
    for index in range(chance.randint(1, 4)):
        cluster.add_node(f"n{index}", num_devices=chance.choice((1, 1, 2)))
    fault = FaultSpec(
        snapshot_every=chance.choice((0, 2, 4)), copies=chance.choice((1, 2, 3)), checkpoint_every=chance.choice((0, 8))
    )
    sizes = {"num_blocks": chance.randint(1, 4), "batches": chance.choice((4, 60))}
    users, priorities = chance.choice((("", ""), ("alice", "bob"))), chance.choice(((0, 0), (0, 5)))
    cluster.store.transact({}, {Keys.SHARES: encode(SharesRecord(slice_s=chance.choice((10.0, 600.0))))})
    first = small_spec("first", fault=fault, reduction_groups=num_groups, **sizes)
    cluster.submit(first.with_priority(priorities[0]), user=users[0])
    limits: dict[str, Any] = {"max_nodes": chance.choice((0, 2)), "min_nodes": chance.choice((1, 1, 2))}
    batches = chance.choice((1, 4, 40, 40))
    second = small_spec("second", num_blocks=2, batches=batches, reduction_groups=num_groups, **limits)
    cluster.submit(second.with_priority(priorities[1]), user=users[1])
    return cluster, chance


def finish(cluster: SimulatedCluster, seed: int) -> None:
    """Nothing fails any more: both jobs reach their end, if people resume what has failed too often."""
    settle(cluster)
    done = (*FINAL, Phase.FAILED)
    for _ in range(4):
        cluster.calm(until=lambda: all(cluster.phase(job).phase in done for job in JOBS))
        for job in JOBS:
            if cluster.phase(job).phase is Phase.FAILED:
                assert cluster.phase(job).reason
                cluster.want(job, Desired.RUNNING)
    cluster.calm(until=lambda: all(cluster.phase(job).phase in FINAL for job in JOBS))
    assert {cluster.phase(job).phase for job in JOBS} == {Phase.FINISHED}, seed
    cluster.sweep(cluster.truth())
    assert_nothing_is_left(cluster)


def assert_nothing_is_left(cluster: SimulatedCluster) -> None:
    """Durable storage holds the checkpoints that etcd names, or is about to delete, and nothing else."""
    found = {(job, f"{timeline:08d}-{boundary:010d}") for job, timeline, boundary, _ in cluster.checkpoint_files}
    for job in JOBS:
        record = decode(cluster.store.values[Keys.of(job, "checkpoint")], CheckpointRecord)
        named = {url.rpartition("/")[2] for url in (record.url, *record.earlier)}
        dropped = {url.rpartition("/")[2] for url in record.dropped}
        assert named <= {folder for name, folder in found if name == job} <= named | dropped


@pytest.mark.parametrize("block", BLOCKS)
def test_without_failures_every_job_finishes(block: int) -> None:
    """Joins, drains, pauses, elections, in any order, seen late, twice and disorderly: all batches, no failure."""
    for seed in range(block * 4, block * 4 + 4):
        cluster, chance = build(seed)
        chaos(cluster, num_steps=500, chance=chance, may_crash=False)
        settle(cluster)
        cluster.calm(until=lambda: all(cluster.phase(job).phase in FINAL for job in JOBS))  # noqa: B023
        assert {cluster.phase(job).phase for job in JOBS} == {Phase.FINISHED}, seed


@pytest.mark.parametrize("block", BLOCKS)
def test_with_failures_every_job_finishes(block: int) -> None:
    """Deaths of nodes, workers and leaders, lapsed leases, plans that come late: jobs recover by themselves, and
    finish."""
    num_late_plans = 0
    for seed in range(block * 5, block * 5 + 5):
        cluster, chance = build(seed)
        chaos(cluster, num_steps=600, chance=chance, may_crash=True)
        finish(cluster, seed)
        num_late_plans += cluster.planning.num_late
    assert num_late_plans > 0, "every plan came at once"


@pytest.mark.usefixtures("stages_have_replicas")
@pytest.mark.parametrize("block", BLOCKS)
def test_with_replicas_and_failures_every_job_finishes(block: int) -> None:
    """Stages of one to four workers, which die, join, drain and change places: the same invariants, the same end."""
    num_replicated = 0
    for seed in range(block * 5, block * 5 + 5):
        cluster, chance = build(seed, num_groups=2 + seed % 3)
        chaos(cluster, num_steps=600, chance=chance, may_crash=True, may_restore=seed % 5 == 0)
        finish(cluster, seed)
        num_replicated += cluster.num_replicated
    assert num_replicated > 0, "no plan with replicas ever came into force"


@pytest.mark.parametrize("block", BLOCKS[:16])
def test_random_steps_with_restores_of_etcd_from_backups(block: int) -> None:
    """Generations keep rising and timelines are never mixed."""
    for seed in range(block * 5, block * 5 + 5):
        cluster, chance = build(seed)
        chaos(cluster, num_steps=400, chance=chance, may_crash=True, may_restore=True)
        finish(cluster, seed)


@pytest.mark.parametrize("num_events", [4_000, pytest.param(EVENTS_A_MINUTE, marks=pytest.mark.slow)])
def test_a_hundred_thousand_events_in_a_minute(num_events: int) -> None:
    """The rate at which all of the above is tried, invariants checked; process time, as other tests run beside it."""
    began, done, seed, num_checked = time.process_time(), 0, 10_000, 0
    while done < num_events:
        cluster, chance = build(seed)
        chaos(cluster, num_steps=1000, chance=chance, may_crash=True)
        done, seed, num_checked = done + 1000, seed + 1, num_checked + cluster.num_events
    per_minute = done / (time.process_time() - began) * 60
    print(f"{per_minute:.0f} events a minute, {num_checked} decisions checked in {done} events")  # noqa: T201
    assert num_checked > done / 500, "next to nothing was decided"
    assert per_minute >= EVENTS_A_MINUTE, f"{per_minute:.0f} events a minute"
