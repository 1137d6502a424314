"""An agent that remembers what follows from records has the same steps as one that does not, whatever nodes do."""

import random
from copy import deepcopy
from dataclasses import replace

import pytest

from headway.daemon.agent.local_state import NodeState
from headway.daemon.agent.state_steps import _places
from headway.daemon.agent.steps_due import next_steps
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import Port, ReachFact, ReachRecord
from headway.daemon.cluster.records import (
    NodeRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    StateFile,
    StateRecord,
    WorkerPart,
)
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.job import FaultSpec
from headway.daemon.plan.copy_places import copy_places
from tests.rigs.agent_views import node_record as registered
from tests.rigs.simulated_cluster import small_spec

NODES = [f"n{number}" for number in range(30)]
JOBS = ("first", "second")
NUM_EVENTS = 80


class Nodes:
    """Nodes that come, go, drain and move to other machines and sites, and the view of it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.view = ClusterView()
        self._revision = 0
        for name in NODES[::2]:
            self._put(Keys.node(name), self._record(name))
        for number, job in enumerate(JOBS):
            self._run(job, own=NODES[8 * number : 8 * number + 6 : 2], copies=2 + number)

    def event(self) -> None:
        """Let a node do something."""
        name = self.chance.choice(NODES)
        match self.chance.randrange(6):
            case 0 | 1:
                self._put(Keys.node(name), self._record(name) if name not in self.view.nodes else None)
            case 2 if name in self.view.nodes:
                self._put(Keys.node(name), self._record(name))
            case 3 if name in self.view.nodes:
                node = self.view.nodes[name]
                self._put(Keys.node(name), replace(node, is_draining=not node.is_draining))
            case 4:
                why = self.chance.choice(("", "refused"))
                fact = ReachFact(
                    to=NODES[0], to_incarnation=f"{NODES[0]}-1", port=Port.DAEMON, address="a:1", reason=why
                )
                self._put(Keys.reach(name), ReachRecord(incarnation=f"{name}-1", facts=(fact,)))
            case 5:
                files = {"embed": StateFile(size_bytes=1, checksum="0" * 64)}
                state = StateRecord(incarnation=f"{name}-1", generation=1, files=files)
                self._put(Keys.state("first", 1, 12, name), state if self.chance.randrange(2) else None)

    def _record(self, name: str) -> NodeRecord:
        host, site = self.chance.choice((name, "machine")), self.chance.choice(("here", "here", "there"))
        return replace(registered(name), host=host, site=site)

    def _run(self, job: str, *, own: list[str], copies: int) -> None:
        spec = small_spec(job, fault=FaultSpec(snapshot_every=4, copies=copies))
        cuts = (spec.layers[:2], spec.layers[2:4], spec.layers[4:])
        stages = tuple(
            WorkerPart(node=name, node_incarnation=f"{name}-1", device_index=0, layers=layers, depth=4)
            for name, layers in zip(own, cuts, strict=True)
        )
        self._put(Keys.of(job, "spec"), SpecRecord(spec=spec, uid=job))
        self._put(Keys.of(job, "phase"), PhaseRecord(phase=Phase.RUNNING, generation=1))
        self._put(Keys.of(job, "plan"), PlanRecord(generation=1, timeline=1, workers=stages))
        for boundary in (4, 8):  # the earlier one has copies
            for number, stage in enumerate(stages):
                held = (stage, stages[number - 1]) if boundary == 4 else (stage,)
                parts = {layer for each in held for layer in each.layers} | ({JOURNAL} if stages[-1] in held else set())
                files = {part: StateFile(size_bytes=1, checksum="0" * 64) for part in sorted(parts)}
                record = StateRecord(incarnation=stage.node_incarnation, generation=1, files=files)
                self._put(Keys.state(job, 1, boundary, stage.node), record)

    def _put(self, key: str, record: object | None) -> None:
        self._revision += 1
        value = encode(record) if record is not None else None
        self.view.apply(key, value, mod_revision=self._revision, create_revision=self._revision)


@pytest.mark.parametrize("seed", range(4))
def test_steps_follow_every_node(seed: int) -> None:
    """After each event, for nodes of plans and for others. Copies have the places that are found anew."""
    cluster = Nodes(seed)
    num_steps = 0
    for _ in range(NUM_EVENTS):
        cluster.event()
        view, bare = cluster.view, deepcopy(cluster.view)
        for job in view.jobs.values():
            assert job.spec is not None
            assert job.plan is not None
            anew = copy_places(job.spec, job.plan, view.nodes, blocked=view.blocked)
            assert _places(job.spec, job.plan, view.nodes, view.blocked) == anew
        for name in NODES[:12]:
            node = NodeState(name=name, incarnation=f"{name}-1", workers=())
            steps = next_steps(view, node)
            assert steps == next_steps(bare, node)
            num_steps += len(steps)
    assert num_steps > NUM_EVENTS, "there is something to compare"
