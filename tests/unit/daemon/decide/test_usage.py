"""What each user has used: counted exactly, decaying, and the same for every reader."""

import pytest

from headway.daemon.cluster.cluster_records import SharesRecord, UsageRecord
from headway.daemon.decide.usage import MAX_USERS, WRITTEN_EVERY_S, UsageMeter, per_share, weight

HALF_LIFE_S = SharesRecord().half_life_s


def test_two_devices_for_a_minute_are_two_minutes() -> None:
    """A job takes two devices and leaves them after a minute: close to 120 device-seconds, and no more afterwards."""
    meter = UsageMeter()
    meter.hold("a", "alice", 2, now=10.0)
    meter.hold("a", "alice", 0, now=70.0)
    assert meter.read_out(70.0)["alice"] == pytest.approx(120.0, rel=0.01)
    assert meter.read_out(70.0 + HALF_LIFE_S)["alice"] == pytest.approx(60.0, rel=0.01)


def test_count_does_not_depend_on_when_it_is_read() -> None:
    """A reader who looks every second and one who looks once an hour read the same."""
    often, seldom = UsageMeter(), UsageMeter()
    for meter in (often, seldom):
        meter.hold("a", "alice", 3, now=0.0)
    for second in range(3600):
        often.advance(float(second))
    assert often.read_out(3600.0)["alice"] == pytest.approx(seldom.read_out(3600.0)["alice"])


def test_another_leader_goes_on_from_the_record() -> None:
    """A daemon that has just listed etcd reads the record and the plans: it counts what the leader counts."""
    leader, late = UsageMeter(), UsageMeter()
    leader.hold("a", "alice", 2, now=1000.0)
    due_at = leader.due_at()
    assert due_at == 1000.0 + WRITTEN_EVERY_S
    record = leader.record(now=due_at, written_at=0.0)
    leader.read(record, now=due_at)
    late.read(record, now=5.0)  # by its own clock
    late.hold("a", "alice", 2, now=5.0)
    assert late.read_out(105.0)["alice"] == pytest.approx(leader.read_out(due_at + 100.0)["alice"])


def test_record_stays_small() -> None:
    """Thousands of users of long ago: those who used most are kept; who used next to nothing is forgotten."""
    meter = UsageMeter(seconds={f"u{number}": float(number) for number in range(3 * MAX_USERS)}, at=0.0)
    record = meter.record(now=0.0, written_at=0.0)
    assert len(record.seconds) == MAX_USERS
    assert min(record.seconds.values()) == 2.0 * MAX_USERS
    assert not UsageMeter(seconds={"alice": 0.5}, at=0.0).record(now=0.0, written_at=0.0).seconds


def test_without_jobs_nothing_is_written() -> None:
    """An idle cluster costs no writes, and what was used decays on."""
    meter = UsageMeter()
    meter.read(UsageRecord(seconds={"alice": 100.0}), now=0.0)
    assert meter.due_at() is None
    assert meter.read_out(HALF_LIFE_S)["alice"] == pytest.approx(50.0)


def test_use_of_a_short_job_is_written_too() -> None:
    """A job ends within the minute, and nobody holds devices then: what it used is still due, once."""
    meter = UsageMeter()
    meter.hold("a", "alice", 2, now=10.0)
    meter.hold("a", "alice", 0, now=40.0)
    due_at = meter.due_at()
    assert due_at == 10.0 + WRITTEN_EVERY_S
    record = meter.record(now=due_at, written_at=0.0)
    assert record.seconds["alice"] == pytest.approx(60.0, rel=0.01)
    meter.read(record, now=due_at)
    assert meter.due_at() is None


def test_weights_divide_what_was_used() -> None:
    """A user with weight 3 has used a third as much of the share; one who is not named has weight 1."""
    shares = SharesRecord(weights={"alice": 3.0})
    assert per_share({"alice": 90.0}, "alice", shares) == 30.0
    assert [weight(user, shares) for user in ("alice", "bob")] == [3.0, 1.0]
