"""A job on nodes that are equally fast, and whose measurements differ all the same: what the judge makes of that.

Each node's layers are timed as a worker does it: medians of the newest samples, told when they have moved by 5 %. The
best cut rests on those; a batch takes what the true speeds and the cut give, whatever was measured.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from headway.daemon.plan.rebalance import MoveCost, Outlook, Promises, judge
from headway.stages.telemetry.layer_times import WINDOW, spread_of

NUM_LAYERS = 24
BATCH_S = 0.1
"""Seconds of a batch on equal nodes, cut evenly."""
BATCHES_PER_SAMPLE = 6
BATCHES_PER_STEP = 10
"""About as many as go by between two progress records."""
MOVED = 0.05


@dataclass(slots=True)
class NoisyNode:
    """A device: how fast it is, and how fast it was measured to be."""

    slowness: float = 1.0
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    told: float = 1.0
    spread: float = 0.0


class NoisyRecuts:
    """`run` so many batches; `cuts` are the batches in which the job moved to another cut."""

    def __init__(self, *, num_nodes: int, noise: float, seed: int, burst: float = 0.0) -> None:
        """noise: of a sample, evenly to both sides. burst: how many times as long samples take on a node that others
        use for a while; the batches do not take longer."""
        self.chance = random.Random(seed)
        self.nodes = [NoisyNode() for _ in range(num_nodes)]
        self.noise, self.burst = noise, burst
        self.shares = [NUM_LAYERS / num_nodes] * num_nodes
        self.promises = Promises().plan_changed(1, factor=0.0, now=0.0)
        self.generation = 1
        self.cuts: list[int] = []
        self._cut_at: list[float] = []
        self.batch = 0
        self.now = 0.0
        self.believes = True
        """True if the judge sees the spread and the results of earlier promises."""
        self._busy: tuple[int, int] = (-1, 0)

    def run(self, num_batches: int, *, until_cut: bool = False) -> None:
        end, before = self.batch + num_batches, len(self.cuts)
        while self.batch < end and not (until_cut and len(self.cuts) > before):
            self._train()
            self._decide()

    def _train(self) -> None:
        batch_s = self._batch_s([node.slowness for node in self.nodes], self.shares)
        for _ in range(BATCHES_PER_STEP):
            self.batch += 1
            self.now += batch_s
            if self.batch % BATCHES_PER_SAMPLE == 0:
                self._sample()
        pace = (1 + self.chance.uniform(-0.1, 0.1)) / batch_s
        self.promises = self.promises.progressed(self.generation, pace)

    def _sample(self) -> None:
        if self.burst and self.batch % 60 == 0:
            self._busy = (self.chance.randrange(len(self.nodes)), self.batch + 40)
        for index, node in enumerate(self.nodes):
            busy = self.burst if self._busy[0] == index and self.batch < self._busy[1] else 1.0
            node.samples.append(node.slowness * busy * (1 + self.chance.uniform(-self.noise, self.noise)))
            seen = median(node.samples)
            if abs(seen / node.told - 1) > MOVED:
                node.told, node.spread = seen, spread_of(node.samples)

    def _decide(self) -> None:
        if any(len(node.samples) < WINDOW for node in self.nodes):
            return
        measured = [node.told for node in self.nodes]
        speed = sum(1 / slowness for slowness in measured)
        best = [round(NUM_LAYERS / slowness / speed) for slowness in measured]
        best[best.index(max(best))] += NUM_LAYERS - sum(best)
        present_s = self._batch_s([node.slowness for node in self.nodes], self.shares)
        outlook = Outlook(
            present_s=present_s,
            best_s=present_s * self._batch_s(measured, best) / self._batch_s(measured, self.shares),
            is_other=best != self.shares,
            batches_left=100_000,
            cost=MoveCost(num_bytes=1_000_000),
            spread=max(node.spread for node in self.nodes) if self.believes else 0.0,
            doubt=self.promises.doubt(self.now) if self.believes else 0.0,
            since_changes=tuple(self.now - at for at in self._cut_at),
        )
        if judge(outlook).is_worth_it:
            self.shares = [float(share) for share in best]
            self.cuts.append(self.batch)
            self._cut_at.append(self.now)
            self.generation += 1
            self.promises = self.promises.plan_changed(self.generation, factor=outlook.factor, now=self.now)
            for node in self.nodes:
                node.samples.clear()

    @staticmethod
    def _batch_s(slowness: Sequence[float], shares: Sequence[float]) -> float:
        return max(each * share for each, share in zip(slowness, shares, strict=True)) * BATCH_S * 2 / NUM_LAYERS
