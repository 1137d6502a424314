"""A day on a simulated cluster whose nodes join and die: who had how many devices, and how often jobs were stopped."""

import random
from collections import defaultdict

import pytest

from headway.daemon.cluster.cluster_records import SharesRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Phase, PhaseRecord
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

pytestmark = pytest.mark.timeout(600)  # thousands of decisions, on a loaded machine

HOUR_S = 3600.0
STEP_S = 100.0
"""Everything that is due happens once in so long: a change of plan takes some minutes."""
ENDLESS = 10**6
SLICE_S = SharesRecord().slice_s
EVENTS_A_DAY = 24
DAYS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]


class Day:
    """`pass_hours`, and see who had what."""

    def __init__(self, seed: int, *, num_nodes: int, weights: dict[str, float] | None = None) -> None:
        self.cluster = SimulatedCluster(seed)
        self.chance = random.Random(f"day {seed}")
        self.num_nodes = num_nodes
        for index in range(num_nodes):
            self.cluster.add_node(f"n{index}")
        self.cluster.store.transact({}, {Keys.SHARES: encode(SharesRecord(weights=weights or {}))})
        self.had: defaultdict[str, float] = defaultdict(float)
        """User to device-seconds."""
        self.idle_s = 0.0

    def submit(self, name: str, user: str, *, batches: int = ENDLESS, min_nodes: int = 1) -> None:
        spec = small_spec(name, num_blocks=4, batches=batches, min_nodes=min_nodes)
        self.cluster.submit(spec, user=f"{user}@host")

    def pass_hours(self, hours: float, *, is_quiet: bool = False) -> None:
        until, every_s = self.cluster.now + hours * HOUR_S, 24 * HOUR_S / EVENTS_A_DAY
        next_event = self.cluster.now + self.chance.expovariate(1 / every_s)
        while self.cluster.now < until:
            if self.cluster.now >= next_event and not is_quiet:
                next_event = self.cluster.now + self.chance.expovariate(1 / every_s)
                self._event()
            self.cluster.calm(max_rounds=1, step_s=STEP_S)
            jobs = self.cluster.facts().jobs.values()
            for job in jobs:
                self.had[job.user] += len(job.devices) * STEP_S
            self.idle_s += (len(self.cluster.nodes) - sum(len(job.devices) for job in jobs)) * STEP_S

    def _event(self) -> None:
        """A node joins, or one dies."""
        names = sorted(self.cluster.nodes)
        if len(names) <= max(1, self.num_nodes - 1) or (len(names) <= self.num_nodes and self.chance.random() < 0.6):
            self.cluster.add_node(f"n{self.cluster.num_incarnations}")
        else:
            victim = self.chance.choice(names)
            self.cluster.kill(victim)
            self.cluster.expire(victim)

    def share(self, user: str) -> float:
        """Of what all had."""
        return self.had[user] / sum(self.had.values())

    def ran_before_it_was_stopped(self, job: str) -> list[float]:
        """Seconds from each beginning of training to the stop for another job that ended it."""
        found, began, was = [], 0.0, Phase.QUEUED
        for change in self.cluster.store.history:
            if change.key != Keys.of(job, "phase") or change.value is None:
                continue
            record = decode(change.value, PhaseRecord)
            if record.phase is Phase.RUNNING and was is Phase.PREPARING:
                began = record.since
            if record.phase is Phase.STOPPING and record.reason.startswith("Gives way"):
                found.append(record.since - began)
            was = record.phase
        return found


@pytest.mark.parametrize("seed", DAYS)
def test_two_users_with_equal_shares_get_half_each(seed: int) -> None:
    """Jobs without end on two to four nodes that join and die: each within 10 % of half, and next to nothing idle."""
    day = Day(seed, num_nodes=3)
    day.submit("a", "alice")
    day.submit("b", "bob")
    day.pass_hours(12)
    assert 0.45 <= day.share("alice") <= 0.55, dict(day.had)
    assert day.idle_s <= 0.1 * sum(day.had.values())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_users_take_turns_on_one_node(seed: int) -> None:
    """One node, two jobs without end: half each, by turns, and none is stopped before its time slice is over."""
    day = Day(seed, num_nodes=1)
    day.submit("a", "alice")
    day.submit("b", "bob")
    day.pass_hours(8, is_quiet=True)
    assert 0.45 <= day.share("alice") <= 0.55, dict(day.had)
    for job in ("a", "b"):
        runs = day.ran_before_it_was_stopped(job)
        assert len(runs) >= 4
        assert min(runs) >= SLICE_S


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_three_users_with_unequal_shares(seed: int) -> None:
    """Weights 2, 1 and 1 on five nodes, one of the users comes four hours late: from then on as the weights say."""
    day = Day(seed, num_nodes=5, weights={"alice": 2.0})
    day.submit("a", "alice")
    day.submit("b", "bob")
    day.pass_hours(4)
    day.submit("c", "carol")
    day.pass_hours(4)
    day.had.clear()
    day.pass_hours(12)
    assert day.share("alice") == pytest.approx(0.5, abs=0.05)
    assert day.share("bob") == pytest.approx(0.25, abs=0.05)
    assert day.share("carol") == pytest.approx(0.25, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_big_jobs_take_turns_with_small_ones(seed: int) -> None:
    """Bob's job needs all three nodes, alice's one: neither is starved, and no slice is cut short."""
    day = Day(seed, num_nodes=3)
    day.submit("a", "alice")
    day.submit("b", "bob", min_nodes=3)
    day.pass_hours(24, is_quiet=True)
    assert min(day.share("alice"), day.share("bob")) >= 0.4, dict(day.had)
    assert min(day.ran_before_it_was_stopped("a") + day.ran_before_it_was_stopped("b")) >= SLICE_S
