"""The report of a job: one value made from its records. Pure; `--json` prints it unchanged."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from headway.daemon.cluster.records import (
    VANISHED,
    NodeRecord,
    Phase,
    PlanRecord,
    WorkerState,
    job_ailment,
)
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.failures import awaited_pair
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.waiting import queue
from headway.daemon.jobs.data_choices import epoch_of
from headway.daemon.jobs.job import PLUGINS, JobSpec, shares_text
from headway.daemon.plan.cluster_plan import worker_name
from headway.daemon.plan.link_choice import PlannedLink, linked_pairs, neighbours, planned_links
from headway.daemon.reports.goodput_report import GoodputReport, report_goodput
from headway.daemon.reports.metrics_file import AT_THE_END
from headway.daemon.reports.safety_report import SafetyReport, report_safety


def arithmetic_settings(spec: JobSpec) -> str:
    """Return the sentence, from the job's record alone: what was left open is decided there."""
    train, matrices = spec.train, spec.optim.matrices
    masters = " with float32 masters" if train.dtype == "bfloat16" else ""
    parts = [f"computes in {train.dtype}{masters}"]
    if matrices.kind.newton_schulz:
        by = " by Polar Express" if matrices.newton_schulz_coefficients == "polar_express" else ""
        parts.append(f"Newton–Schulz in {matrices.newton_schulz_dtype}{by}")
    if (narrow := _narrow_state(spec)) != "":
        parts.append(f"{narrow} kept in bfloat16")
    parts.append(f"attention by {_kernel(train.attention_backend)}")
    if train.loss_chunk:
        product = ", one product for their matrix' gradient" if train.loss_gradient == "whole" else ""
        parts.append(f"logits of {train.loss_chunk} tokens at once{product}")
    if train.compile:
        parts.append("compiled layers")
    parts += [f"TF32 {'on' if train.allow_tf32 else 'off'}", _threads(train.threads)]
    return f"{', '.join(parts)}; all algorithms are deterministic"


def _kernel(backend: str) -> str:
    return "the kernel that torch chooses" if backend == "auto" else backend


def _narrow_state(spec: JobSpec) -> str:
    """Return which parts of the optimizers' state wait in bfloat16."""
    narrow = []
    if any(group.momentum_dtype == "bfloat16" for group in (spec.optim.matrices, spec.optim.rest)):
        narrow.append("momentum")
    if spec.optim.error_feedback_dtype == "bfloat16" and spec.optim.error_feedback * spec.train.delay > 0:
        narrow.append("error feedback")
    return " and ".join(narrow)


def _threads(number: int) -> str:
    return "1 thread per worker" if number == 1 else f"{number} threads per worker"


AT_WORK = (Phase.RUNNING, Phase.CHANGING, Phase.STOPPING)


def link_waits(view: ClusterView, job: JobView) -> list[str]:
    """Return sentences, the most telling first; empty while the job waits for no link."""
    found = _unreached(job, job.next) if job.next is not None else []
    plan = job.plan
    if plan is not None and job.phase.phase in AT_WORK:
        ways = view.blocked.between(linked_pairs(plan.workers, trains_tie=job.trains_tie))
        found += [f"a link of the plan could not be reopened: {way}" for way in ways.ways]
        if pair := awaited_pair(job, plan):
            waiting, awaited = (worker_name(plan.workers, position) for position in pair)
            found.append(f"no progress: {waiting} waits for {awaited}")
    return found


def _unreached(job: JobView, plan: PlanRecord) -> list[str]:
    """Return the neighbours of a prepared plan that are both ready and have not reached each other yet."""
    workers = job.workers_of(plan)
    return [
        f"waiting for {worker_name(plan.workers, position)} to reach {worker_name(plan.workers, other)} "
        f"at {workers[other].address}"
        for position, worker in sorted(workers.items())
        if worker.state is WorkerState.READY
        for other in neighbours(plan.workers, position, trains_tie=job.trains_tie)
        if other not in worker.proven and other in workers and workers[other].state is WorkerState.READY
    ][:3]


