"""A fault counts as overcome when the job progresses; the final sentences say so."""

from dataclasses import replace

from headway.daemon.chaos.campaign import Watcher, cells, failures
from headway.daemon.chaos.fault_schedule import Blow
from headway.daemon.records.measurements import ProgressRecord
from headway.daemon.records.records import Phase, PhaseRecord, PlanRecord
from headway.daemon.view.job_view import JobView


def job(*, generation: int, batch: int, phase: Phase = Phase.RUNNING, boundary: int = 0, furthest: int = 0) -> JobView:
    return JobView(
        name="job",
        phase=PhaseRecord(phase=phase, generation=generation, reason="because"),
        plan=PlanRecord(generation=generation, timeline=generation, boundary=boundary, furthest=furthest),
        progress=ProgressRecord(generation=generation, batch=batch, loss=1.0, tokens_per_second=1.0),
    )


def blow(kind: str = "kill", *, at_s: float = 1.0, until_s: float | None = 1.0, takes_worker: bool = True) -> Blow:
    return Blow(number=1, kind=kind, target="node-2", at_s=at_s, until_s=until_s, takes_worker=takes_worker)


def test_a_kill_is_overcome_by_progress_of_a_new_generation_only() -> None:
    """Late progress of the old generation does not count. The first batch of the new one ends the wait."""
    watcher, kill = Watcher(), blow()
    watcher.see(job(generation=1, batch=9), now_s=0.5)
    watcher.struck(kill)
    assert watcher.see(job(generation=1, batch=11), now_s=1.2) == []
    preparing = replace(
        job(generation=2, batch=11, boundary=8, furthest=12), progress=job(generation=1, batch=11).progress
    )
    assert watcher.see(preparing, now_s=1.5) == []
    assert watcher.see(job(generation=2, batch=8, boundary=8, furthest=12), now_s=2.25) == [kill]
    assert (kill.recovery_s, kill.new_generation, kill.recomputed) == (1.25, 2, 4)
    assert failures(watcher) == ()


def test_batches_recomputed_after_two_faults_count_once() -> None:
    """Two workers die at once, one plan follows: its 4 batches stand beside the first of them."""
    watcher, first, second = Watcher(), blow(), blow()
    watcher.struck(first)
    watcher.struck(second)
    assert watcher.see(job(generation=2, batch=8, boundary=8, furthest=12), now_s=2.0) == [first, second]
    assert (first.recomputed, second.recomputed) == (4, 0)


def test_a_pause_is_overcome_by_the_first_batch_after_it() -> None:
    """Batches during the pause do not count."""
    watcher, pause = Watcher(), blow("pause", until_s=None, takes_worker=False)
    watcher.see(job(generation=1, batch=9), now_s=0.5)
    watcher.struck(pause)
    assert watcher.see(job(generation=1, batch=10), now_s=1.5) == []
    pause.until_s = 2.0
    assert watcher.see(job(generation=1, batch=10), now_s=2.5) == []
    assert watcher.see(job(generation=1, batch=11), now_s=3.0) == [pause]
    assert (pause.new_generation, pause.recomputed) == (None, 0)


def test_the_end_of_the_job_overcomes_every_fault() -> None:
    watcher, kill = Watcher(), blow()
    watcher.struck(kill)
    assert watcher.see(job(generation=1, batch=20, phase=Phase.FINISHED), now_s=4.0) == [kill]


def test_a_fault_without_progress_and_a_failed_job_are_each_a_reason() -> None:
    """Nothing after the kill, and the job failed: not held, and each reason is said."""
    watcher = Watcher()
    watcher.see(job(generation=1, batch=9), now_s=0.5)
    watcher.struck(blow())
    assert failures(watcher) == ("fault 1 (kill, node-2): no progress was seen after it",)
    watcher.see(job(generation=2, batch=9, phase=Phase.FAILED), now_s=1.5)
    assert failures(replace(watcher, generation=1))[0] == "the job is failed: because"
    assert failures(Watcher()) == ("the job was never seen",)


def test_the_table_has_a_line_for_each_fault() -> None:
    """One overcome, one not: their times, generations and recomputed batches stand in columns."""
    done = blow()
    done.recovered_s, done.new_generation, done.recomputed = 2.25, 4, 7
    head, first, second = cells([done, blow("pause")])
    assert head[:3] == ("no", "fault", "target")
    assert first == ("1", "kill", "node-2", "1.0 s", "1.25 s", "4", "7")
    assert second == ("1", "pause", "node-2", "1.0 s", "no", "same", "0")
