"""The schedule of strikes."""

from collections import Counter
from itertools import pairwise

import pytest

from headway.daemon.chaos.fault_schedule import (
    LASTING,
    SHORTEST_S,
    FaultKind,
    Strike,
    fault_schedule,
    parse_duration,
    parse_kinds,
    parse_rate,
)
from headway.daemon.errors import ConfigError


def drawn(seed: int, *, minutes: float = 60.0, kinds: tuple[FaultKind, ...] = tuple(FaultKind)) -> tuple[Strike, ...]:
    return fault_schedule(
        seed=seed,
        kinds=kinds,
        rate_per_minute=10.0,
        duration_s=60.0 * minutes,
        longest_s=8.0,
    )


def test_a_seed_always_gives_the_same_faults() -> None:
    """The schedule of seed 7 equals the one written down here, and another seed's differs."""
    later = tuple(FaultKind)[tuple(FaultKind).index(FaultKind.UNREACHABLE) :]
    kinds = tuple(kind for kind in FaultKind if kind not in (FaultKind.PARTITION, *later))
    strikes = drawn(7, minutes=0.5, kinds=kinds)
    assert [(strike.at_s, strike.kind.value, strike.ordinal % 12) for strike in strikes] == GOLDEN
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
        assert (SHORTEST_S <= strike.seconds <= 8.0) if strike.kind in LASTING else strike.seconds == 0.0
        assert 0.0 <= strike.share < 1.0
    lasting = [strike.seconds for strike in strikes if strike.kind in LASTING]
    assert min(lasting) < 1.0 < 5.0 < max(lasting)


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