SCHEMA_VERSION = 1
NO_FASTER_PLAN = "no other plan is predicted to be clearly faster"
WORTH_TELLING = 8
"""Batches of a plan, and of those with a delay, from which on its pace says when the job ends: before that, the pipe
fills, or drains after each batch.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One worker of the plan in force, or of the next."""

    index: int
    """Index of its stage."""
    node: str
    device: int
    layers: tuple[str, ...]
    depth: int
    worker: str
    """The worker's state: `ready`, `running`, `stopped`, `failed`; empty while it has reported nothing."""
    replica: int = 1
    """Number of the replica within its stage, from 1."""
    num_replicas: int = 1
    groups: tuple[int, ...] = ()
    """Reduction groups whose microbatches the worker computes; empty: all."""
    recompute: str = ""
    """What its backward computes again, if the plan has chosen that: none, attention, block."""

    @property
    def name(self) -> str:
        """`stage 1 on node-3`, or `stage 1 on node-3 (replica 2 of 2)`."""
        note = f" (replica {self.replica} of {self.num_replicas})" if self.num_replicas > 1 else ""
        return f"stage {self.index} on {self.node}{note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """The state of a job. Absent numbers are None."""

    schema: int = SCHEMA_VERSION
    name: str
    phase: str
    desired: str
    reason: str
    error: str
    generation: int
    timeline: int | None
    batch: int | None
    """Last batch whose loss is known."""
    batches: int
    epoch: int | None = None
    """Epoch of `batch`, from 1, exact to one batch; None: the job does not count epochs, or no loss is known."""
    epochs: int = 0
    """Number of epochs that the job has; 0: its file says `batches`."""
    loss: float | None
    """Loss of `batch`."""
    eval_batch: int | None = None
    """Last batch that began with an evaluation."""
    eval_loss: float | None = None
    """Its loss on held-out text, of the weights that it was computed on."""
    has_perplexity: bool = True
    """Whether that is a mean cross entropy: no loss of pairs, and none of a plug-in."""
    final_eval_loss: float | None = None
    """Loss on held-out text of the last update's weights; None: there are more batches, or no evaluations."""
    may_stop_early: bool = False
    """Whether evaluations may end the job before its last batch."""
    stopped_early_at: int | None = None
    """Boundary at which evaluations have ended the job; None: they have not."""
    tokens_per_second: float | None
    """Measured under the plan in force: the median of the newest progress records that are known."""
    predicted_tokens_per_second: float | None = None
    """What the planner promised of the plan in force; None: it did not know."""
    seconds_left: float | None
    """Time to the last batch; evaluations may end the job before it. None: not known, also while the plan in force has
    done fewer than WORTH_TELLING batches, or fewer of those with a delay.
    """
    exact: bool | None
    exact_reason: str
    plan_reason: str
    """Reason of the plan in force."""
    layers: tuple[str, ...]
    stages: tuple[StageReport, ...]
    next_stages: tuple[StageReport, ...]
    checkpoint_boundary: int | None
    checkpoint_url: str
    submitted_at: float
    since: float
    planning_since: float = 0.0
    """Seconds since the epoch; 0: the job waits for no plan to be computed."""
    codecs: tuple[str, ...] = ()
    """Codecs of the plan in force or the next, as in PlanRecord."""
    coded_cuts: tuple[str, ...] = ()
    """Value for `headway reference --coded-cuts` that gives the bits of a run under this plan alone."""
    no_better_plan: str = ""
    """Reason why no other plan is taken while the job runs."""
    parent: str = ""
    """Parent of the job, as in SpecRecord."""
    provisional_from: int | None = None
    """First batch that would be recomputed if a node were lost now."""
    safety: SafetyReport = field(default_factory=SafetyReport)
    links: tuple[PlannedLink, ...] = ()
    """Links of the plan in force or the next, each with its kind and the reason for it."""
    goodput: GoodputReport = field(default_factory=lambda: GoodputReport(useful_share=None, seconds={}))
    ailments: tuple[str, ...] = ()
    """Faults on the nodes of its plan, and whatever keeps the leader from deciding about the job."""
    waits: tuple[str, ...] = ()
    """Sentences that name the neighbours that wait for each other, and the pairs that cannot talk."""
    user: str = ""
    """User to whose share of the cluster the job counts."""
    priority: int = 0
    queue_position: int | None = None
    """Position among the jobs that wait for devices, from 1; None: the job does not wait."""
    queue_length: int = 0
    arithmetic: str = ""
    """Dtypes, kernels and what is deterministic, in a sentence."""
    data: str = ""
    """Several data sources with their shares; empty: there is one."""
    schedule: str = ""
    """`2bw`, `1f1b` or `gpipe`: of `auto` the one that was chosen."""


