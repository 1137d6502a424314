"""Who is owed which devices, told by small tables of claimants."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.daemon.cluster.records import DeviceKey
from headway.daemon.decide.allocate import Claimant, Dealt, coarse, deal

SLICE_S = 600.0


def on(*nodes: str) -> frozenset[DeviceKey]:
    """The first devices of nodes."""
    return frozenset((node, 0) for node in nodes)


ABC, ABCD = on("a", "b", "c"), on("a", "b", "c", "d")


def runs(job: str, user: str, holds: frozenset[DeviceKey], usable: frozenset[DeviceKey], **rest: Any) -> Claimant:
    return Claimant(job=job, user=user, holds=holds, usable=usable, **rest)


def waits(job: str, user: str, usable: frozenset[DeviceKey], **rest: Any) -> Claimant:
    return Claimant(job=job, user=user, usable=usable, is_waiting=True, **rest)


def numbers(claimants: Sequence[Claimant]) -> dict[str, int]:
    dealt = deal(claimants, slice_s=SLICE_S)
    return {job: len(due) for job, due in dealt.due.items()}


def test_one_users_jobs_run_one_after_the_other() -> None:
    """The first takes all, the second waits; what nobody had goes to the second before the first grows."""
    first, second = runs("first", "alice", ABC, ABC), waits("second", "alice", ABC, rank=1)
    assert numbers([first, second]) == {"first": 3, "second": 0}
    first, second = replace(first, usable=ABCD), replace(second, usable=ABCD)
    assert deal([first, second], slice_s=SLICE_S).due == {"first": ABC, "second": on("d")}


def test_waiting_jobs_of_one_user_are_served_in_full_one_by_one() -> None:
    """Nothing runs yet: the first gets all that it can use, the second what is left."""
    assert numbers([waits("first", "alice", ABC), waits("second", "alice", ABC, rank=1)]) == {"first": 3, "second": 0}
    limited = waits("first", "alice", ABC, most_nodes=2)
    assert numbers([limited, waits("second", "alice", ABC, rank=1)]) == {"first": 2, "second": 1}


def test_another_users_job_gets_a_share_at_once() -> None:
    """Alice has three nodes, bob comes: she keeps two, for she has not used much more than he."""
    claimants = [runs("a", "alice", ABC, ABC, used=500.0), waits("b", "bob", ABC, rank=1)]
    assert numbers(claimants) == {"a": 2, "b": 1}
    claimants[0] = replace(claimants[0], used=SLICE_S * 1.2)
    assert numbers(claimants) == {"a": 1, "b": 2}


def test_a_user_keeps_own_devices_in_turn_with_others() -> None:
    """Alice has six nodes, bob two and a job that waits for two more. One by one: she keeps four, so his job starts."""
    hers, his = on(*"abcdef"), on("x", "y")
    claimants = [
        runs("a", "alice", hers, hers | his),
        runs("b", "bob", his, hers | his, rank=1),
        waits("b2", "bob", hers | his, rank=2, least_devices=2),
    ]
    assert numbers(claimants) == {"a": 4, "b": 2, "b2": 2}


def test_weights_divide_the_devices() -> None:
    """Alice's share is three times bob's: of four nodes she has three."""
    assert numbers([waits("a", "alice", ABCD, weight=3.0), waits("b", "bob", ABCD, rank=1)]) == {"a": 3, "b": 1}


@pytest.mark.parametrize(("used", "winner"), [(300.0, "a"), (SLICE_S * 1.2, "b")])
def test_on_one_node_users_take_turns_by_time_slices(used: float, winner: str) -> None:
    """Whoever runs goes on until the other has used less by more than a slice."""
    claimants = [runs("a", "alice", on("a"), on("a"), used=used), waits("b", "bob", on("a"), rank=1)]
    assert numbers(claimants)[winner] == 1


def test_a_running_jobs_minimum_is_not_taken_within_its_slice() -> None:
    """A job that began a moment ago keeps the least that it needs, whichever user has used less."""
    running = runs("a", "alice", on("a", "b"), on("a", "b"), used=10**6, least_devices=2, least_nodes=2)
    running = replace(running, pinned=running.least_of_its_own())
    assert numbers([running, waits("b", "bob", on("a", "b"), rank=1)]) == {"a": 2, "b": 0}


def test_a_higher_priority_shrinks_the_lower_to_its_least() -> None:
    """One job runs on four nodes and can do with one; a job of a higher priority gets the other three."""
    claimants = [runs("low", "alice", ABCD, ABCD), waits("high", "alice", ABCD, rank=1, priority=5)]
    assert numbers(claimants) == {"low": 1, "high": 3}
    claimants[1] = replace(claimants[1], least_devices=4)
    assert numbers(claimants) == {"low": 0, "high": 4}


def test_a_lower_priority_takes_nothing_from_a_higher() -> None:
    """It gets what the other does not have, and no more."""
    high = runs("high", "alice", ABC, ABCD, priority=1)
    low = waits("low", "bob", ABCD, rank=1)
    assert deal([high, low], slice_s=SLICE_S).due == {"high": ABC, "low": on("d")}
    assert numbers([replace(high, usable=ABC), replace(low, usable=ABC)]) == {"high": 3, "low": 0}


def test_a_big_job_at_the_head_keeps_what_is_free() -> None:
    """It needs three nodes, two are free: a small one behind it gets neither, so that it is not starved."""
    running = runs("now", "alice", on("a"), ABC, least_devices=1, most_devices=1)
    big = waits("big", "alice", ABC, rank=1, least_devices=3, least_nodes=3)
    small = waits("small", "alice", ABC, rank=2)
    dealt = deal([running, big, small], slice_s=SLICE_S)
    assert dealt.due["small"] == frozenset()
    assert dealt.due["big"] == on("b", "c")
    assert dealt.partial == {"big"}


def test_a_job_for_a_busy_site_leaves_an_idle_site_alone() -> None:
    """The head wants a node that is busy; the next one gets the idle ones."""
    running = runs("now", "alice", on("a"), on("a"))
    head, next_one = waits("head", "alice", on("a"), rank=1), waits("next", "alice", on("b", "c"), rank=2)
    assert deal([running, head, next_one], slice_s=SLICE_S).due["next"] == on("b", "c")


def test_a_job_that_no_cluster_here_could_run_keeps_nothing() -> None:
    """It needs four nodes and there are three: it is in nobody's way."""
    big, small = waits("big", "alice", ABC, least_devices=4, least_nodes=4), waits("small", "alice", ABC, rank=1)
    assert numbers([big, small]) == {"big": 0, "small": 3}


