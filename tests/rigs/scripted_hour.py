"""An hour of a job's life without a cluster: nodes join, leave and change speed, and the planner and the judge answer.

Time goes in steps of `STEP_S`. What a plan does is computed from the true speeds, by the plain bound of a pipeline with
a delay; what is decided rests on measured ones, which come late, rounded by the 5 % rule, and noisy. Beside it goes the
same planner with free and instant moves at every event, which knows the true speeds.
"""

import random
from dataclasses import dataclass, field

from headway.daemon.cluster.records import Device, NodeRecord, PlanRecord, WorkerPart
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.layer_costs import LayerCost, layer_costs, microbatch_seconds, update_seconds
from headway.daemon.plan.planner import ClusterPlan, make_plan
from headway.daemon.plan.rebalance import (
    WINDOW_S,
    MoveCost,
    Outlook,
    is_same,
    judge,
    moving_bytes,
    probation_s,
)

STEP_S = 1.0
SETTLE_S = 2.0
PREPARE_S = 1.0
"""Seconds for the workers of the next plan to be ready; training continues meanwhile."""
RECOVERY_S = 3.0
"""Seconds from a death to the first operation after it."""
MEASURED_AFTER_S = 10.0
"""A change of speed shows in the measurements so much later."""
NOISE = 0.04
ANSWERS_S = 90.0
"""Maximum delay of an event's consequences: it shows, nodes settle, the job has its rest."""


@dataclass(slots=True)
class SimulatedMachine:
    """One node of the hour."""

    name: str
    nominal: float
    """Its speed by its own benchmark, rounded."""
    true: float
    measured: float
    joined_at: float
    changed_at: float
    life: int = 0

    def record(self, speed: float) -> NodeRecord:
        return NodeRecord(
            name=self.name,
            incarnation=f"{self.name}-{self.life}",
            address="",
            host=self.name,
            site="here",
            devices=(Device(kind="cpu", speed=speed),),
            memory_bytes=0,
            arithmetic_class="one",
        )


