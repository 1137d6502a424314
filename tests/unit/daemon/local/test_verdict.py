"""A fault counts as overcome when the job progresses; the final sentences say so."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.measurements import ProgressRecord
from headway.daemon.cluster.records import Phase, PhaseRecord, PlanRecord
from headway.daemon.decide.job_view import JobView
from headway.daemon.local.campaign import Watcher
from headway.daemon.local.fault_schedule import (
    SHORTEST_S,
    Blow,
    FaultKind,
    Strike,
    fault_schedule,
    parse_duration,
    parse_kinds,
    parse_rate,
)


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
    assert watcher.failures == ()


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
    assert watcher.failures == ("fault 1 (kill, node-2): no progress was seen after it",)
    watcher.see(job(generation=2, batch=9, phase=Phase.FAILED), now_s=1.5)
    assert replace(watcher, generation=1).failures[0] == "the job is failed: because"
    assert Watcher().failures == ("the job was never seen",)


def drawn(seed: int, *, minutes: float = 60.0, kinds: tuple[str, ...] = tuple(FaultKind)) -> tuple[Strike, ...]:
    return fault_schedule(
        seed=seed,
        kinds=kinds,
        rate_per_minute=10.0,
        duration_s=60.0 * minutes,
        longest_s=8.0,
    )


def test_a_seed_always_gives_the_same_faults() -> None:
    """The schedule of seed 7 equals the one written down here, and another seed's differs."""
    strikes = drawn(7, minutes=0.5, kinds=(*(kind for kind in FaultKind if kind != "drain"), "link-cut", "drain"))
    assert [(strike.at_s, str(strike.kind), strike.ordinal % 12) for strike in strikes] == GOLDEN
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


GOLDEN = [
    (4.198, "pause", 7),
    (15.218, "truncate", 11),
    (17.374, "daemon-kill", 10),
    (24.376, "slow", 11),
    (25.664, "leader-kill", 9),
    (28.515, "flap", 4),
]


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    """The first ten minutes of an hour are the whole of a run of ten minutes."""
    assert drawn(3, minutes=60)[: len(drawn(3, minutes=10))] == drawn(3, minutes=10)


def test_the_rate_is_kept_and_every_kind_occurs() -> None:
    """An hour at 10 a minute: about 600 strikes, in order, each kind near its even share, lengths within bounds."""
    strikes = drawn(1)
    assert 520 < len(strikes) < 680
    assert [strike.number for strike in strikes] == list(range(1, len(strikes) + 1))
    assert all(one.at_s <= other.at_s for one, other in pairwise(strikes))
    counts = Counter(strike.kind for strike in strikes)
    assert set(counts) == set(FaultKind)
    assert max(counts.values()) < 3 * min(counts.values())
    for strike in strikes:
        assert SHORTEST_S <= strike.seconds <= 8.0
        assert 0.0 <= strike.share < 1.0
    assert min(strike.seconds for strike in strikes) < 1.0
    assert max(strike.seconds for strike in strikes) > 5.0


@pytest.mark.parametrize(("text", "rate"), [("6/min", 6.0), ("1/s", 60.0), ("30/h", 0.5), ("4", 4.0)])
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(("text", "seconds"), [("2m", 120), ("90s", 90), ("45", 45), ("1h", 3600), ("1.5min", 90)])
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_unknown_kinds_of_faults_are_refused() -> None:
    """Two kinds are read in order; an unknown kind, or no kind at all, gives a line that helps."""
    assert parse_kinds("kill, pause") == (FaultKind.KILL, FaultKind.PAUSE)
    for wrong, told in (("maim", "daemon-kill"), (",", "choose from")):
        with pytest.raises(ConfigError, match=told):
            parse_kinds(wrong)


@pytest.mark.parametrize("text", ["", "x/min", "0/min", "-1", "6/week", "nan"])
def test_an_invalid_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="6/min"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["", "fast", "0s", "-2m", "3 weeks"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="90s"):
        parse_duration(text)
