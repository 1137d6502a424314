"""A leader judges again only the jobs that an event concerns. simulated_cluster.py shows that it decides the same."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from headway.daemon.coordination import coordinator
from headway.daemon.coordination.claims import Claims, settle_claims
from headway.daemon.coordination.commands import Decision
from headway.daemon.coordination.conditions import TELL_AFTER_S
from headway.daemon.coordination.earlier import Earlier, Judged
from headway.daemon.planning.planner import answer
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import LinkProbe, ProbeRecord
from headway.daemon.records.records import NodeRecord, Phase, PhaseRecord, SpecRecord
from headway.daemon.situation.plan_cache import PlanCache, Purpose
from headway.daemon.situation.situation import JobSituation
from tests.fakes.simulated_cluster import SimulatedCluster, small_spec

NODES = ("a", "b", "c", "d", "e")


class Scene:
    """A leader of two jobs that train on two nodes each; the ways of the fifth node are the slowest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cluster = SimulatedCluster()
        for name in NODES:
            cluster.add_node(name)
        for job in ("first", "second"):
            cluster.submit(small_spec(job, batches=100_000, min_nodes=2, max_nodes=2))
        cluster.calm(until=lambda: all(cluster.phase(job).phase is Phase.RUNNING for job in ("first", "second")))
        cluster.calm(max_rounds=4)
        self.view, self.now = cluster.truth(), cluster.now + 1000.0
        self._revision = max(self.view.revisions.values())
        self.plans, self.earlier = PlanCache(), Earlier()
        self._judged: list[str] = []
        judge = coordinator._judge

        def noted(situation: JobSituation) -> Judged:
            self._judged.append(situation.job.name)
            return judge(situation)

        self.num_settled = 0

        def counted(*args: Any, **options: Any) -> Claims:
            self.num_settled += 1
            return settle_claims(*args, **options)

        monkeypatch.setattr(coordinator, "_judge", noted)
        monkeypatch.setattr(coordinator, "settle_claims", counted)
        for name in NODES:
            self.measure(name, **dict.fromkeys(NODES, 1e8 if name != "e" else 1e7))
            devices = (replace(self.view.nodes[name].devices[0], model="one"),)
            self.say(name, devices=devices)
        self.now += 1000.0
        for _ in range(9):
            self.answer()
        assert not self.judged(), "nothing happens, and nothing is judged again"

    def nodes_of(self, job: str) -> list[str]:
        """Return the nodes of a job's plan."""
        plan = self.view.jobs[job].plan
        assert plan is not None
        return [stage.node for stage in plan.workers]

    def decide(self) -> Decision:
        """Return the leader's next decision, a moment later. It is that of a leader who remembers nothing."""
        self.now += 0.001
        decide = partial(coordinator.decide, self.view, now=self.now, written_at=self.now, plans=self.plans)
        found = decide(earlier=self.earlier)
        num_judged, num_settled = len(self._judged), self.num_settled
        anew = decide()
        del self._judged[num_judged:]
        self.num_settled = num_settled
        assert (found.commands, found.missing) == (anew.commands, anew.missing)
        assert {*found.stale} == {*anew.stale}
        self.plans.decided(found.missing, jobs=self.view.jobs, now=self.now)
        return found

    def judged(self) -> set[str]:
        """Return the jobs about which the next decision judges again."""
        self._judged.clear()
        self.decide()
        return set(self._judged)

    def answer(self) -> None:
        """Let the next decision's plans be computed."""
        decision = self.decide()
        for request in (*decision.missing, *decision.stale):
            self.plans.answered(request, answer(request.question))
        self.decide()

    def measure(self, name: str, **bytes_per_s: float) -> None:
        """Let a node measure some of its ways again."""
        known = self.view.probes.get(name, ProbeRecord(incarnation=self.view.nodes[name].incarnation))
        ways = {peer: LinkProbe(round_trip_s=0.001, bytes_per_s=rate) for peer, rate in bytes_per_s.items()}
        self._put(Keys.probes(name), replace(known, peers=known.peers | ways))

    def measure_through(self, relay: str, name: str, **bytes_per_s: float) -> None:
        """Let a node measure some ways through a relay."""
        known = self.view.probes[name]
        ways = {peer: LinkProbe(round_trip_s=0.001, bytes_per_s=r, via=relay) for peer, r in bytes_per_s.items()}
        self._put(Keys.probes(name), replace(known, peers=known.peers | ways))

    def say(self, name: str, **fields: object) -> None:
        """Let a node have other fields in its record."""
        self._put(Keys.node(name), replace(self.view.nodes[name], **fields))  # type: ignore[arg-type]

    def join(self, name: str) -> None:
        """Let another node come."""
        node: NodeRecord = self.view.nodes[NODES[0]]
        self._put(Keys.node(name), replace(node, name=name, host=name, incarnation=f"{name}-1", address=f"{name}:1"))

    def submit(self, name: str) -> None:
        """Let a job come that could run on one node."""
        self._put(Keys.of(name, "spec"), SpecRecord(spec=small_spec(name), uid=name))
        self._put(Keys.of(name, "phase"), PhaseRecord())

    def _put(self, key: str, record: object) -> None:
        self._revision += 1
        revision = self._revision
        self.view.apply(key, encode(record), mod_revision=revision, create_revision=revision, now=self.now)