@dataclass(slots=True)
class Outcome:
    """The result of the hour."""

    batches: float = 0.0
    ideal_batches: float = 0.0
    events: list[float] = field(default_factory=list)
    moves: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Return the share of the batches that free and instant moves would have reached."""
        return self.batches / self.ideal_batches

    def most_moves_of_an_event(self) -> int:
        """Each move is charged to one event of the last `ANSWERS_S`: the least that the busiest one must bear.

        Moves without such an event count as if they all had one event's place.
        """
        answers = [move for move in self.moves if any(0 <= move - at <= ANSWERS_S for at in self.events)]
        num_others = len(self.moves) - len(answers)
        for most in range(1, len(answers) + 1):
            room = dict.fromkeys(self.events, most)
            for move in answers:
                event = next((at for at in self.events if 0 <= move - at <= ANSWERS_S and room[at]), None)
                if event is None:
                    break
                room[event] -= 1
            else:
                return max(most, num_others)
        return len(self.moves)


class ScriptedHour:
    """`run` once."""

    def __init__(
        self, spec: JobSpec, seed: int, *, seconds: float = 3600.0, every_s: float = 60.0, flapping_s: float = 0.0
    ) -> None:
        """every_s: between two events, on average. flapping_s: instead one node comes and dies, every so often."""
        self.spec, self.seconds, self.every_s, self.flapping_s = spec, seconds, every_s, flapping_s
        self.chance = random.Random(seed)
        self.costs = {cost.name: cost for cost in layer_costs(spec)}
        self.machines: dict[str, SimulatedMachine] = {}
        self.departures: dict[str, list[float]] = {}
        self.changes: list[float] = []
        self.outcome = Outcome()
        self.gone: dict[str, SimulatedMachine] = {}
        self.now = 0.0
        self.stages: tuple[WorkerPart, ...] = ()
        self.left: tuple[WorkerPart, ...] = ()
        self.next: tuple[WorkerPart, ...] = ()
        self.next_at = 0.0
        self.paused_until = 0.0
        self.settled_at = 0.0
        self.ideal_rate = 0.0
        self.lives = 0
        self.verdicts: list[str] = []

    def run(self) -> Outcome:
        for index in range(3):
            self._join(f"n{index}")
        self.stages = self._best(true=False).workers
        self._after_event()
        next_event = self._pause()
        while self.now < self.seconds:
            if self.now >= next_event:
                next_event = self.now + self._pause()
                self._flap() if self.flapping_s else self._event()
            self._measure()
            self._decide()
            self._train()
            self.now += STEP_S
        return self.outcome

    def rate_of(self, *names: str) -> float:
        """Batches a second on these machines alone, as fast as they are now."""
        records = [self.machines[name].record(self.machines[name].true) for name in names]
        plan = make_plan(self.spec, records)
        assert isinstance(plan, ClusterPlan), plan
        return 1 / self._batch_seconds(plan.workers)

    # --- What happens -------------------------------------------------------------------------------------------------

    def _event(self) -> None:
        outside = [f"n{index}" for index in range(5) if f"n{index}" not in self.machines]
        what = self.chance.choice(("join", "join", "die", "drain", "slow", "recover", "slow"))
        if (what in ("die", "drain") and len(self.machines) > 2) or not outside:
            name = self.chance.choice(sorted(self.machines))
            if what == "die":
                self._die(name)
            else:
                self._drain(name)
        elif what == "join" or len(self.machines) < 2:
            self._join(self.chance.choice(outside))
        else:
            machine = self.machines[self.chance.choice(sorted(self.machines))]
            slower = self.chance.choice((0.33, 0.5, 0.8))
            machine.true = machine.nominal * (slower if what == "slow" else 1.0)
            machine.changed_at = self.now
        self._after_event()

    def _pause(self) -> float:
        return self.flapping_s or self.chance.expovariate(1 / self.every_s)

    def _flap(self) -> None:
        if "n2" in self.machines:
            self._die("n2")
        else:
            self._join("n2")
        self._after_event()

    def _after_event(self) -> None:
        self.outcome.events.append(self.now)
        self.ideal_rate = 1 / self._batch_seconds(self._best(true=True).workers)

    def _join(self, name: str) -> None:
        speed = self.chance.choice((1.0, 1.0, 2.0))
        self.lives += 1
        self.machines[name] = SimulatedMachine(name, speed, speed, speed, self.now, self.now, self.lives)
        self.settled_at = self.now + SETTLE_S

    def _die(self, name: str) -> None:
        self._remove(name)
        if name in {stage.node for stage in (*self.stages, *self.next)}:
            self._force(RECOVERY_S + self.chance.random() * self.spec.fault.snapshot_every / self._rate())

    def _drain(self, name: str) -> None:
        """The planned change for it is not judged: it has to be."""
        named = name in {stage.node for stage in self.stages}
        self._remove(name)
        if named:
            self._force(self._cost(self._best(true=False).workers).seconds)

    def _remove(self, name: str) -> None:
        self.departures.setdefault(name, []).append(self.now)
        self.gone[name] = self.machines.pop(name)
        self.settled_at = self.now + SETTLE_S

    def _force(self, pause_s: float) -> None:
        self.next = ()
        self._enforce(self._best(true=False).workers, pause_s)

    # --- What is decided ----------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Devices of the plan are measured, a while after they changed; small movements are not told."""
        for name in sorted({stage.node for stage in self.stages} & self.machines.keys()):
            machine = self.machines[name]
            seen = machine.true * (1 + self.chance.uniform(-NOISE, NOISE))
            is_new = self.now >= machine.changed_at + MEASURED_AFTER_S
            if is_new and abs(seen / machine.measured - 1) > 0.05:
                machine.measured = seen

    def _decide(self) -> None:
        if self.next:
            if self.now >= self.next_at:
                stages, self.next = self.next, ()
                self._enforce(stages, self._cost(stages).seconds)
            return
        if self.now < max(self.settled_at, self.paused_until):
            return
        best = self._best(true=False)
        verdict = judge(
            Outlook(
                present_s=self._batch_seconds(self.stages, measured=True),
                best_s=self._batch_seconds(best.workers, measured=True),
                is_other=not is_same(self.stages, best.workers),
                brings_workers=not {s.node for s in best.workers} <= {s.node for s in self.stages},
                goes_back=is_same(self.left, best.workers),
                batches_left=round((self.seconds - self.now) * self._rate()),
                cost=self._cost(best.workers),
                since_changes=tuple(self.now - at for at in self.changes),
            )
        )
        self.verdicts.append(verdict.reason)
        if verdict.is_worth_it:
            self.next, self.next_at = best.workers, self.now + PREPARE_S

    def _enforce(self, stages: tuple[WorkerPart, ...], pause_s: float) -> None:
        self.left, self.stages = self.stages, stages
        self.changes.append(self.now)
        self.outcome.moves.append(self.now)
        self.paused_until = max(self.paused_until, self.now) + pause_s

    def _cost(self, stages: tuple[WorkerPart, ...]) -> MoveCost:
        return MoveCost(num_bytes=moving_bytes(tuple(self.costs.values()), self.stages, stages))

    def _best(self, *, true: bool) -> ClusterPlan:
        members = {stage.node for stage in self.stages}
        records = []
        for machine in self.machines.values():
            number = sum(at > self.now - WINDOW_S for at in self.departures.get(machine.name, ()))
            is_trusted = self.now >= machine.joined_at + probation_s(number)
            if true or is_trusted or machine.name in members or len(self.machines) < 2:
                records.append(machine.record(machine.true if true else machine.measured))
        previous = PlanRecord(generation=1, timeline=1, workers=self.stages) if self.stages else None
        plan = make_plan(self.spec, records, previous=previous)
        assert isinstance(plan, ClusterPlan), plan
        return plan

    # --- What it yields -----------------------------------------------------------------------------------------------

    def _train(self) -> None:
        if self.now >= self.paused_until:
            self.outcome.batches += STEP_S * self._rate()
        self.outcome.ideal_batches += STEP_S * self.ideal_rate

    def _rate(self) -> float:
        return 1 / self._batch_seconds(self.stages)

    def _batch_seconds(self, stages: tuple[WorkerPart, ...], *, measured: bool = False) -> float:
        """The slowest stage's work on one batch; a node that has just gone counts as it was."""
        return max(self._stage_seconds(stage, measured=measured) for stage in stages)

    def _stage_seconds(self, stage: WorkerPart, *, measured: bool) -> float:
        machine = self.machines.get(stage.node) or self.gone[stage.node]
        device = Device(kind="cpu", speed=machine.measured if measured else machine.true)
        return sum(self._layer_seconds(self.costs[layer], device) for layer in stage.layers)

    def _layer_seconds(self, cost: LayerCost, device: Device) -> float:
        train = self.spec.train
        return train.microbatches * microbatch_seconds(cost, device, train) + update_seconds(cost, device, train)
