"""Decides from etcd's records whether a cluster recovered from faults. Pure.

A fault is overcome when the job progresses again: in a new generation if the fault took one of the plan's workers,
otherwise in the present generation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headway.daemon.records.records import TERMINAL_PHASES, Phase
from headway.daemon.view.job_view import JobView


@dataclass(slots=True, kw_only=True)
class Blow:
    """A fault that was injected, and its result. Times are seconds since the beginning."""

    number: int
    kind: str
    target: str
    at_s: float
    until_s: float | None = None
    """Time at which it ended or was undone; None: it lasts."""
    takes_worker: bool = False
    """True if the fault ends a worker of the plan. Then progress of the old generation proves nothing."""
    generation: int = 0
    """Generation of the last progress seen before it."""
    batch: int = -1
    recovered_s: float | None = None
    new_generation: int | None = None
    """New generation; None: the generation did not change."""
    recomputed: int = 0
    """Batches that had begun before the fault and were recomputed; counted for the first fault of a plan."""

    @property
    def recovery_s(self) -> float | None:
        """Return the seconds from the fault to the first progress after it."""
        return None if self.recovered_s is None else self.recovered_s - self.at_s


@dataclass(slots=True)
class Watcher:
    """Watches the job's records."""

    blows: list[Blow] = field(default_factory=list)
    generation: int = 0
    batch: int = -1
    furthest_progress_s: float = 0.0
    """Time at which the job was last seen to progress."""
    phase: Phase | None = None
    reason: str = ""

    def struck(self, blow: Blow) -> None:
        """Record that a fault was injected just now."""
        blow.generation, blow.batch = self.generation, self.batch
        self.blows.append(blow)

    def see(self, job: JobView, *, now_s: float) -> list[Blow]:
        """Look at the job; return the faults that are overcome by now."""
        self.phase, self.reason = job.phase.phase, job.phase.reason
        if job.progress is not None and (job.progress.generation, job.progress.batch) > (self.generation, self.batch):
            self.generation, self.batch = job.progress.generation, job.progress.batch
            self.furthest_progress_s = now_s
        overcome = [blow for blow in self.blows if blow.recovered_s is None and self._is_overcome(blow, now_s)]
        for blow in overcome:
            blow.recovered_s = now_s
            if self.generation > blow.generation:
                blow.new_generation = self.generation
                is_counted = any(other.new_generation == self.generation for other in self.blows if other is not blow)
                if job.plan is not None and job.plan.generation == self.generation and not is_counted:
                    blow.recomputed = max(0, job.plan.furthest - job.plan.boundary)
        return overcome

    def _is_overcome(self, blow: Blow, now_s: float) -> bool:
        if self.phase is Phase.FINISHED or self.generation > blow.generation:
            return True
        is_over = blow.until_s is not None and self.furthest_progress_s > blow.until_s
        return is_over and not blow.takes_worker and self.batch > blow.batch and now_s > blow.at_s

    @property
    def open_blows(self) -> list[Blow]:
        """Return the faults that are not overcome yet."""
        return [blow for blow in self.blows if blow.recovered_s is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The final judgement."""

    is_passed: bool
    reasons: tuple[str, ...]
    """Reasons of a failure, or findings of a success."""


def judge(watcher: Watcher, *, breaches: Sequence[str] | None) -> Verdict:
    """Judge the campaign. breaches: broken rules of the history; None: no history was recorded."""
    reasons = list(_failures(watcher, breaches or ()))
    if reasons:
        return Verdict(is_passed=False, reasons=tuple(reasons))
    checked = (
        "the history was not checked: daemons record one when HEADWAY_HISTORY_DIR names a folder"
        if breaches is None
        else "every rule of the history holds"
    )
    phase = watcher.phase.value if watcher.phase is not None else "unknown"
    return Verdict(
        is_passed=True, reasons=(f"all {len(watcher.blows)} faults were overcome; the job's phase: {phase}", checked)
    )


def _failures(watcher: Watcher, breaches: Sequence[str]) -> Iterator[str]:
    if watcher.phase is None:
        yield "the job was never seen"
    elif watcher.phase in TERMINAL_PHASES - {Phase.FINISHED}:
        yield f"the job is {watcher.phase.value}: {watcher.reason}"
    for blow in watcher.open_blows:
        yield f"fault {blow.number} ({blow.kind}, {blow.target}): no progress was seen after it"
    yield from breaches


def table(blows: Sequence[Blow]) -> list[str]:
    """Return a head and one line per fault, in columns."""
    rows = [("no", "fault", "target", "at", "recovered", "generation", "recomputed")]
    for blow in blows:
        rows.append(
            (
                str(blow.number),
                blow.kind,
                blow.target,
                f"{blow.at_s:.1f} s",
                "no" if blow.recovery_s is None else f"{blow.recovery_s:.2f} s",
                "same" if blow.new_generation is None else str(blow.new_generation),
                str(blow.recomputed),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