def report_job(job: JobView, nodes: Mapping[str, NodeRecord]) -> JobReport:
    """Return the report of a job whose spec is known, with the nodes that are up."""
    spec = job.spec
    assert spec is not None, "a job without its spec is not shown"
    phase, progress, plan = job.phase, job.progress, job.plan
    batch = _newest_batch(job)
    told, rate = plan or job.next, _rate(job)
    is_exact, exact_reason = _exactness(job)
    safety = report_safety(job, nodes, batch=batch)
    evaluation = progress.evaluations[-1] if progress and progress.evaluations else None
    return JobReport(
        name=job.name,
        phase=phase.phase.value,
        desired=job.desired.state.value,
        reason=phase.reason,
        error=phase.error,
        generation=plan.generation if plan else phase.generation,
        timeline=plan.timeline if plan else None,
        batch=batch,
        batches=spec.train.batches,
        epoch=None if batch is None else epoch_of(spec.train, batch),
        epochs=spec.train.epochs,
        loss=progress.loss if progress and progress.batch == batch else None,
        eval_batch=evaluation[0] if evaluation else None,
        eval_loss=evaluation[1] if evaluation else None,
        has_perplexity=not (spec.train.has_own_loss or spec.train.learns_preferences),
        final_eval_loss=progress.final_eval_loss if progress and progress.batch == batch else None,
        may_stop_early=spec.train.stops_early,
        stopped_early_at=_early_end(job),
        tokens_per_second=rate,
        predicted_tokens_per_second=_promise(job, spec),
        seconds_left=_seconds_left(job, spec, batch, rate),
        exact=is_exact,
        exact_reason=exact_reason,
        arithmetic=arithmetic_settings(spec),
        data=shares_text(spec.data),
        schedule=spec.train.schedule,
        plan_reason=told.reason if told else "",
        layers=spec.layers,
        stages=_stages(job, plan),
        next_stages=_stages(job, job.next),
        checkpoint_boundary=job.checkpoint.boundary if job.checkpoint else None,
        checkpoint_url=job.checkpoint.url if job.checkpoint else "",
        submitted_at=job.submission.submitted_at if job.submission else 0.0,
        since=phase.since,
        planning_since=phase.planning_since,
        codecs=told.codecs if told else (),
        coded_cuts=told.coded_cuts if told else (),
        no_better_plan=(phase.outlook or NO_FASTER_PLAN) if phase.phase is Phase.RUNNING else "",
        parent=job.submission.parent if job.submission else "",
        provisional_from=max(0, batch + 1 - safety.lag) if batch is not None and safety.lag else None,
        safety=safety,
        links=planned_links(spec, told, nodes) if told else (),
        goodput=report_goodput(job),
        ailments=ailments_of(job, nodes),
        user=job.user,
        priority=job.priority,
    )


def _seconds_left(job: JobView, spec: JobSpec, batch: int | None, rate: float | None) -> float | None:
    """Return the time to the last batch at this rate; None: it says nothing of the rest yet."""
    if job.phase.phase is Phase.FINISHED:
        return 0.0
    if job.plan is None or batch is None or not rate:
        return None
    if batch - max(job.plan.boundary, spec.train.sync_batches) < WORTH_TELLING:
        return None
    return max(0, spec.train.batches - 1 - batch) * spec.train.tokens_per_batch / rate


