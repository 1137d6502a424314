"""A running job gains by a better plan: measurements show a straggler, and the plan changes when that pays."""

from dataclasses import replace

import pytest

from headway.daemon.cluster.cluster_records import NodeFailureRecord
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import LayerTime, LinkProbe, ProbeRecord, ProfileRecord, ProgressRecord
from headway.daemon.cluster.records import (
    Device,
    NodeRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.decide.actions import offer_change
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.commands import Transaction
from headway.daemon.decide.conditions import (
    better_plan_found,
    outlook_changed,
    outlook_text,
)
from headway.daemon.decide.coordinator import decide, waits
from headway.daemon.decide.outlook import LEAST_SAMPLES, measured
from headway.daemon.decide.situation import JobSituation
from headway.daemon.plan.cluster_plan import ClusterPlan
from headway.daemon.plan.planner import make_plan
from headway.daemon.plan.rebalance import LEAST_PACES
from tests.rigs.simulated_cluster import small_spec

SPEC = small_spec("demo", num_blocks=10, batches=100_000)
BLOCK = LayerTime(forward_s=0.01, backward_s=0.02, update_s=0.01)


class Scene:
    """A view in which a job runs on two equal nodes, fed by hand."""

    def __init__(self) -> None:
        self.view = ClusterView()
        self.revision = 0
        self.view.set_in_sight(True, now=0.0)
        self.join("a", now=0.0)
        self.join("b", now=0.0)
        plan = make_plan(SPEC, self.view.nodes.values())
        assert isinstance(plan, ClusterPlan)
        self.put(Keys.of("demo", "spec"), SpecRecord(spec=SPEC))
        self.put(Keys.of("demo", "phase"), PhaseRecord(phase=Phase.RUNNING, generation=1, reason="trains"))
        self.enforce(1, plan, now=0.0)

    def put(self, key: str, record: object, *, now: float = 0.0) -> None:
        self.revision += 1
        self.view.apply(key, encode(record), mod_revision=self.revision, create_revision=self.revision, now=now)

    def delete(self, key: str, *, now: float) -> None:
        self.revision += 1
        self.view.apply(key, None, mod_revision=self.revision, create_revision=0, now=now)

    def join(self, name: str, *, now: float, life: int = 1) -> None:
        record = NodeRecord(
            name=name,
            incarnation=f"{name}-{life}",
            address="",
            host=name,
            site="here",
            devices=(Device(kind="cpu"),),
            memory_bytes=0,
            arithmetic_class="one",
        )
        self.put(Keys.node(name), record, now=now)

    def enforce(self, generation: int, plan: ClusterPlan, *, now: float) -> None:
        record = PlanRecord(
            generation=generation,
            timeline=1,
            workers=plan.workers,
            predicted_batch_seconds=plan.predicted_batch_seconds,
            arithmetic_classes=("one",),
        )
        self.put(Keys.of("demo", "plan"), record, now=now)
        for position, stage in enumerate(plan.workers):
            worker = WorkerRecord(node=stage.node, incarnation="w", address="", pid=1, state=WorkerState.RUNNING)
            self.put(Keys.worker("demo", generation, position), worker, now=now)

    def profile(self, node: str, *, slower: float, num_samples: int = LEAST_SAMPLES) -> None:
        times = LayerTime(
            forward_s=BLOCK.forward_s * slower, backward_s=BLOCK.backward_s * slower, update_s=BLOCK.update_s * slower
        )
        plan = self.view.jobs["demo"].plan
        assert plan is not None
        record = ProfileRecord(generation=plan.generation, layers={"block": times}, num_samples=num_samples)
        self.put(Keys.profile("demo", node, 0), record)

    def probe(self, node: str, peer: str, *, round_trip_s: float, loss: float = 0.0) -> None:
        probe = LinkProbe(round_trip_s=round_trip_s, bytes_per_s=1e9, loss=loss)
        self.put(Keys.probes(node), ProbeRecord(incarnation=f"{node}-1", peers={peer: probe}))

    def progress(self, batch: int) -> None:
        record = ProgressRecord(
            generation=1, batch=batch, loss=1.0, tokens_per_second=SPEC.train.tokens_per_batch / 0.5
        )
        self.put(Keys.of("demo", "progress"), record)

    def situation(self, now: float = 30.0) -> JobSituation:
        return JobSituation(job=self.view.jobs["demo"], view=self.view, now=now, written_at=0.0)


def test_a_straggler_is_measured_and_the_plan_changes() -> None:
    """Equal nodes keep their cut; one that takes three times as long gets fewer layers, and the event says why."""
    scene = Scene()
    scene.profile("a", slower=1.0)
    scene.profile("b", slower=1.0)
    assert not better_plan_found(scene.situation())
    scene.profile("b", slower=3.0)
    situation = scene.situation()
    assert better_plan_found(situation)
    plan = situation.plans.best
    assert isinstance(plan, ClusterPlan)
    layers = {stage.node: len(stage.layers) for stage in plan.workers}
    assert layers["a"] >= 2 * layers["b"]
    (command,) = decide(scene.view, now=30.0).commands
    assert isinstance(command, Transaction)
    assert "Other layers by measured times" in command.reason
    assert "predicted" in command.reason


def test_a_link_that_has_grown_long_makes_the_plan_deeper() -> None:
    """Six microbatches' time of round trip where there was none: the same cut with more in flight, by a planned
    change; a round trip that hardly matters moves nothing."""
    scene = Scene()
    scene.profile("a", slower=1.0)
    scene.profile("b", slower=1.0)
    scene.probe("b", "a", round_trip_s=1e-3)
    shallow = scene.situation().plans.best
    assert isinstance(shallow, ClusterPlan)
    scene.enforce(1, shallow, now=0.0)
    scene.probe("b", "a", round_trip_s=20e-3)
    assert not better_plan_found(scene.situation())
    scene.probe("b", "a", round_trip_s=6 * 5 * (BLOCK.forward_s + BLOCK.backward_s))
    situation = scene.situation()
    assert better_plan_found(situation)
    deep = situation.plans.best
    assert isinstance(deep, ClusterPlan)
    assert [stage.layers for stage in deep.workers] == [stage.layers for stage in shallow.workers]
    assert deep.workers[0].depth >= shallow.workers[0].depth + 3
    (command,) = decide(scene.view, now=30.0).commands
    assert isinstance(command, Transaction)
    assert "Measured links need more microbatches in flight" in command.reason


def test_a_line_that_begins_to_lose_packets_makes_the_plan_deeper() -> None:
    """Three microbatches' time of round trip, then frames that are as much late: the same cut with more in flight."""
    scene = Scene()
    scene.profile("a", slower=1.0)
    scene.profile("b", slower=1.0)
    round_trip_s = 3 * 5 * (BLOCK.forward_s + BLOCK.backward_s)
    scene.probe("b", "a", round_trip_s=round_trip_s)
    without = scene.situation().plans.best
    assert isinstance(without, ClusterPlan)
    scene.enforce(1, without, now=0.0)
    scene.probe("b", "a", round_trip_s=round_trip_s, loss=1e-4)
    assert not better_plan_found(scene.situation())
    scene.probe("b", "a", round_trip_s=round_trip_s, loss=0.05)
    situation = scene.situation()
    assert better_plan_found(situation)
    assert isinstance(situation.plans.best, ClusterPlan)
    assert [stage.layers for stage in situation.plans.best.workers] == [stage.layers for stage in without.workers]
    assert situation.plans.best.workers[0].depth >= without.workers[0].depth + 2


def test_a_job_that_wants_no_new_cut_moves_with_nodes_alone() -> None:
    """A straggler stays, also under a new leader; a node that comes after the plan brings its best plan with it."""
    scene = Scene()
    spec = replace(SPEC, placement=replace(SPEC.placement, recut=False))
    scene.put(Keys.of("demo", "spec"), SpecRecord(spec=spec))
    scene.profile("a", slower=1.0)
    scene.profile("b", slower=3.0)
    assert not better_plan_found(scene.situation())
    scene.join("c", now=1.0)
    assert better_plan_found(scene.situation())
    plan = scene.situation().plans.best
    assert isinstance(plan, ClusterPlan)
    scene.enforce(2, plan, now=2.0)
    scene.put(Keys.of("demo", "phase"), PhaseRecord(phase=Phase.RUNNING, generation=2))
    assert scene.view.newcomers(scene.view.jobs["demo"], scene.view.nodes) == frozenset()
    scene.delete(Keys.node("c"), now=3.0)
    scene.join("c", now=4.0)
    assert scene.view.newcomers(scene.view.jobs["demo"], scene.view.nodes) == frozenset(), (
        "its lease lapsed, and the plan has it"
    )
    scene.join("c", now=5.0, life=2)
    assert scene.view.newcomers(scene.view.jobs["demo"], scene.view.nodes) == {"c"}


def test_a_plan_is_held_to_what_it_promised() -> None:
    """A cut promises a factor, and the pace stays as it was: the next such cut is doubted, and the job says so."""
    scene = Scene()
    scene.profile("a", slower=1.0)
    scene.profile("b", slower=3.0)

    def trains(generation: int, first: int) -> None:
        for batch in range(first, first + LEAST_PACES):
            progress = ProgressRecord(generation=generation, batch=batch, loss=1.0, tokens_per_second=1000.0)
            scene.put(Keys.of("demo", "progress"), progress)

    trains(1, 0)
    situation = scene.situation()
    assert better_plan_found(situation)
    offered = offer_change(situation, Phase.CHANGING)
    assert isinstance(offered, Transaction)
    successor = decode(offered.puts[Keys.of("demo", "next")], PlanRecord)
    assert situation.plans.outlook is not None
    assert successor.promised == situation.plans.outlook.factor > 1.2
    scene.put(Keys.of("demo", "plan"), successor, now=1.0)
    scene.put(Keys.of("demo", "phase"), PhaseRecord(phase=Phase.RUNNING, generation=2), now=1.0)
    trains(2, 10)
    [promise] = scene.view.jobs["demo"].promises.made
    assert promise.shortfall == pytest.approx(successor.promised - 1.0)
    assert scene.view.jobs["demo"].promises.doubt(1.0) == pytest.approx(promise.shortfall)


@pytest.mark.parametrize("how", ["drained", "lapsed", "in quarantine", "without a worker"])
def test_without_new_cuts_a_node_that_is_released_or_heals_is_used_again(how: str) -> None:
    """The plan does without c, for a reason that passes: then c has come, as if it had joined."""
    scene = Scene()
    scene.put(Keys.of("demo", "spec"), SpecRecord(spec=replace(SPEC, placement=replace(SPEC.placement, recut=False))))
    scene.join("c", now=1.0)
    away = replace(scene.view.nodes["c"], is_draining=how == "drained", down_devices=(0,) if "worker" in how else ())
    scene.put(Keys.node("c"), away)
    for number in range(3 if how == "in quarantine" else 0):
        scene.put(Keys.failure("c", number), NodeFailureRecord(at=0.0, text="lost"))
    if how == "lapsed":
        scene.delete(Keys.node("c"), now=1.0)
    plan = make_plan(SPEC, [scene.view.nodes["a"], scene.view.nodes["b"]])
    assert isinstance(plan, ClusterPlan)
    scene.enforce(2, plan, now=2.0)
    scene.put(Keys.of("demo", "phase"), PhaseRecord(phase=Phase.RUNNING, generation=2))
    assert not better_plan_found(scene.situation())
    if how == "in quarantine":
        scene.delete(Keys.failure("c", 0), now=3.0)
    else:
        scene.join("c", now=3.0)
    assert better_plan_found(scene.situation())


def test_too_few_samples_do_not_change_the_plan() -> None:
    scene = Scene()
    scene.profile("a", slower=1.0)
    scene.profile("b", slower=3.0, num_samples=LEAST_SAMPLES - 1)
    assert not better_plan_found(scene.situation())
    assert [device for device, _ in measured(scene.view.jobs["demo"], scene.view).layers] == [("a", 0)]


def test_a_measurement_of_one_worker_alone_does_not_change_the_plan() -> None:
    """One of two workers is measured, or both but under an earlier plan: the cut stays until both are."""
    scene = Scene()
    scene.profile("b", slower=3.0)
    assert not better_plan_found(scene.situation())
    scene.profile("a", slower=1.0)
    assert better_plan_found(scene.situation())
    plan = make_plan(SPEC, scene.view.nodes.values())
    assert isinstance(plan, ClusterPlan)
    scene.enforce(2, plan, now=1.0)
    scene.put(Keys.of("demo", "phase"), PhaseRecord(phase=Phase.RUNNING, generation=2))
    assert not better_plan_found(scene.situation())


def test_measurements_of_a_lost_node_do_not_change_the_plan() -> None:
    scene = Scene()
    scene.profile("b", slower=3.0)
    scene.put(Keys.probes("b"), ProbeRecord(incarnation="b-1", peers={"a": LinkProbe(round_trip_s=1, bytes_per_s=1)}))
    assert measured(scene.view.jobs["demo"], scene.view).links
    scene.delete(Keys.node("b"), now=1.0)
    profiles = measured(scene.view.jobs["demo"], scene.view)
    assert not profiles.layers
    assert not profiles.links


def test_near_the_end_the_straggler_stays_and_status_says_why() -> None:
    """What moving would save of the last batch, of half a second, is less than it costs."""
    scene = Scene()
    scene.profile("a", slower=1.0)
    scene.profile("b", slower=3.0)
    scene.progress(SPEC.train.batches - 2)
    situation = scene.situation()
    assert not better_plan_found(situation)
    assert outlook_changed(situation)
    assert "over the remaining batches, and moving costs" in outlook_text(situation)
    (command,) = decide(scene.view, now=30.0).commands
    assert isinstance(command, Transaction)
    assert command.puts.keys() == {Keys.of("demo", "phase")}, "no event, no plan"
    scene.put(Keys.of("demo", "phase"), PhaseRecord(phase=Phase.RUNNING, generation=1, outlook=outlook_text(situation)))
    assert not decide(scene.view, now=30.0).commands, "said once"


def test_a_flapping_node_is_waited_for_longer_and_longer() -> None:
    """Third time in a minute: the job runs on without it, until it has stayed for a while."""
    scene = Scene()
    for life in range(1, 4):
        scene.join("c", now=20.0 * life, life=life)
        if life < 3:
            scene.delete(Keys.node("c"), now=20.0 * life + 10.0)
    situation = scene.situation(now=65.0)
    assert situation.plans.on_probation == {"c": 70.0}
    assert {stage.node for stage in situation.plans.best.workers} == {"a", "b"}  # type: ignore[union-attr]
    assert 70.0 in waits(situation)
    later = scene.situation(now=71.0)
    assert better_plan_found(later)
    assert "c" in {stage.node for stage in later.plans.best.workers}  # type: ignore[union-attr]


def test_changes_of_plan_are_remembered_and_the_job_rests() -> None:
    """Right after a change, a plan that is clearly faster waits; time alone ends the rest."""
    scene = Scene()
    plan = scene.situation().plans.best
    assert isinstance(plan, ClusterPlan)
    for generation in range(2, 8):
        scene.enforce(generation, plan, now=30.0 + generation)
    assert scene.view.jobs["demo"].changed_at == pytest.approx([30.0 + generation for generation in range(2, 8)])
    scene.put(Keys.of("demo", "phase"), PhaseRecord(phase=Phase.RUNNING, generation=7), now=30.0)
    scene.profile("a", slower=1.0)
    scene.profile("b", slower=3.0)
    situation = scene.situation(now=40.0)
    assert not better_plan_found(situation)
    assert "rest" in outlook_text(situation)
    at = situation.plans.reconsidered_at
    assert at > 40.0
    assert at in waits(situation)
    assert better_plan_found(scene.situation(now=at + 0.1))


def test_a_layer_moved_by_nothing_but_noise_stays() -> None:
    """A few percent either way are less than a cut takes."""
    for slower in (0.95, 1.0, 1.05):
        scene = Scene()
        scene.profile("a", slower=1.0)
        scene.profile("b", slower=slower)
        assert not better_plan_found(scene.situation()), slower
        assert replace(scene.view.jobs["demo"].phase).outlook == ""
