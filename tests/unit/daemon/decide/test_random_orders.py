"""The coordinator among simulated nodes: thousands of orders of events, with everything checked at every decision."""

import random
import time

import pytest

from headway.daemon.cluster.records import Phase
from headway.daemon.decide import plans as plan_cache
from tests.rigs.random_orders import FINAL, JOBS, build, finish, happen, settle
from tests.rigs.replicated_plans import answer_with_replicas
from tests.rigs.simulated_cluster import SimulatedCluster
from tests.rigs.simulated_etcd import Store

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


@pytest.fixture
def stages_have_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator's planner makes plans such as 2-1-2."""
    monkeypatch.setattr(plan_cache, "answer", answer_with_replicas)


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


@pytest.mark.parametrize("block", BLOCKS[:20])
def test_nodes_stay_out_and_come_back_and_every_job_finishes(block: int) -> None:
    """At any moment beside joins and failures; when all have room again, the jobs reach their end."""
    for seed in range(block * 3, block * 3 + 3):
        cluster, chance = build(seed)
        for _ in range(600):
            cluster.random_step()
            living = sorted(name for name, node in cluster.nodes.items() if node.is_alive)
            if living and chance.random() < 0.02:
                cluster.say(chance.choice(living), stays_out=chance.choice(("", "state_dir /s cannot be written")))
            if chance.random() < 0.01:
                happen(cluster, chance.choice(("join", "drain", "elect", "fail", "crash", "lapse")), chance)
        for name in [name for name, node in cluster.nodes.items() if node.is_alive]:
            cluster.say(name, stays_out="")
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