def _promise(job: JobView, spec: JobSpec) -> float | None:
    """Return the tokens a second that the plan in force promised; None: nothing."""
    predicted_s = job.plan.predicted_batch_seconds if job.plan is not None else 0.0
    return spec.train.tokens_per_batch / predicted_s if predicted_s else None


def _rate(job: JobView) -> float | None:
    """Return the tokens a second of the plan in force; None: it has reported no batch."""
    if job.progress is None or job.plan is None:
        return None
    paces = job.promises.paces if job.promises.generation == job.plan.generation else ()
    return median(paces or (job.progress.tokens_per_second,))


def reports_in(view: ClusterView, jobs: Iterable[JobView]) -> list[JobReport]:
    """Return the reports of several jobs in a view."""
    places = places_in(view)
    return [report_in(view, job, places) for job in jobs]


def places_in(view: ClusterView) -> dict[str, int]:
    """Return the place of each waiting job in the queue, from 1."""
    return {job.name: place for place, job in enumerate(queue(view, now=view.usage.at or 0.0), start=1)}


def report_in(view: ClusterView, job: JobView, places: Mapping[str, int] | None = None) -> JobReport:
    """Return the report of a job in a view, with its place in the queue and what blocks a decision about it.

    places: as of `places_in`, for who asks of many jobs.
    """
    places = places_in(view) if places is None else places
    report, why = report_job(job, view.nodes), view.why_set_aside(job.name)
    report = replace(report, waits=tuple(link_waits(view, job)))
    if job.name in places:
        report = replace(report, queue_position=places[job.name], queue_length=len(places))
    return (
        replace(report, ailments=(f"the coordinator cannot decide about this job: {why}", *report.ailments))
        if why
        else report
    )


def _newest_batch(job: JobView) -> int | None:
    batch = job.progress.batch if job.progress else None
    if job.checkpoint is not None and job.checkpoint.boundary:
        return max(batch if batch is not None else -1, job.checkpoint.boundary - 1)
    return batch


def _early_end(job: JobView) -> int | None:
    """Return the boundary at which a job has finished before its last batch; None: it has not."""
    if job.phase.phase is not Phase.FINISHED or job.checkpoint is None or job.spec is None:
        return None
    return job.checkpoint.boundary if job.checkpoint.boundary < job.spec.train.batches else None


def ailments_of(job: JobView, nodes: Mapping[str, NodeRecord]) -> tuple[str, ...]:
    """Return faults of the job first, then of its plan's nodes."""
    mine = job_ailment(job.name)
    names = dict.fromkeys(stage.node for plan in (job.plan, job.next) if plan is not None for stage in plan.workers)
    of_job = [node.ailments[mine] for node in nodes.values() if mine in node.ailments]
    if job.spec is not None and job.spec.plugins.sha256:
        told = (job.spec.plugins.why_not_on(node.name, ("any",), node.ailments) for node in nodes.values())
        of_job += filter(None, told)
    of_nodes = [
        f"node {name}: {what} {sentence}"
        for name in names
        if name in nodes
        for what, sentence in nodes[name].ailments.items()
        if not what.startswith((job_ailment(""), VANISHED, PLUGINS))
    ]
    return (*of_job, *of_nodes)


def _exactness(job: JobView) -> tuple[bool | None, str]:
    """Return whether the job's bits equal the plain loop's, and why, from its plan or its checkpoint; None: unknown."""
    told = job.plan or job.next
    if told is not None:
        return told.is_exact, told.exact_reason
    checkpoint = job.checkpoint
    if checkpoint is None or not (classes := checkpoint.arithmetic_classes):
        return None, ""
    if checkpoint.was_rounded:
        return False, "wire compression has rounded what some of its links carried"
    if len(classes) == 1:
        return True, f"all its workers had one arithmetic class ({classes[0]})"
    return False, f"it ran on several arithmetic classes: {'; '.join(classes)}"


