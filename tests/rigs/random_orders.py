"""Parts that tests of random orders share."""

import random
from typing import Any

from headway.daemon.cluster.cluster_records import SharesRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import CheckpointRecord, Desired, Phase
from headway.daemon.jobs.job import FaultSpec
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

FINAL = (Phase.FINISHED, Phase.CANCELLED)


JOBS = ("first", "second")


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
