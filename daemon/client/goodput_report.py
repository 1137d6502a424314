"""What a job's workers spend their time on, and the one sentence that says why it is slow. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from headway.daemon.coordination.cluster_view import JobView
from headway.daemon.records import GoodputRecord, PlanRecord

USEFUL: Final = "useful"
WAITING: Final = "waiting:"
LEAST_SHARE: Final = 0.05
"""A smaller share of the recent time is nothing to speak of."""

_PEER_STAGE: Final = re.compile(r"stage (\d+)")

_SENTENCES: Final[Mapping[str, str]] = {
    "replay": "computed batches again {share} of the time, after a rollback",
    "bubble": "had nothing to compute {share} of the time, because the schedule lets the pipeline run empty",
    "snapshot": "waited {share} of the time for its snapshot to be written",
    "recovery": "loaded state {share} of the time, after a failure",
    "replan": "loaded state {share} of the time, for a new plan",
    "idle": "had no plan {share} of the time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGoodput:
    """One stage of the plan in force, over the last minute."""

    stage: int
    node: str
    shares: dict[str, float]
    """By class, of that time: 0 to 1."""
    typical_s: float
    """Median seconds of an operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputReport:
    """Over all workers that are alive or died beside a living daemon."""

    useful_share: float | None
    """Of all their seconds: 0 to 1; None while no worker has told anything."""
    seconds: dict[str, float]
    """By class, the largest first; waiting for a peer is one class, whichever peer."""
    stages: tuple[StageGoodput, ...] = ()
    why_slow: str = ""
    num_replayed: int = 0
    """Batches computed again, by the stage that repeated most."""
    num_resumed: int = 0
    """Links that broke and went on."""


def report_goodput(job: JobView) -> GoodputReport:
    """The report of a job; each worker counts once, with its newest record."""
    newest: dict[str, GoodputRecord] = {}
    for _, record in sorted(job.goodput.items()):
        newest[record.incarnation] = record
    totals: dict[str, float] = {}
    for record in newest.values():
        for kind, value in record.seconds.items():
            merged = "waiting" if kind.startswith(WAITING) else kind
            totals[merged] = totals.get(merged, 0.0) + value
    spent = sum(totals.values())
    stages = tuple(_stages(job))
    return GoodputReport(
        useful_share=totals.get(USEFUL, 0.0) / spent if spent > 0 else None,
        seconds=dict(sorted(totals.items(), key=lambda entry: -entry[1])),
        stages=stages,
        why_slow=_why_slow(job.plan, stages),
        num_replayed=max((record.num_replayed for record in newest.values()), default=0),
        num_resumed=sum(record.num_resumed for record in newest.values()),
    )


def goodput_line(report: GoodputReport) -> str:
    """`goodput 93 % · waiting 4 % · replay 2 %`; empty while nothing is known."""
    if report.useful_share is None:
        return ""
    spent = sum(report.seconds.values())
    others = [(kind, value / spent) for kind, value in report.seconds.items() if kind != USEFUL]
    parts = [f"{kind} {_percent(share)}" for kind, share in others if share >= 0.005]
    return " · ".join([f"goodput {_percent(report.useful_share)}", *parts])


def _stages(job: JobView) -> Iterable[StageGoodput]:
    if job.plan is None:
        return
    for index, stage in enumerate(job.plan.stages):
        record = job.goodput.get((job.plan.generation, index))
        if record is None or (spent := sum(record.recent.values())) <= 0:
            continue
        shares = {kind: value / spent for kind, value in record.recent.items()}
        yield StageGoodput(stage=index, node=stage.node, shares=shares, typical_s=record.typical_s)


def _why_slow(plan: PlanRecord | None, stages: tuple[StageGoodput, ...]) -> str:
    """What takes the largest share of one stage's last minute, beside useful work; who is waited for has a name."""
    losses = [
        (share, entry, kind) for entry in stages for kind, share in entry.shares.items() if kind != USEFUL and share
    ]
    if plan is None or not losses:
        return ""
    share, entry, kind = max(losses, key=lambda loss: (loss[0], -loss[1].stage))
    if share < LEAST_SHARE:
        return f"nothing slows it: no stage lost more than {_percent(share)} of the last minute to anything"
    who = f"stage {entry.stage} on {entry.node}"
    if kind.startswith(WAITING):
        return f"{who} waited {_percent(share)} of the time for {_peer(kind.removeprefix(WAITING), plan)}"
    told = _SENTENCES.get(kind, f"spent {{share}} of the time on {kind}")
    return f"{who} {told.format(share=_percent(share))}"


def _peer(told: str, plan: PlanRecord) -> str:
    """A neighbour with its node; its address alone tells nobody anything."""
    found = _PEER_STAGE.match(told)
    if found is None or int(found[1]) >= len(plan.stages):
        return told
    return f"stage {found[1]} on {plan.stages[int(found[1])].node}"


def _percent(share: float) -> str:
    return f"{round(100 * share)} %"