def _stages(job: JobView, plan: PlanRecord | None) -> tuple[StageReport, ...]:
    if plan is None:
        return ()
    workers = job.workers_of(plan)
    return tuple(
        StageReport(
            index=index,
            node=plan.workers[position].node,
            device=plan.workers[position].device_index,
            layers=plan.workers[position].layers,
            depth=plan.workers[position].depth,
            worker=workers[position].state.value if position in workers else "",
            replica=number,
            num_replicas=len(positions),
            groups=plan.workers[position].groups,
            recompute=plan.workers[position].recompute,
        )
        for index, positions in enumerate(plan.replicas)
        for number, position in enumerate(positions, start=1)
    )


def duration(seconds: float) -> str:
    """Return a duration as `42 s`, `3:05` or `2:03:05`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, last = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{last:02d}" if hours else f"{minutes}:{last:02d}"


def time_left(report: JobReport) -> str:
    """Return `3:05 left`, or `at most 3:05 left`."""
    assert report.seconds_left is not None
    return f"{'at most ' if report.may_stop_early else ''}{duration(report.seconds_left)} left"


def planning_note(report: JobReport, now: float) -> str:
    """Return `planning since 3 s`, or an empty text. now: seconds since the epoch."""
    since = report.planning_since
    return f"planning since {duration(max(now - since, 0.0))}" if since else ""


def queue_note(report: JobReport) -> str:
    """Return `2 of 3 in the queue`, or an empty text."""
    if report.queue_position is None:
        return ""
    return f"{report.queue_position} of {report.queue_length} in the queue"


def progress_text(report: JobReport) -> str:
    """Return `batch 7/20`, and in epochs `batch 7/20 (epoch 1 of 3)`."""
    done = 0 if report.batch is None else report.batch + 1
    epoch = f" (epoch {report.epoch} of {report.epochs})" if report.epoch is not None else ""
    return f"batch {done}/{report.batches}{epoch}"


def evaluation_text(report: JobReport) -> str:
    """Return the last evaluation, as loss and perplexity, if it has one."""
    loss = report.eval_loss if report.final_eval_loss is None else report.final_eval_loss
    when = f"at batch {report.eval_batch}" if report.final_eval_loss is None else AT_THE_END
    assert loss is not None
    try:
        perplexity = f"{math.exp(loss):.4g}"
    except OverflowError:
        perplexity = "inf"
    beside = f" (perplexity {perplexity})" if report.has_perplexity else ""
    return f"held-out loss {loss:.4f}{beside} {when}"


def losses_and_rate(report: JobReport) -> list[str]:
    """Return the newest losses and the rate, as far as they are known."""
    found = [f"loss {report.loss:.4f}"] if report.loss is not None else []
    has_evaluation = report.eval_loss is not None or report.final_eval_loss is not None
    found += [evaluation_text(report)] if has_evaluation else []
    promised = report.predicted_tokens_per_second
    beside = f" ({promised:,.0f} predicted)" if promised else ""
    return found + ([f"{report.tokens_per_second:,.0f} tokens/s{beside}"] if report.tokens_per_second else [])


def why_now(report: JobReport) -> list[str]:
    """Return the job's reason and the most telling of what ails it: every list of jobs has the same."""
    return [
        text for text in (report.reason, *report.waits[:1], *report.ailments[:1], *report.safety.troubles[:1]) if text
    ]


def report_line(report: JobReport, *, now: float) -> str:
    """Return the job on one line, for logs and pipes. now: seconds since the epoch."""
    parts = [f"{report.name}: {report.phase}"]
    if report.batch is not None:
        parts.append(progress_text(report))
    parts += losses_and_rate(report)
    if report.stages:
        nodes = dict.fromkeys(stage.node for stage in report.stages)
        parts.append(f"generation {report.generation} on {', '.join(nodes)}")
    if report.goodput.useful_share is not None:
        parts.append(f"goodput {report.goodput.useful_share:.0%}".replace("%", " %"))
    if report.seconds_left:
        parts.append(time_left(report))
    parts += [text for text in (queue_note(report), planning_note(report, now), *why_now(report)) if text]
    return " · ".join(parts)
