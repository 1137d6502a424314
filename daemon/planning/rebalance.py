"""Whether a running job moves to a better plan: what that saves against what it costs. Pure.

A move pays when

    (present − best) seconds a batch × batches that the new plan will live  >  MARGIN × (pause + bytes / rate)

The new plan lives until the end of the job, or, where plans have changed of late, as long as those did on average.
Noise moves nothing: less than `WORTH_A_CHANGE`, or `WORTH_A_CUT`, is no gain. A cut takes more where measurements
spread, and right after another one. Every change takes more after one that did not bring what it promised
(promises.py), and going back to the plan that was just left takes a clear gain. After a change comes a rest that grows
with the number of changes of the last minutes, and a node that keeps going is used again only when it has stayed for a
while: a node that flaps costs itself, not the job.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headway.daemon.planning.layer_costs import LayerCost
from headway.daemon.records import StagePlan

WORTH_A_CHANGE: Final = 1.05
"""A plan with another worker must be predicted to be at least this many times faster."""
WORTH_A_CUT: Final = 1.1
"""The same for a plan that only cuts anew what the same workers do: that rests on measurements alone."""
WORTH_A_CUT_MORE: Final = 0.1
"""Added to that for each change within `UNREST_S`: where measurements are noisy, every cut looks better for a while."""
UNREST_S: Final = 60.0
SPREADS: Final = 2.0
"""Added to that: so many times the spread of the measurements that the cut rests on."""
MOST_NOISE: Final = 0.3
"""What the spread may add at most. A cut that should be another one costs every batch until the end; a needless one
costs a second, and what came of it is counted (promises.py)."""
DOUBT_REVIEW_S: Final = 30.0
"""How often a plan that is doubted is looked at again."""
WORTH_GOING_BACK: Final = 1.15
"""The same for the plan that was left last, within `WINDOW_S`."""
MARGIN: Final = 1.5
"""What is saved must be more than this many times what moving costs."""
WINDOW_S: Final = 600.0
"""Changes of plan, and departures of a node, are remembered for so long."""
SHORTEST_REST_S: Final = 2.0
LONGEST_REST_S: Final = 120.0
FIRST_PROBATION_S: Final = 10.0
LONGEST_PROBATION_S: Final = 300.0
DEFAULT_PAUSE_S: Final = 0.5
"""From the last operation before a planned change to the first one after it, until one was measured."""
DEFAULT_BYTES_PER_S: Final = 100e6
"""Of a transfer of state between two nodes, writing and reading included, until one was measured."""
WORTH_SAYING: Final = 1.5
"""A number of a reason must be another by this factor before the reason is told again."""

_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCost:
    """What a planned change takes."""

    num_bytes: int = 0
    """That the busiest worker has to send or to load."""
    bytes_per_s: float = DEFAULT_BYTES_PER_S
    pause_s: float = DEFAULT_PAUSE_S
    """Without the transfer."""

    @property
    def seconds(self) -> float:
        """Of training."""
        return self.pause_s + self.num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a job could gain."""

    present_s: float
    """A batch of the plan in force, by the newest measurements."""
    best_s: float
    """A batch of the best plan, by the same."""
    is_other: bool
    """Whether the best plan gives any worker other layers, groups or depth."""
    brings_workers: bool = False
    """Whether the best plan has a worker that the plan in force has not."""
    goes_back: bool = False
    """Whether the best plan is the one that was left last."""
    batches_left: int
    cost: MoveCost
    spread: float = 0.0
    """By how much the measurements of a layer differ among themselves, relatively; of the least certain worker."""
    doubt: float = 0.0
    """By how much earlier changes missed the factor that they promised."""
    since_changes: tuple[float, ...] = ()
    """Seconds since each change of plan that is known, in any order; older ones than `WINDOW_S` do not matter."""

    @property
    def factor(self) -> float:
        """How many times faster the best plan is predicted to be."""
        return self.present_s / max(self.best_s, 1e-12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """To move or not, and why."""

    is_worth_it: bool
    reason: str
    """A sentence without its full stop."""
    wait_s: float = 0.0
    """In so many seconds the same numbers may give another verdict; 0: never."""
    is_close: bool = False
    """A plan that is clearly faster is not taken: people would like to know why."""


def judge(outlook: Outlook) -> Verdict:
    """Whether the best plan is worth a change."""
    if not outlook.is_other:
        return Verdict(is_worth_it=False, reason="the plan in force is the best there is")
    recent = sorted(since for since in outlook.since_changes if since < WINDOW_S)
    factor = outlook.factor
    faster = f"a plan predicted {_factor(factor)}× faster"
    forgets_in = WINDOW_S - recent[-1] if recent else 0.0
    unrest = [since for since in recent if since < UNREST_S]
    worth_a_cut = WORTH_A_CUT + WORTH_A_CUT_MORE * len(unrest)
    if factor < (needed := WORTH_A_CHANGE if outlook.brings_workers else worth_a_cut):
        calmer_in_s = UNREST_S - unrest[-1] if unrest and factor >= WORTH_A_CUT else 0.0
        return Verdict(is_worth_it=False, reason=f"no plan is predicted to be {needed:g}× faster", wait_s=calmer_in_s)
    noise = 0.0 if outlook.brings_workers else min(SPREADS * outlook.spread, MOST_NOISE)
    if factor < needed + noise:
        return _no(f"{faster} lies within the noise of what was measured")
    if factor < needed + noise + outlook.doubt:
        return _no(f"{faster} is doubted: plans of late did not bring what was predicted", DOUBT_REVIEW_S)
    if outlook.goes_back and recent and factor < WORTH_GOING_BACK:
        left_for_s = WINDOW_S - recent[0]
        return _no(f"{faster} is the one that was left last, which takes {WORTH_GOING_BACK:g}×", left_for_s)
    cost_s = outlook.cost.seconds
    horizon_s = outlook.batches_left * outlook.best_s
    plan_life_s = WINDOW_S / len(recent) if recent else horizon_s
    saved_s = (factor - 1) * min(horizon_s, plan_life_s)
    if saved_s <= cost_s * MARGIN:
        is_unrest = plan_life_s < horizon_s
        over = f"until plans change again, {_times(len(recent))} of late" if is_unrest else "over the batches left"
        why = f"{faster} would save {_seconds(saved_s)} {over}, and moving costs {_seconds(cost_s)}"
        return _no(why, forgets_in if is_unrest else 0.0)
    rest_left_s = rest_s(cost_s, len(recent)) - recent[0] if recent else 0.0
    if rest_left_s > 0:
        return _no(f"{faster} waits for some rest, after {_times(len(recent))} of change of late", rest_left_s)
    return Verdict(
        is_worth_it=True,
        reason=f"saves {_seconds(saved_s)} for {_seconds(cost_s)} of moving",
    )


def is_news(before: str, after: str) -> bool:
    """Whether a verdict's reason is worth telling after another: what a measurement's noise or one more batch makes of
    it is not."""
    if _NUMBER.sub("", before) != _NUMBER.sub("", after):
        return True
    pairs = zip(map(float, _NUMBER.findall(before)), map(float, _NUMBER.findall(after)), strict=True)
    return any(max(pair) >= WORTH_SAYING * min(pair) for pair in pairs)


def rest_s(cost_s: float, num_changes: int) -> float:
    """How long the last of so many recent changes is followed by no other: a change more, a change's cost longer."""
    return min(max(cost_s * num_changes, SHORTEST_REST_S), LONGEST_REST_S)


def probation_s(num_departures: int) -> float:
    """How long a node that went so often within `WINDOW_S` must have been there before a running job moves to it."""
    if num_departures < 2:
        return 0.0  # once may happen to anybody
    return float(min(FIRST_PROBATION_S * 3 ** (num_departures - 2), LONGEST_PROBATION_S))


def moving_bytes(costs: Sequence[LayerCost], before: Sequence[StagePlan], after: Sequence[StagePlan]) -> int:
    """Bytes of state that the busiest worker has to send or to load for a change of plan.

    Workers load at the same time; a layer is sent by the first worker that has it.
    """
    of = {cost.name: cost.state_bytes for cost in costs}
    sent: dict[tuple[str, int], int] = {}
    loaded: dict[tuple[str, int], int] = {}
    has = {(worker, layer) for worker, layer in _held(before)}
    owner = {layer: worker for worker, layer in reversed(list(_held(before)))}
    for worker, layer in _held(after):
        if (worker, layer) not in has:
            loaded[worker] = loaded.get(worker, 0) + of[layer]
            if layer in owner:
                sent[owner[layer]] = sent.get(owner[layer], 0) + of[layer]
    return max((*loaded.values(), *sent.values()), default=0)


def is_same(one: Sequence[StagePlan], other: Sequence[StagePlan]) -> bool:
    """Whether two plans give the same workers the same layers and groups; depths may differ."""
    return [_part(worker) for worker in one] == [_part(worker) for worker in other]


def is_depth_alone(one: Sequence[StagePlan], other: Sequence[StagePlan]) -> bool:
    """Whether two plans differ in nothing but how many microbatches may be in flight: the links have changed."""
    return is_same(one, other) and [worker.depth for worker in one] != [worker.depth for worker in other]


def _part(worker: StagePlan) -> tuple[object, ...]:
    return worker.node, worker.node_incarnation, worker.device_index, worker.layers, worker.groups


def _held(stages: Iterable[StagePlan]) -> Iterable[tuple[tuple[str, int], str]]:
    return (((stage.node, stage.device_index), layer) for stage in stages for layer in stage.layers)


def _no(reason: str, wait_s: float = 0.0) -> Verdict:
    return Verdict(is_worth_it=False, reason=reason, wait_s=wait_s, is_close=True)


def _factor(factor: float) -> str:
    """Coarse, so that noise does not make another sentence of it."""
    return f"{factor:.2g}" if factor < 10 else f"{factor:.0f}"


def _seconds(seconds: float) -> str:
    """One digit, for the same reason."""
    return f"{float(f'{seconds:.1g}'):g} s"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
