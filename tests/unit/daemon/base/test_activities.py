"""The owner of activities: what fails is restarted ever later, told, and costs no other activity anything."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headway.daemon.base import activities as module
from headway.daemon.base import fault_points, restart_policy
from headway.daemon.base.activities import CALLBACKS, Activities
from headway.daemon.base.errors import ConfigError, InvariantLostError
from headway.daemon.base.restart_policy import HEALTHY_AFTER_S, JITTER, LONGEST_PAUSE_S, Health, pause_s
from tests.rigs.running import running

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_PAUSE_S", 0.001)


@given(number=st.integers(1, 10**6), chance=st.floats(0.0, 1.0))
def test_pauses_double_up_to_a_limit(number: int, chance: float) -> None:
    """However often it failed: never longer than the limit, never shorter than the jitter allows."""
    assert (1 - JITTER) * pause_s(number, chance=0.0) <= pause_s(number, chance=chance) <= LONGEST_PAUSE_S
    assert pause_s(number + 1, chance=0.0) >= pause_s(number, chance=0.0)


def test_an_activity_that_ran_for_long_begins_with_a_short_pause_again() -> None:
    """Ten failures in a row, then a minute of work, then another: that one counts as the first."""
    health = Health()
    for _ in range(10):
        health = health.failed("x", began_at=0.0, now=1.0, chance=0.0)
    later = health.failed("x", began_at=100.0, now=100.0 + HEALTHY_AFTER_S, chance=0.0)
    assert (health.num_in_a_row, later.num_in_a_row, later.num_failures) == (10, 1, 11)
    assert later.is_ailing(later.resumes_at)
    assert not later.is_ailing(later.resumes_at + HEALTHY_AFTER_S)


async def test_an_activity_that_raises_is_restarted_and_the_others_do_not_notice() -> None:
    """One fails three times, also by an exception group and a stray cancellation; the other runs once."""
    errors: Iterator[BaseException] = iter(
        [
            ExceptionGroup("two", [KeyError("missing"), OSError(28, "full")]),
            asyncio.CancelledError(),
            KeyError("missing"),
        ]
    )
    recovered, calm = asyncio.Event(), 0

    async def failing() -> None:
        if (error := next(errors, None)) is not None:
            raise error
        recovered.set()
        await asyncio.Event().wait()

    async def steady() -> None:
        nonlocal calm
        calm += 1
        await asyncio.Event().wait()

    owner, told = Activities(), 0

    def tell() -> None:
        nonlocal told
        told += 1

    owner.on_change = tell
    with capture_logs() as logs:
        running = asyncio.create_task(owner.run({"failing": failing, "steady": steady}))
        waiting = asyncio.create_task(recovered.wait())
        # an owner that ends early ends this wait too: the test then fails at once, not at a deadline
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        assert not running.done(), "one activity's error has ended all of them"
        running.cancel()
        await asyncio.wait([running])
    assert calm == 1
    assert owner.num_failures == {"failing": 3}
    assert owner.ailments == {"failing": "failed 3 times in a row and was restarted: KeyError: 'missing'"}
    assert told == 3
    failed = [line for line in logs if line["event"] == "activity_failed"]
    assert ["traceback" in line for line in failed] == [True, True, True], "each error differs from the one before"


async def test_the_traceback_of_one_error_is_logged_once() -> None:
    """Five times the same error: five lines, one traceback."""
    enough, num = asyncio.Event(), 0

    async def failing() -> None:
        nonlocal num
        num += 1
        if num == 6:
            enough.set()
            await asyncio.Event().wait()
        raise ZeroDivisionError

    with capture_logs() as logs:
        async with running(Activities().keep("planning", failing)):
            await asyncio.wait_for(enough.wait(), DEADLINE_S)
    assert sum("traceback" in line for line in logs) == 1
    assert sum(line["event"] == "activity_failed" for line in logs) == 5


async def test_a_lost_invariant_ends_all_activities() -> None:
    """A ConfigError restarts one activity; a lost invariant ends the daemon with its own exception."""
    ended, num = [], 0

    async def losing() -> None:
        nonlocal num
        num += 1
        raise (ConfigError("a bad folder") if num == 1 else InvariantLostError("a node of this name is there", "a"))

    async def other() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("other")

    with pytest.raises(InvariantLostError, match="a node of this name is there"):
        await asyncio.wait_for(Activities().run({"losing": losing, "other": other}), DEADLINE_S)
    assert (num, ended) == (2, ["other"])


async def test_an_error_of_a_callback_is_counted_and_reported() -> None:
    owner = Activities()
    owner.watch_callbacks()
    asyncio.get_running_loop().call_soon(lambda: 1 // 0)
    async with asyncio.timeout(DEADLINE_S):
        while not owner.num_failures:
            await asyncio.sleep(0)
    assert "ZeroDivisionError" in owner.ailments[CALLBACKS]


def test_a_trouble_is_reported_when_it_begins_changes_and_ends() -> None:
    told: list[dict[str, str]] = []
    owner = Activities()
    owner.on_change = lambda: told.append(owner.ailments)
    for reason in ("full", "full", "read-only", "", ""):
        owner.trouble("state folder", reason)
    assert told == [{"state folder": "full"}, {"state folder": "read-only"}, {}]


async def test_a_fault_point_strikes_an_activity_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Armed while the activity waits for something: it fails once, and goes on."""
    faults = tmp_path / "faults"
    monkeypatch.setenv(fault_points.ENVIRONMENT, str(faults))
    monkeypatch.setattr(module, "FAULT_POLL_S", 0.005)
    fault_points.arm()
    try:
        owner, began = Activities(node="a"), asyncio.Event()

        async def waiting() -> None:
            began.set()
            await asyncio.Event().wait()

        async with running(owner.keep("probing", waiting)):
            await asyncio.wait_for(began.wait(), DEADLINE_S)
            faults.write_text(
                json.dumps({"id": "1", "at": "activity", "when": {"name": "probing", "node": "a"}, "do": "raise"})
            )
            began.clear()
            await asyncio.wait_for(began.wait(), DEADLINE_S)
            assert owner.num_failures == {"probing": 1}
    finally:
        monkeypatch.delenv(fault_points.ENVIRONMENT)
        fault_points.arm()
