"""Shows how a job's workers spend their time, and one sentence that says why the job is slow. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from headway.daemon.cluster.records import PlanRecord
from headway.daemon.decide.job_view import WAITING, JobView
from headway.daemon.plan.cluster_plan import worker_name

USEFUL: Final = "useful"
LEAST_SHARE: Final = 0.05
"""A smaller share of the recent time is not reported."""

_PEER: Final = re.compile(r"stage (\d+)(?: worker (\d+))?")

_SENTENCES: Final[Mapping[str, str]] = {
    "replay": "spent {share} of the time on recomputing batches after a rollback",
    "bubble": "was idle {share} of the time, because the schedule has a bubble",
    "snapshot": "waited {share} of the time for its snapshot to be written",
    "recovery": "loaded state {share} of the time after a failure",
    "replan": "loaded state {share} of the time for a new plan",
    "idle": "had no plan {share} of the time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGoodput:
    """One worker of the plan in force, over the last minute."""

    stage: int
    """Index of its pipeline stage."""
    node: str
    shares: dict[str, float]
    """Class to its share of the minute: 0 to 1."""
    typical_s: float
    """Median seconds of an operation."""
    name: str = ""
    """`stage 1 on node-3 (replica 2 of 2)`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputReport:
    """The goodput over all workers that are alive, or that died while their daemon lived."""

    useful_share: float | None
    """Useful share of all worker seconds: 0 to 1; None while no worker has reported."""
    seconds: dict[str, float]
    """Seconds by class, the largest first; waiting for a peer is one class, for all peers."""
    stages: tuple[StageGoodput, ...] = ()
    why_slow: str = ""
    num_replayed: int = 0
    """Batches that were recomputed, by the stage that repeated most."""
    num_resumed: int = 0
    """Links that broke and resumed."""


def report_goodput(job: JobView) -> GoodputReport:
    """Return the report of a job; each worker counts once, with its newest record."""
    newest, totals = job.newest_goodput, job.spent_s
    spent = sum(totals.values())
    stages = tuple(_stages(job))
    return GoodputReport(
        useful_share=totals.get(USEFUL, 0.0) / spent if spent > 0 else None,
        seconds=dict(sorted(totals.items(), key=lambda entry: -entry[1])),
        stages=stages,
        why_slow=_why_slow(job, stages),
        num_replayed=max((record.num_replayed for record in newest), default=0),
        num_resumed=sum(record.num_resumed for record in newest),
    )


def goodput_of_plans(job: JobView) -> dict[int, dict[str, float]]:
    """Return the seconds by class of each plan that was in force, by its generation. Their sum is about
    `JobView.spent_s`.

    Seconds that count as recovery only since a rollback are taken back from the plan in which they were another class.
    """
    numbers: list[int] = []
    totals: list[dict[str, float]] = []
    for _, event in sorted(job.events.items()):
        if event.plan is not None:
            numbers.append(event.generation)
            totals.append(event.goodput_s or (totals[-1] if totals else {}))
    found = {}
    after = job.spent_s
    for number, total in zip(reversed(numbers), reversed(totals), strict=True):
        more = {kind: round(spent - total.get(kind, 0.0), 1) for kind, spent in after.items()}
        found[number] = {kind: spent for kind, spent in more.items() if spent > 0}
        after = {kind: min(spent, after.get(kind, 0.0)) for kind, spent in total.items()}
    return {number: found[number] for number in numbers}


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
    workers = job.plan.workers
    for index, positions in enumerate(job.plan.replicas):
        for position in positions:
            record = job.goodput.get((job.plan.generation, position))
            if record is None or (spent := sum(record.recent.values())) <= 0:
                continue
            yield StageGoodput(
                stage=index,
                node=workers[position].node,
                shares={kind: value / spent for kind, value in record.recent.items()},
                typical_s=record.typical_s,
                name=worker_name(workers, position),
            )


def _why_slow(job: JobView, stages: tuple[StageGoodput, ...]) -> str:
    """Return the largest loss of one worker's last minute, apart from useful work; a wait names the peer."""
    losses = [
        (share, entry, kind) for entry in stages for kind, share in entry.shares.items() if kind != USEFUL and share
    ]
    if job.plan is None or not losses:
        return ""
    share, entry, kind = max(losses, key=lambda loss: (loss[0], -loss[1].stage))
    if share < LEAST_SHARE:
        return f"nothing slows the job: no stage lost more than {_percent(share)} of the last minute to anything"
    if kind.startswith(WAITING):
        peer = _peer(kind.removeprefix(WAITING), job.plan)
        return f"{entry.name} waited {_percent(share)} of the time for {peer}"
    told = _SENTENCES.get(kind, f"spent {{share}} of the time on {kind}")
    return f"{entry.name} {told.format(share=_percent(share))}"


def _peer(told: str, plan: PlanRecord) -> str:
    """Return a neighbour with its node, because an address alone (`stage 1 worker 2 at 10.0.0.7:4242`) tells a user
    little.
    """
    found = _PEER.match(told)
    if found is None or int(found[1]) >= plan.num_stages:
        return told
    position = int(found[2]) if found[2] else plan.replicas[int(found[1])][0]
    return worker_name(plan.workers, position) if position < len(plan.workers) else told


def _percent(share: float) -> str:
    return f"{round(100 * share)} %"
