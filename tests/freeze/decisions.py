"""What the coordinator decides in seeded scenarios of the simulated cluster: joins, kills, drains, slow-downs, sharing.

Scenarios named `one` have one job, so no division of devices is part of them; those named `several` share.
"""

import hashlib
import json
import random
from dataclasses import replace

from headway.daemon.cluster.cluster_records import SharesRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Desired
from headway.daemon.jobs.job import FaultSpec
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

NUM_SCENARIOS = 40
NUM_ROUNDS = 160
NUM_PARTS = 4
"""Digests of a scenario, each of the decisions up to a moment: the first that differs tells when it began."""


def record() -> dict[str, str]:
    """The digest of all that leaders write, by scenario and moment."""
    found: dict[str, str] = {}
    for seed in range(NUM_SCENARIOS):
        for kind in ("one", "several"):
            found |= {f"{kind} {seed} {moment}": told for moment, told in _scenario(kind, seed).items()}
    return found


def _scenario(kind: str, seed: int) -> dict[int, str]:
    chance = random.Random(f"{kind} {seed}")
    cluster = SimulatedCluster(seed)
    cluster.quarantine_after = chance.choice((0, 3))
    cluster.planning.takes_time = seed % 3 == 0
    for index in range(chance.randint(2, 5)):
        cluster.add_node(f"n{index}", speed=chance.choice((1.0, 2.0)), num_devices=chance.choice((1, 1, 2)))
    cluster.store.transact({}, {Keys.SHARES: encode(SharesRecord(weights={"bob": 2.0}, slice_s=20.0))})
    names = ["first"] if kind == "one" else ["first", "second", "third"][: chance.randint(2, 3)]
    for name in names:
        spec = small_spec(
            name,
            num_blocks=chance.randint(2, 4),
            batches=chance.choice((40, 10_000)),
            fault=FaultSpec(snapshot_every=4, checkpoint_every=chance.choice((0, 8))),
            min_nodes=chance.choice((1, 1, 2)),
        )
        priority = chance.choice((0, 0, 5)) if kind == "several" else 0
        cluster.submit(spec.with_priority(priority), user=f"{chance.choice(('alice', 'bob'))}@host")
    digest, found = hashlib.sha256(), dict[int, str]()
    seen = 0
    for number in range(NUM_ROUNDS):
        if chance.random() < 0.08:
            _trouble(cluster, chance, names)
        cluster.calm(max_rounds=1, step_s=chance.choice((0.1, 0.5, 2.5)))
        for change in cluster.store.history[seen:]:
            if change.key.startswith(Keys.JOBS) and change.key.split("/")[-1] in ("phase", "next", "plan", "stop"):
                digest.update(f"{number} {change.key} {_told(change.value)}\n".encode())
        seen = len(cluster.store.history)
        if (number + 1) % (NUM_ROUNDS // NUM_PARTS) == 0:
            found[number + 1] = digest.hexdigest()[:16]
    return found


def _told(value: bytes | None) -> str:
    """A record without what is a matter of form, and with the names of today."""
    if value is None:
        return "gone"
    fields = json.loads(value)
    fields.pop("format", None)
    if "stages" in fields:
        fields["workers"] = fields.pop("stages")
    return json.dumps(fields, sort_keys=True)


def _trouble(cluster: SimulatedCluster, chance: random.Random, names: list[str]) -> None:
    """Somebody joins, leaves, fails, is measured anew or changes his mind."""
    living = sorted(name for name, node in cluster.nodes.items() if node.is_alive)
    events = ("join", "die", "again", "fail", "drain", "slow", "lapse", "pause", "resume", "resume", "elect")
    match chance.choice(events):
        case "join" if len(living) < 7:
            cluster.add_node(f"m{cluster.num_incarnations}", speed=chance.choice((1.0, 2.0)))
        case "die" | "again" as what if len(living) > 2:
            victim = chance.choice(living)
            cluster.kill(victim)
            cluster.expire(victim)
            if what == "again":
                cluster.add_node(victim)
        case "fail" if living:
            cluster.fail_worker(chance.choice(living), fault=chance.choice(("", "", "ValueError: x")))
        case "drain" if len(living) > 2:
            cluster.drain(chance.choice(living))
        case "slow" if living:
            node = cluster.nodes[chance.choice(living)]
            devices = tuple(replace(each, speed=chance.choice((0.25, 1.0, 4.0))) for each in node.record.devices)
            cluster.say(node.name, devices=devices)
        case "lapse" if living:
            cluster.lapse(chance.choice(living))
        case "pause" | "resume" as what:
            cluster.want(chance.choice(names), Desired.PAUSED if what == "pause" else Desired.RUNNING)
        case "elect":
            cluster.elect()
