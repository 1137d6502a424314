"""Decides whether a running job moves to a better plan: the time saved against the cost. Pure.

A move pays when

    (present − best) seconds a batch × batches that the new plan will live  >  MARGIN × (pause + bytes / rate)

The new plan lives until the end of the job or, if plans have changed recently, as long as those did on average. Noise
moves nothing: less than `WORTH_A_CHANGE`, or `WORTH_A_CUT`, is no gain. A cut needs more gain if measurements spread,
and right after another cut. Every change needs more gain after one that missed its promise (`Promises`). Going back to
the plan that was just left needs a clear gain. After a change comes a rest that grows with the number of recent
changes. A node that leaves often is used again only when it has stayed for a while: it costs itself, not the job.

A plan is predicted by measured times, and noisy times make every other cut look better for a while. So the job's pace
under a new plan is compared with its pace before. The shortfall is doubt, which the next change must overcome in
addition to the usual threshold. Doubts add up, and fade with time.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from headway.daemon.cluster.records import WorkerPart
from headway.daemon.plan.layer_costs import LayerCost

WORTH_A_CHANGE: Final = 1.05
"""Minimum predicted speed-up of a plan with another worker."""
WORTH_A_CUT: Final = 1.1
"""Minimum predicted speed-up of a plan that only cuts the present workers' layers differently, by
measurements alone.
"""
WORTH_A_CUT_MORE: Final = 0.1
"""Addition for each change within `UNREST_S`: with noisy measurements, every cut looks better for a while."""
UNREST_S: Final = 60.0
SPREADS: Final = 2.0
"""Addition: this multiple of the spread of the measurements behind the cut."""
MOST_NOISE: Final = 0.3
"""Maximum addition for the spread. A missed good cut costs every batch until the end. A needless cut costs a second,
and its result is counted (`Promises`).
"""
DOUBT_REVIEW_S: Final = 30.0
"""Interval at which a doubted plan is reviewed."""
WORTH_GOING_BACK: Final = 1.15
"""Minimum predicted speed-up of the plan that was left last, within `WINDOW_S`."""
MARGIN: Final = 1.5
"""The saved time must exceed this multiple of the cost."""
WINDOW_S: Final = 600.0
"""Time for which changes of plan, and departures of a node, are remembered."""
SHORTEST_REST_S: Final = 2.0
LONGEST_REST_S: Final = 120.0
FIRST_PROBATION_S: Final = 10.0
LONGEST_PROBATION_S: Final = 300.0
DEFAULT_PAUSE_S: Final = 0.5
"""Pause from the last operation before a planned change to the first after it, until one was measured."""
DEFAULT_BYTES_PER_S: Final = 100e6
"""Rate of a transfer of state between two nodes, with writing and reading, until one was measured."""
WORTH_SAYING: Final = 1.5
"""A number of a reason must change by this factor before the reason is reported again."""

_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCost:
    """The cost of a planned change."""

    num_bytes: int = 0
    """Bytes that the busiest worker has to send or to load."""
    bytes_per_s: float = DEFAULT_BYTES_PER_S
    pause_s: float = DEFAULT_PAUSE_S
    """Pause without the transfer."""

    @property
    def seconds(self) -> float:
        """Return seconds of training lost."""
        return self.pause_s + self.num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The possible gain of a job."""

    present_s: float
    """Seconds of a batch of the plan in force, by the newest measurements."""
    best_s: float
    """Seconds of a batch of the best plan, by the newest measurements."""
    is_other: bool
    """True if the best plan gives any worker other layers, groups or depth."""
    brings_workers: bool = False
    """True if the best plan has a worker that the plan in force has not."""
    goes_back: bool = False
    """True if the best plan is the plan that was left last."""
    batches_left: int
    cost: MoveCost
    spread: float = 0.0
    """Relative spread of the measurements of a layer; of the least certain worker."""
    doubt: float = 0.0
    """Factor by which earlier changes missed their promise."""
    since_changes: tuple[float, ...] = ()
    """Seconds since each known change of plan, in any order; changes older than `WINDOW_S` do not matter."""

    @property
    def factor(self) -> float:
        """Return the predicted speed-up of the best plan."""
        return self.present_s / max(self.best_s, 1e-12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision to move or not, and its reason."""

    is_worth_it: bool
    reason: str
    """A sentence without its full stop."""
    wait_s: float = 0.0
    """Seconds after which time alone may change the verdict; 0: never."""
    is_close: bool = False
    """True if a clearly faster plan is not taken: people want to know why."""


def judge(outlook: Outlook) -> Verdict:
    """Decide whether the best plan is worth a change."""
    if not outlook.is_other:
        return Verdict(is_worth_it=False, reason="the plan in force is the best there is")
    recent = sorted(since for since in outlook.since_changes if since < WINDOW_S)
    factor = outlook.factor
    faster = f"a plan predicted {_factor(factor)}× faster"
    forgets_in = WINDOW_S - recent[-1] if recent else 0.0
    unrest = [since for since in recent if since < UNREST_S]
    # Each recent change raises the bar, so that a job on a restless cluster trains instead of moving.
    worth_a_cut = WORTH_A_CUT + WORTH_A_CUT_MORE * len(unrest)
    if factor < (needed := WORTH_A_CHANGE if outlook.brings_workers else worth_a_cut):
        calmer_in_s = UNREST_S - unrest[-1] if unrest and factor >= WORTH_A_CUT else 0.0
        return Verdict(is_worth_it=False, reason=f"no plan is predicted to be {needed:g}× faster", wait_s=calmer_in_s)
    # New workers are a gain by themselves; with the same workers, a faster plan may be noise.
    noise = 0.0 if outlook.brings_workers else min(SPREADS * outlook.spread, MOST_NOISE)
    if factor < needed + noise:
        return _no(f"{faster} lies within the noise of the measurements")
    if factor < needed + noise + outlook.doubt:
        return _no(f"{faster} is not tried now: the last ones gained less than predicted", DOUBT_REVIEW_S)
    if outlook.goes_back and recent and factor < WORTH_GOING_BACK:
        left_for_s = WINDOW_S - recent[0]
        return _no(f"{faster} is the previous plan: going back needs {WORTH_GOING_BACK:g}×", left_for_s)
    cost_s = outlook.cost.seconds
    horizon_s = outlook.batches_left * outlook.best_s
    # If plans keep changing, the gain lasts only until the next change.
    plan_life_s = WINDOW_S / len(recent) if recent else horizon_s
    saved_s = (factor - 1) * min(horizon_s, plan_life_s)
    if saved_s <= cost_s * MARGIN:
        is_unrest = plan_life_s < horizon_s
        over = (
            f"until plans change again ({_times(len(recent))} recently)" if is_unrest else "over the remaining batches"
        )
        why = f"{faster} would save {_seconds(saved_s)} {over}, and moving costs {_seconds(cost_s)}"
        return _no(why, forgets_in if is_unrest else 0.0)
    rest_left_s = rest_s(cost_s, len(recent)) - recent[0] if recent else 0.0
    if rest_left_s > 0:
        return _no(f"{faster} waits for a rest, because plans changed {_times(len(recent))} recently", rest_left_s)
    return Verdict(
        is_worth_it=True,
        reason=f"saves {_seconds(saved_s)}, costs {_seconds(cost_s)}",
    )


def is_news(before: str, after: str) -> bool:
    """Return whether a verdict's reason is worth reporting after another: noise and one more batch make no news."""
    if _NUMBER.sub("", before) != _NUMBER.sub("", after):
        return True
    pairs = zip(map(float, _NUMBER.findall(before)), map(float, _NUMBER.findall(after)), strict=True)
    return any(max(pair) >= WORTH_SAYING * min(pair) for pair in pairs)


def rest_s(cost_s: float, num_changes: int) -> float:
    """Return the minimum time between the last change and the next: it grows with the number of changes and
    their cost.
    """
    return min(max(cost_s * num_changes, SHORTEST_REST_S), LONGEST_REST_S)


def probation_s(num_departures: int) -> float:
    """Return how long a node that left so often within `WINDOW_S` must stay before a running job moves to it."""
    if num_departures < 2:
        return 0.0  # one departure may happen to any node
    return float(min(FIRST_PROBATION_S * 3 ** (num_departures - 2), LONGEST_PROBATION_S))


def moving_bytes(costs: Sequence[LayerCost], before: Sequence[WorkerPart], after: Sequence[WorkerPart]) -> int:
    """Return the bytes of state that the busiest worker has to send or to load for a change of plan.

    Workers load in parallel; a layer is sent by the first worker that has it.
    """
    of = {cost.name: cost.loaded_bytes for cost in costs}
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


def is_same(one: Sequence[WorkerPart], other: Sequence[WorkerPart]) -> bool:
    """Return whether two plans give every worker equal layers, groups, recomputation and part of the update; depths may
    differ.
    """
    return [_part(worker) for worker in one] == [_part(worker) for worker in other]


def is_depth_alone(one: Sequence[WorkerPart], other: Sequence[WorkerPart]) -> bool:
    """Return whether two plans differ only in how many microbatches may be in flight: the links have changed."""
    return is_same(one, other) and [worker.depth for worker in one] != [worker.depth for worker in other]


def _part(worker: WorkerPart) -> tuple[object, ...]:
    place = worker.node, worker.node_incarnation, worker.device_index
    return *place, worker.layers, worker.groups, worker.recompute, worker.shares_update


def _held(stages: Iterable[WorkerPart]) -> Iterable[tuple[tuple[str, int], str]]:
    return (((stage.node, stage.device_index), layer) for stage in stages for layer in stage.layers)


def _no(reason: str, wait_s: float = 0.0) -> Verdict:
    return Verdict(is_worth_it=False, reason=reason, wait_s=wait_s, is_close=True)


def _factor(factor: float) -> str:
    """Return a coarse number, so that noise does not change the sentence."""
    return f"{factor:.2g}" if factor < 10 else f"{factor:.0f}"


def _seconds(seconds: float) -> str:
    """Return one digit, so that noise does not change the sentence."""
    return f"{float(f'{seconds:.1g}'):g} s"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


MEMORY_S: Final = 1800.0
"""Time in which a broken promise is forgotten, evenly."""
NUM_PACES: Final = 16
"""Number of progress records in the median of a pace: about one comes every second."""
LEAST_PACES: Final = 4
"""Minimum number of records that give a pace: a pipe fills first."""
MAX_PROMISES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """One planned change."""

    generation: int
    at: float
    factor: float
    """Factor by which the new plan was predicted to be faster."""
    before: float
    """Tokens a second before the change."""
    after: float = 0.0
    """Tokens a second under the new plan; 0: not known yet."""

    @property
    def shortfall(self) -> float:
        """Return by how much the factor was missed; 0: it was reached, or is unknown."""
        return max(0.0, self.factor - max(self.after / self.before, 1.0)) if self.after else 0.0


@dataclass(frozen=True, slots=True)
class Promises:
    """The promises of one job, as far as its plans were seen to change."""

    generation: int = 0
    """Generation of the plan in force."""
    paces: tuple[float, ...] = ()
    """Tokens a second under it, from its newest progress records."""
    made: tuple[Promise, ...] = ()

    def plan_changed(self, generation: int, *, factor: float, now: float) -> "Promises":
        """Note a new plan in force. factor: its promise; 0: none, because the change was forced."""
        made = self.made
        if factor > 0 and len(self.paces) >= LEAST_PACES:
            promise = Promise(generation=generation, at=now, factor=factor, before=median(self.paces))
            made = (*made, promise)[-MAX_PROMISES:]
        return Promises(generation, (), made)

    def progressed(self, generation: int, tokens_per_second: float) -> "Promises":
        """Note a progress record."""
        if generation != self.generation or tokens_per_second <= 0:
            return self
        paces = (*self.paces, tokens_per_second)[-NUM_PACES:]
        made = self.made
        if made and made[-1].generation == generation and len(paces) >= LEAST_PACES:
            made = (*made[:-1], replace(made[-1], after=median(paces)))
        return Promises(generation, paces, made)

    def doubt(self, now: float) -> float:
        """Return the gain that the next change must promise in addition to the usual threshold."""
        return doubt([(now - promise.at, promise.shortfall) for promise in self.made])


def doubt(shortfalls: Sequence[tuple[float, float]]) -> float:
    """Return the doubt of (seconds since a change, by how much it missed its factor)."""
    return sum(missed * max(0.0, 1 - since / MEMORY_S) for since, missed in shortfalls)