def test_the_job_with_devices_to_spare_gives_one_up() -> None:
    """One of alice's jobs has one node and one has three: bob's node is one of the three."""
    claimants = [
        runs("one", "alice", on("a"), ABCD),
        runs("three", "alice", on("b", "c", "d"), ABCD, rank=1),
        waits("b", "bob", ABCD, rank=2),
    ]
    dealt = deal(claimants, slice_s=SLICE_S)
    assert dealt.due["one"] == on("a")
    assert dealt.due["b"] < on("b", "c", "d")


def test_a_job_that_recovers_has_first_claim_on_what_is_free() -> None:
    """It lost one of two nodes; the free one is kept for it, and not given to the job that waits."""
    recovering = runs("hurt", "alice", on("a"), ABC, is_recovering=True, had=2, rank=5, pinned=on("a"))
    dealt = deal([recovering, waits("other", "bob", ABC, least_devices=2)], slice_s=SLICE_S)
    assert len(dealt.due["hurt"]) == 2


DEVICES = [(node, index) for node in "abcd" for index in range(2)]


@st.composite
def clusters(draw: st.DrawFn) -> list[Claimant]:
    """Up to five jobs of three users on four nodes of two devices."""
    free = list(DEVICES)
    found = []
    for rank in range(draw(st.integers(1, 5))):
        usable = frozenset(draw(st.sets(st.sampled_from(DEVICES), min_size=1)))
        holds = frozenset(draw(st.sets(st.sampled_from(sorted(usable))))) & frozenset(free)
        free = [device for device in free if device not in holds]
        least = draw(st.integers(1, max(len(holds), 1) if holds else 4))
        claimant = Claimant(
            job=f"j{rank}",
            user=draw(st.sampled_from(("alice", "bob", "carol"))),
            priority=draw(st.sampled_from((0, 0, 1, 5))),
            weight=draw(st.sampled_from((1.0, 2.0))),
            used=draw(st.sampled_from((0.0, 500.0, 5000.0))),
            rank=rank,
            usable=usable,
            holds=holds,
            is_waiting=not holds,
            least_devices=least,
            most_devices=draw(st.integers(least, 8)),
            least_nodes=draw(st.integers(1, max(min(least, len({node for node, _ in holds or [("a", 0)]})), 1))),
        )
        is_new = draw(st.booleans())
        found.append(replace(claimant, pinned=claimant.least_of_its_own()) if is_new else claimant)
    return found


@given(clusters())
def test_every_allocation_is_sound(claimants: list[Claimant]) -> None:
    """Each device goes to one job that can use it, minimums hold, and no job gets less than it needs."""
    dealt: Dealt = deal(claimants, slice_s=SLICE_S)
    every = [device for due in dealt.due.values() for device in due]
    assert len(every) == len(set(every))
    for claimant in claimants:
        due = dealt.due[claimant.job]
        assert claimant.pinned <= due <= claimant.usable
        if due - claimant.pinned and claimant.job not in dealt.partial:
            assert len(due) >= claimant.least_devices
            assert len({node for node, _ in due}) >= claimant.least_nodes


def carried_out(claimants: list[Claimant]) -> list[Claimant]:
    """Every job has what it was owed."""
    dealt = deal(claimants, slice_s=SLICE_S)
    holds = {job: frozenset() if job in dealt.partial else due for job, due in dealt.due.items()}
    return [
        replace(
            claimant,
            holds=holds[claimant.job],
            is_waiting=not holds[claimant.job],
            pinned=frozenset(),
            used=0.0,
        )
        for claimant in claimants
    ]


@given(clusters())
def test_allocations_settle(claimants: list[Claimant]) -> None:
    """Devices stop moving between jobs while nobody uses more than others."""
    for _ in range(6):
        before, claimants = claimants, carried_out(claimants)
    assert [claimant.holds for claimant in claimants] == [claimant.holds for claimant in before]


def test_an_allocation_is_cached_while_nothing_changes() -> None:
    """A thousand devices are not allocated again with every heartbeat, because usage counts in coarse steps."""
    assert coarse(1000.0, slice_s=SLICE_S) == coarse(1010.0, slice_s=SLICE_S) == 990.0
    assert coarse(123_456.0, slice_s=SLICE_S) == 123_000.0
    claimants = [runs("a", "alice", ABC, ABC), waits("b", "bob", ABC, rank=1)]
    assert deal(claimants, slice_s=SLICE_S) is deal(list(claimants), slice_s=SLICE_S)
