"""A remembered prediction is that of the present records, whatever has changed."""

import random
from copy import deepcopy
from dataclasses import replace

import pytest

from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import LayerTime, LinkProbe, ProbeRecord, ProfileRecord
from headway.daemon.cluster.records import PlanRecord, SpecRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.outlook import LEAST_SAMPLES, as_fast_as_their_like, concerned, measured, predicted
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.plan_question import ask
from headway.daemon.plan.planner import answer
from headway.daemon.plan.predicted_time import predict
from tests.rigs.clusters import node
from tests.rigs.scenarios import events, running_at_full_speed
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

SPEC = JobSpec(job=JobSection(name="demo"))
NAMES = ("a", "b", "c", "d", "e")


class Scene:
    """A job on three of five nodes."""

    def __init__(self) -> None:
        self.view = ClusterView()
        self._revision = 0
        for name in NAMES:
            self.put(Keys.node(name), replace(node(name), address=f"{name}:7070"))
        planned = answer(ask(SPEC, [self.view.nodes[name] for name in "abc"]))
        assert isinstance(planned, ClusterPlan)
        self.put(Keys.of("demo", "spec"), SpecRecord(spec=SPEC))
        plan = PlanRecord(
            generation=1, timeline=1, workers=planned.workers, predicted_batch_seconds=planned.predicted_batch_seconds
        )
        self.put(Keys.of("demo", "plan"), plan)

    def put(self, key: str, record: object) -> None:
        self._revision += 1
        value = encode(record) if record is not None else None
        self.view.apply(key, value, mod_revision=self._revision, create_revision=self._revision)

    def predicted(self) -> tuple[float | None, float | None]:
        """Return what is remembered, and what all nodes and measurements give anew."""
        job, view = self.view.jobs["demo"], self.view
        assert job.plan is not None
        nodes, profiles = as_fast_as_their_like(view.nodes.values()), measured(job, view)
        known = concerned(job.plan.workers, nodes)
        found = predicted(SPEC, job.plan.workers, known=known, profiles=profiles)
        return found, predict(SPEC, job.plan.workers, nodes.values(), profiles=measured(job, deepcopy(view)))


@pytest.mark.parametrize("seed", range(5))
def test_a_remembered_prediction_is_the_present_one(seed: int) -> None:
    """Ways, speeds, machines that nodes share, relays and layers' times change; nodes go and come."""
    draw, scene, told = random.Random(seed), Scene(), set[float | None]()
    for _ in range(400):
        name = draw.choice(NAMES)
        record = scene.view.nodes.get(name) or replace(node(name), address=f"{name}:7070")
        match draw.randrange(5):
            case 0:
                peers = {
                    peer: LinkProbe(
                        round_trip_s=draw.choice((0.001, 0.2)),
                        bytes_per_s=draw.choice((1e5, 1e6, 1e8)),
                        via=draw.choice(("", "relay:7070", f"{draw.choice(NAMES)}:7070")),
                    )
                    for peer in draw.sample(NAMES, 2)
                }
                scene.put(Keys.probes(name), ProbeRecord(incarnation=record.incarnation, peers=peers))
            case 1:
                speed, host = draw.choice((0.5, 2.0)), draw.choice(("", "box"))
                devices = tuple(replace(device, speed=speed, num_cores=2.0) for device in record.devices)
                scene.put(Keys.node(name), replace(record, host=host, devices=devices))
            case 2:
                relay = draw.choice(("", "relay:7070", *(f"{other}:7070" for other in NAMES if other != name)))
                scene.put(Keys.node(name), replace(record, address=f"{relay}/{name}~" if relay else f"{name}:7070"))
            case 3:
                times = LayerTime(forward_s=draw.choice((0.1, 0.5)), backward_s=0.2)
                profile = ProfileRecord(generation=1, layers={"block": times}, num_samples=LEAST_SAMPLES)
                scene.put(Keys.profile("demo", name, 0), profile)
            case 4:
                scene.put(Keys.node(name), None if name in scene.view.nodes and draw.random() < 0.5 else record)
        found, expected = scene.predicted()
        assert found == expected
        told.add(found)
    assert len(told) > 4


def test_a_relay_has_the_line_that_others_have_measured() -> None:
    """Of the plan's links through it, each has its part of that, also if both ends of the way are of no plan."""
    scene, relay = Scene(), "relay:7070"
    slow = LinkProbe(round_trip_s=0.01, bytes_per_s=1e4, via=relay)
    for name in NAMES:
        scene.put(Keys.node(name), replace(scene.view.nodes[name], address=f"{relay}/{name}~"))
        peers = dict.fromkeys(set("abc") - {name}, slow)
        scene.put(Keys.probes(name), ProbeRecord(incarnation=scene.view.nodes[name].incarnation, peers=peers))
    before, _ = scene.predicted()
    fast = ProbeRecord(incarnation=scene.view.nodes["d"].incarnation, peers={"e": replace(slow, bytes_per_s=1e9)})
    scene.put(Keys.probes("d"), fast)
    after, expected = scene.predicted()
    assert before is not None
    assert after == expected == pytest.approx(before / 2)


def test_the_ways_to_a_relay_and_from_there_count() -> None:
    """The relay's node is no part of the plan."""
    scene = Scene()
    for name in "abc":
        scene.put(Keys.node(name), replace(scene.view.nodes[name], address=f"d:7070/{name}~"))
    told = set()
    for rate in (1e4, 1e5):
        way = LinkProbe(round_trip_s=0.01, bytes_per_s=rate)
        record = ProbeRecord(incarnation=scene.view.nodes["d"].incarnation, peers=dict.fromkeys("abc", way))
        scene.put(Keys.probes("d"), record)
        found, expected = scene.predicted()
        assert found == expected
        told.add(found)
    assert len(told) == 2


def test_a_job_says_that_its_first_batches_have_no_delay() -> None:
    """They are slower than the plan's pace, and nothing is wrong."""
    spec = small_spec("first", batches=400)
    cluster = SimulatedCluster()
    cluster.add_node("a")
    cluster.submit(replace(spec, train=replace(spec.train, sync_batches=40)))
    running_at_full_speed(cluster)
    (began,) = [text for text in events(cluster) if text.startswith("Training since batch 0: ")]
    assert began.endswith(" s a batch; the first 40 have no delay")