def test_a_measured_way_costs_the_jobs_whose_plans_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one makes plans stale, which is seen for all jobs. Then each concerns its own job."""
    scene = Scene(monkeypatch)
    (one, other), (third, _) = scene.nodes_of("first"), scene.nodes_of("second")
    [idle] = set(NODES) - {one, other, *scene.nodes_of("second")}
    scene.measure(idle, **{one: 9e7})
    assert not scene.decide().missing
    assert len(scene.decide().stale) == 2
    scene.measure(one, **{other: 8e7, third: 9e7})
    assert scene.judged() == {"first"}
    scene.measure(idle, **{one: 8.5e7, third: 8.5e7})
    assert not scene.judged()
    assert len(scene.decide().stale) == 2
    scene.answer()
    assert not scene.decide().stale


def test_the_slowest_way_costs_every_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a change costs depends on it."""
    scene = Scene(monkeypatch)
    scene.measure("e", a=2e7)
    assert scene.decide().stale
    assert not scene.judged()
    scene.measure("e", b=1e3)
    assert scene.judged() == {"first", "second"}


def test_a_speed_that_changes_no_plan_costs_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device counts as fast as the fastest of its model. A new fastest one concerns all."""
    scene = Scene(monkeypatch)
    [device] = scene.view.nodes["e"].devices
    scene.say("e", devices=(replace(device, speed=0.7),))
    assert not scene.judged()
    scene.say("e", devices=(replace(device, speed=1.7),))
    assert scene.judged() == {"first", "second"}


def test_what_waits_for_a_plan_is_not_judged_again_by_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node comes: both jobs miss a plan with it. Each is judged again when its plan is there, and after a while."""
    scene = Scene(monkeypatch)
    scene.join("f")
    scene.now += 100.0
    assert scene.judged() == {"first", "second"}
    missing = scene.decide().missing
    assert {request.job for request in missing} == {"first", "second"}
    scene.measure("e", f=9e7)
    assert not scene.judged()
    asked = scene.decide().missing
    assert asked != missing, "plans are asked for with the present ways"
    [wanted] = [request for request in asked if request.job == "first"]
    scene.plans.answered(wanted, answer(wanted.question))
    assert scene.judged() == {"first"}
    scene.now += TELL_AFTER_S
    assert "second" in scene.judged(), "now it says that it waits"


def test_claims_that_wait_for_a_plan_are_not_settled_again_by_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job comes, and the plan that it would claim is missing. The job goes on missing it while its wait is told."""
    scene = Scene(monkeypatch)
    scene.submit("third")
    scene.now += 1.0
    for _ in range(2):
        scene.decide()
    before = scene.num_settled
    for _ in range(5):
        assert Purpose.CLAIM in {request.purpose for request in scene.decide().missing}
    assert scene.num_settled == before
    scene.now += TELL_AFTER_S
    for _ in range(3):
        told = scene.decide()
        assert "third" in {command.job for command in told.commands}
        assert Purpose.CLAIM in {request.purpose for request in told.missing}
    assert scene.num_settled == before + 1, "a wait has ended"
    scene.answer()
    assert scene.num_settled > before + 1


def test_what_others_measure_through_a_relay_costs_the_jobs_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of a relay is as fast as the fastest way through it, whoever measured that."""
    scene = Scene(monkeypatch)
    [idle] = set(NODES) - {*scene.nodes_of("first"), *scene.nodes_of("second")}
    relay = scene.view.nodes[idle].address
    for name in NODES:
        if name != idle:
            scene.say(name, address=f"{relay}/{name}~")
    scene.now += 1000.0
    for _ in range(9):
        scene.answer()
    (one, _), (other, _) = scene.nodes_of("first"), scene.nodes_of("second")
    scene.measure(other, **{one: 9e7})
    scene.decide()  # plans are stale now, which is seen for all jobs
    scene.measure_through(relay, other, **{one: 3e8})
    assert "first" in scene.judged()
