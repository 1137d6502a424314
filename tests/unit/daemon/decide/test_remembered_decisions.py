"""A leader that remembers decides as one that does not: after every record that may come, at every moment.

The simulated cluster compares the two at each decision. Here measurements come too, and it looks after every event.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from headway.daemon.cluster.cluster_records import SharesRecord, UsageRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import (
    GoodputRecord,
    LayerTime,
    LinkProbe,
    Port,
    ProbeRecord,
    ProfileRecord,
    ProgressRecord,
    ReachFact,
    ReachRecord,
    ReadingRecord,
)
from headway.daemon.cluster.records import Desired, Phase, PlanRecord
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import FaultSpec
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 30))]
NUM_SEEDS, NUM_STEPS = 2, 400
JOBS = ("first", "second", "third")
PAUSES_S = (0.0, 0.0, 0.01, 0.3, 1.0, 2.5, 9.0, 31.0, 130.0)


class Reports:
    """What nodes and workers tell of themselves, at random."""

    def __init__(self, cluster: SimulatedCluster, chance: random.Random) -> None:
        self.cluster, self.chance = cluster, chance
        self.num_told: dict[str, int] = {}

    def one(self) -> None:
        """Let somebody write something."""
        of_jobs = (self.goodput, self.progress, self.profile, self.reading)
        tell = self.chance.choice((*of_jobs, self.probes, self.reach, self.speed, self.shares, self.relays))
        job = self._running()
        if tell not in of_jobs:
            told = tell(None)
        else:
            told = tell(job) if job is not None else False
        self.num_told[tell.__name__] = self.num_told.get(tell.__name__, 0) + bool(told)

    def goodput(self, job: JobView | None) -> bool:
        """A worker works, or stands still for a neighbour."""
        plan = self._plan(job)
        position = self.chance.randrange(len(plan.workers))
        awaited = self.chance.choice((-1, -1, position - 1, position + 1))
        record = GoodputRecord(node=plan.workers[position].node, incarnation="w", awaited_worker=awaited)
        return self._put(Keys.goodput(self._name(job), plan.generation, position), record)

    def progress(self, job: JobView | None) -> bool:
        """The pace of a job changes, and may break the promise of its last change."""
        plan = self._plan(job)
        batch = job.progress.batch if job is not None and job.progress is not None else 0
        pace = self.chance.choice((0.0, 50.0, 60.0, 400.0))
        record = ProgressRecord(generation=plan.generation, batch=batch, loss=1.0, tokens_per_second=pace)
        return self._put(Keys.of(self._name(job), "progress"), record)

    def profile(self, job: JobView | None) -> bool:
        """A worker has timed its layers."""
        plan = self._plan(job)
        stage = self.chance.choice(plan.workers)
        seconds = self.chance.choice((0.1, 0.2, 0.9))
        times = LayerTime(forward_s=seconds, backward_s=2 * seconds, spread=self.chance.choice((0.0, 0.2)))
        record = ProfileRecord(
            generation=plan.generation, layers=dict.fromkeys(("embed", "block", "head"), times), num_samples=99
        )
        return self._put(Keys.profile(self._name(job), stage.node, stage.device_index), record)

    def reading(self, job: JobView | None) -> bool:
        """A node reads the data."""
        plan = self._plan(job)
        record = ReadingRecord(num_bytes=self.chance.randrange(100), total_bytes=100)
        return self._put(Keys.reading(self._name(job), plan.workers[0].node), record)

    def probes(self, _: JobView | None) -> bool:
        """A node has measured its ways."""
        name = self._node()
        way = LinkProbe(round_trip_s=0.001, bytes_per_s=self.chance.choice((1e5, 1e7, 1e9)))
        record = ProbeRecord(incarnation=self.cluster.nodes[name].lease, peers=dict.fromkeys(self.cluster.nodes, way))
        return self._put(Keys.probes(name), record)

    def reach(self, _: JobView | None) -> bool:
        """A node does not reach another one, or reaches all again."""
        name, other = self._node(), self._node()
        why = self.chance.choice(("", "", "refused"))
        fact = ReachFact(
            to=other,
            to_incarnation=self.cluster.nodes[other].lease,
            port=Port.DAEMON,
            address="a:1",
            reason=why if name != other else "",
        )
        return self._put(Keys.reach(name), ReachRecord(incarnation=self.cluster.nodes[name].lease, facts=(fact,)))

    def speed(self, _: JobView | None) -> bool:
        """A device is measured anew."""
        node = self.cluster.nodes[self._node()]
        devices = tuple(replace(device, speed=self.chance.choice((0.5, 1.0, 4.0))) for device in node.record.devices)
        self.cluster.say(node.name, devices=devices)
        return True

    def relays(self, _: JobView | None) -> bool:
        """A node stands by at other relays, or others dial it again."""
        name = self._node()
        relay = self.chance.choice(("", "relay:7070", *(node.record.address for node in self.cluster.nodes.values())))
        self.cluster.say(name, address=f"{relay}/{name}~" if relay and "/" not in relay else f"{name}:1")
        return True

    def shares(self, _: JobView | None) -> bool:
        """An administrator changes the shares, or another leader counts use otherwise."""
        if self.chance.random() < 0.5:
            seconds = {"alice": self.chance.choice((0.0, 1e3, 1e5)), "bob": self.chance.choice((0.0, 1e4))}
            return self._put(Keys.USAGE, UsageRecord(seconds=seconds))
        slice_s = self.chance.choice((10.0, 60.0, 600.0))
        return self._put(Keys.SHARES, SharesRecord(weights={"bob": self.chance.choice((0.5, 3.0))}, slice_s=slice_s))

    def _put(self, key: str, record: object) -> bool:
        return self.cluster.store.transact({}, {key: encode(record)})

    def _running(self) -> JobView | None:
        jobs = [job for job in self.cluster.facts().jobs.values() if job.plan is not None]
        return self.chance.choice(jobs) if jobs else None

    def _node(self) -> str:
        return self.chance.choice(sorted(self.cluster.nodes))

    def _plan(self, job: JobView | None) -> PlanRecord:
        assert job is not None
        assert job.plan is not None
        return job.plan

    def _name(self, job: JobView | None) -> str:
        assert job is not None
        return job.name


def build(seed: int) -> tuple[SimulatedCluster, random.Random]:
    """Three jobs of two users on a few unlike nodes."""
    chance = random.Random(f"reports {seed}")
    cluster = SimulatedCluster(seed)
    cluster.quarantine_after = chance.choice((0, 2, 3))
    cluster.planning.takes_time = seed % 2 > 0
    for index in range(chance.randint(3, 5)):
        cluster.add_node(f"n{index}", speed=chance.choice((1.0, 2.0)), num_devices=chance.choice((1, 1, 2)))
    cluster.store.transact({}, {Keys.SHARES: encode(SharesRecord(slice_s=chance.choice((10.0, 60.0))))})
    for index, name in enumerate(JOBS):
        spec = small_spec(
            name,
            num_blocks=chance.randint(2, 4),
            batches=chance.choice((60, 100_000)),
            fault=FaultSpec(snapshot_every=4, checkpoint_every=chance.choice((0, 8))),
            min_nodes=chance.choice((1, 1, 2)),
            max_nodes=chance.choice((0, 0, 3)),
        )
        user = chance.choice(("alice", "bob"))
        cluster.submit(spec.with_priority(chance.choice((0, 0, 0, 5)) if index else 0), user=user)
    return cluster, chance


def trouble(cluster: SimulatedCluster, chance: random.Random) -> None:
    """Somebody joins, leaves, fails or changes his mind."""
    living = sorted(name for name, node in cluster.nodes.items() if node.is_alive)
    match chance.choice(("join", "again", "again", "fail", "drain", "lapse", "pause", "resume", "resume", "elect")):
        case "join" if len(cluster.nodes) < 7:
            cluster.add_node(f"n{cluster.num_incarnations}", speed=chance.choice((1.0, 2.0)))
        case "again" if living:
            victim = chance.choice(living)
            cluster.kill(victim)
            cluster.expire(victim)
            cluster.add_node(victim)
        case "fail" if living:
            cluster.fail_worker(chance.choice(living), fault=chance.choice(("", "", "ValueError: x")))
        case "drain" if len(living) > 3:
            cluster.drain(chance.choice(living))
        case "lapse" if living:
            cluster.lapse(chance.choice(living))
        case "pause" | "resume" as what:
            cluster.want(chance.choice(JOBS), Desired.PAUSED if what == "pause" else Desired.RUNNING)
        case "elect":
            cluster.elect()


@pytest.mark.parametrize("block", BLOCKS)
def test_a_leader_that_remembers_decides_as_one_that_does_not(block: int) -> None:
    """Every kind of record, tiny and long pauses, failures, several leaders: the same commands and missing plans, and
    no deadline is slept through.
    """
    told: dict[str, int] = {}
    phases: set[Phase] = set()
    for seed in range(block * NUM_SEEDS, (block + 1) * NUM_SEEDS):
        cluster, chance = build(seed)
        reports = Reports(cluster, chance)
        act: Callable[[], None]
        for _ in range(NUM_STEPS):
            calm, harm = partial(cluster.calm, max_rounds=1), partial(trouble, cluster, chance)
            act = chance.choices((reports.one, cluster.random_step, calm, harm), (30, 30, 40, 1))[0]
            act()
            cluster.now += chance.choice(PAUSES_S[: chance.choice((4, 6, len(PAUSES_S)))])
            if cluster.leader in cluster.nodes:
                cluster.deliver(cluster.nodes[cluster.leader])
            cluster.compare_decisions()
            phases |= {job.phase.phase for job in cluster.facts().jobs.values()}
        told = {name: told.get(name, 0) + number for name, number in reports.num_told.items()}
    assert len(told) == 9, told
    assert min(told.values()) > 0, told
    assert phases >= {Phase.QUEUED, Phase.PREPARING, Phase.RUNNING, Phase.CHANGING, Phase.STOPPING}
