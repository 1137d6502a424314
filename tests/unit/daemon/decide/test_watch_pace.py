"""A watch rests in a storm of a large cluster, never in a small one, and hears a few changes at once."""

from headway.daemon.decide.cluster_watch import BURST, FEW_NODES, GATHER_PER_NODE_S, LEAST_S, MOST_S, PER_S, WatchPace

LARGE = 400


def heard(pace: WatchPace, number: int, *, now: float) -> None:
    """Hear replies, all at one moment."""
    for _ in range(number):
        pace.heard(now=now)


def test_a_burst_is_heard_at_once_and_then_changes_gather() -> None:
    """The more nodes, the longer, up to two seconds. A while later it hears each change again."""
    pace = WatchPace()
    heard(pace, int(BURST) - 1, now=100.0)
    assert pace.rest_s(LARGE) == 0.0
    heard(pace, 1, now=100.0)
    assert pace.rest_s(LARGE) == LARGE * GATHER_PER_NODE_S
    assert pace.rest_s(100 * LARGE) == MOST_S
    heard(pace, 1, now=100.0 + BURST / PER_S)
    assert pace.rest_s(LARGE) == 0.0


def test_a_small_cluster_hears_every_change_at_once() -> None:
    """However many there are."""
    pace = WatchPace()
    heard(pace, 1000, now=1.0)
    assert pace.rest_s(FEW_NODES) == 0.0
    assert pace.rest_s(FEW_NODES + 1) == LEAST_S


def test_a_long_quiet_time_saves_no_more_than_a_burst() -> None:
    """An hour without changes, and then a storm."""
    pace = WatchPace()
    heard(pace, 1, now=1.0)
    heard(pace, int(BURST) + 1, now=3600.0)
    assert pace.rest_s(LARGE) > 0.0


def test_a_steady_storm_is_heard_in_few_replies() -> None:
    """100 changes a second for 60 s: each rest is followed by one reply, and those that come before the next rest."""
    pace, now, num_replies = WatchPace(), 0.0, 0
    while now < 60.0:
        pace.heard(now=now)
        num_replies += 1
        now += pace.rest_s(LARGE) or 0.01
    assert num_replies < BURST + 60.0 * PER_S + 60.0 / (LARGE * GATHER_PER_NODE_S)
