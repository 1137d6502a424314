"""Five machines by the deployment page, and what networks do to them: the job goes on over what can talk, bit for bit,
or says within seconds which pair cannot and why; nobody healthy is blamed."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.machines.cluster import Cluster, stop_worker
from tests.machines.conftest import NAMES
from tests.machines.observer import assert_same_bits, blocked, nobody_is_blamed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
Plain = Callable[[Cluster, Path], dict[str, bytes]]
BATCHES = 60
LONG = 150
"""Number of batches that last until something has struck the job."""
SOON_S = 15.0
"""Seconds within which a job that cannot continue says why."""


def never_beside(plan: list[str], one: str, other: str) -> bool:
    """Return whether two nodes are not neighbours in a plan."""
    return all({one, other} != {*pair} for pair in pairwise(plan))


def test_a_daemons_port_and_the_workers_range_are_enough(machines: Cluster, plain: Plain) -> None:
    """Firewalls let in 7070 and 7100-7107: a job on all five machines ends with the plain loop's weights."""
    job = machines.submit("range", batches=BATCHES, min_nodes=5)
    told = machines.until_batch("range", 5)
    assert sorted(told["jobs"]["range"]["plan"]) == sorted(NAMES)
    assert {worker["address"].rpartition(":")[2] for node in told["nodes"].values() for worker in node["workers"]} == {
        "7100"
    }
    assert_same_bits(machines.finished("range"), plain(machines, job))
    nobody_is_blamed(machines)


@pytest.mark.parametrize("ways", [("b", "d"), ("b",)], ids=["pair", "one-way"])
def test_two_that_cannot_talk_are_no_neighbours(machines: Cluster, plain: Plain, ways: tuple[str, ...]) -> None:
    """b and d are parted, in both directions or in one, before the job: all five train it, in an order that works.

    A worker dials the one after it: if only b cannot dial d, d may well stand before b.
    """
    machines.network.block("b", "d")
    if len(ways) > 1:
        machines.network.block("d", "b")
    name = f"parted-{len(ways)}"
    job = machines.submit(name, batches=BATCHES, min_nodes=5)
    told = machines.until_batch(name, 5)
    assert len(told["jobs"][name]["plan"]) == 5
    order = told["jobs"][name]["plan"]
    assert ("b", "d") not in pairwise(order), told["jobs"][name]
    assert len(ways) == 1 or ("d", "b") not in pairwise(order), told["jobs"][name]
    assert_same_bits(machines.finished(name), plain(machines, job))
    nobody_is_blamed(machines)


@pytest.mark.parametrize("is_one_way", [False, True], ids=["pair", "one-way"])
def test_neighbours_that_are_parted_while_they_train(machines: Cluster, plain: Plain, is_one_way: bool) -> None:
    """Two neighbours of a running job lose each other: it goes on in another order, and neither is blamed."""
    name = f"lost-{'one-way' if is_one_way else 'pair'}"
    job = machines.submit(name, batches=LONG, min_nodes=5)
    plan = machines.until_batch(name, 20)["jobs"][name]["plan"]
    machines.network.block(plan[1], plan[2])
    if not is_one_way:
        machines.network.block(plan[2], plan[1])

    def has_another_order(told: Any) -> bool:
        order = told["jobs"][name]["plan"]
        return bool(order) and never_beside(order, plan[1], plan[2])

    def says_which_way(told: Any) -> bool:
        """Return whether the lines of `status` name the blocked way."""
        job = told["jobs"][name]
        ways = (
            f"{one} cannot reach the worker port of {other} at 10.78.0." for one, other in (plan[1:3], plan[2:0:-1])
        )
        return any(way in text for way in ways for text in (job["reason"], *job["waits"]))

    machines.until(
        lambda told: has_another_order(told) or says_which_way(told), "the way that is blocked", within_s=SOON_S
    )
    told = machines.until(has_another_order, "a plan in which they are not beside each other")
    before = told["jobs"][name]["batch"]
    machines.until(lambda told: told["jobs"][name]["batch"] > before, "progress")
    assert_same_bits(machines.finished(name), plain(machines, job))
    nobody_is_blamed(machines)


def test_a_job_that_no_order_serves_says_which_ways_are_blocked(machines: Cluster) -> None:
    """e reaches etcd and nobody else, and the job wants all five: within seconds `status` names pair and address."""
    for other in "abcd":
        machines.network.part(other, "e")
    machines.submit("alone", batches=BATCHES, min_nodes=5)
    began = time.monotonic()
    while "cannot reach" not in (said := machines.headway("status", "alone")[1]):
        assert time.monotonic() < began + SOON_S, said
    assert "at 10.78.0." in said
    machines.until(lambda told: "cannot reach" in told["jobs"]["alone"]["reason"], "no order works, and why")
    assert machines.headway("cancel", "alone")[0] == 0
    nobody_is_blamed(machines)


def test_an_address_that_changes_under_a_daemon(machines: Cluster, plain: Plain) -> None:
    """d gets another address while it trains, and back: it registers each, and the job ends with the same bits."""
    job = machines.submit("moving", batches=LONG, min_nodes=5)
    machines.until_batch("moving", 10)
    addresses = ("10.78.0.4", "10.78.0.14")
    for before, after in (addresses, addresses[::-1]):
        machines.network.drop_address("d", f"{before}/24")
        machines.network.add_address("d", f"{after}/24")
        machines.until(partial(_is_at, "d", after), f"d and its worker at {after}")
        machines.until_batch("moving", min(machines.look()["jobs"]["moving"]["batch"] + 10, LONG))
    assert_same_bits(machines.finished("moving"), plain(machines, job))
    nobody_is_blamed(machines)


def _found_by_a_job_for_all(machines: Cluster, is_it: Callable[[str], bool]) -> None:
    """A job that wants all five has its links proven: what is blocked is a fact for the next one."""
    machines.submit("for-all", batches=BATCHES, min_nodes=5)
    machines.until(lambda told: any(map(is_it, blocked(told))), "the blocked way in the records")
    assert machines.headway("cancel", "for-all")[0] == 0
    assert machines.headway("jobs", "rm", "for-all")[0] == 0


@pytest.fixture
def wrong_e(machines: Cluster) -> Iterator[Cluster]:
    """e's daemon is stopped, to be started otherwise; afterwards it is as it was."""
    _end(machines, "e")
    yield machines
    _end(machines, "e")
    machines.start_daemon("e")
    machines.all_up()


def test_a_certificate_with_another_name_is_told_at_the_start(wrong_e: Cluster, plain: Plain) -> None:
    """e is started with a certificate for x: one line and status 2; the others train without it."""
    wrong_e.authority.issue("x", hosts=("10.78.0.5",))
    assert wrong_e.start_daemon("e", certificate="x").wait(60) == 2
    assert "and not this node's name e" in wrong_e.log("e")
    wrong_e.stop_daemon("e")
    job = wrong_e.submit("without-e", batches=BATCHES, min_nodes=4)
    assert_same_bits(wrong_e.finished("without-e"), plain(wrong_e, job))
    nobody_is_blamed(wrong_e)


def test_a_certificate_that_is_replaced_by_anothers_is_found_out(wrong_e: Cluster, plain: Plain) -> None:
    """e's folder gets another's certificate under its running daemon, and its worker starts again: nobody takes it."""
    own = wrong_e.folder / "own"
    wrong_e.authority.issue("y", hosts=("10.78.0.5",))
    _copy(wrong_e.folder / "ca" / "e", own)
    wrong_e.start_daemon("e", certs=own)
    wrong_e.all_up()
    _copy(wrong_e.folder / "ca" / "y", own)
    stop_worker(wrong_e.look(), "e")
    _found_by_a_job_for_all(wrong_e, lambda way: "→ e worker" in way and "name" in way)
    job = wrong_e.submit("misnamed", batches=BATCHES, min_nodes=3)
    told = wrong_e.until_batch("misnamed", 5)
    assert "e" not in told["jobs"]["misnamed"]["plan"]
    assert_same_bits(wrong_e.finished("misnamed"), plain(wrong_e, job))
    nobody_is_blamed(wrong_e)


def test_an_address_behind_a_router_is_told_of(wrong_e: Cluster, plain: Plain) -> None:
    """e advertises an address that is its own and that nobody else has a way to: the others train, `nodes` says why."""
    wrong_e.network.add_address("e", "192.168.9.5/32", device="lo")
    try:
        wrong_e.start_daemon("e", advertise_host="192.168.9.5")
        _found_by_a_job_for_all(wrong_e, lambda way: "→ e " in way and "at 192.168.9.5:70" in way)
        job = wrong_e.submit("behind", batches=BATCHES, min_nodes=3)
        told = wrong_e.until_batch("behind", 5)
        assert "e" not in told["jobs"]["behind"]["plan"]
        lines = wrong_e.headway("nodes")[1].splitlines()
        about = [line for line in lines if "port of e at 192.168.9.5:70" in line and "cannot reach" in line]
        assert about, lines
        assert_same_bits(wrong_e.finished("behind"), plain(wrong_e, job))
        nobody_is_blamed(wrong_e)
    finally:
        wrong_e.network.drop_address("e", "192.168.9.5/32", device="lo")


def _end(machines: Cluster, name: str) -> None:
    """A daemon, and its record: the next one is not taken for it."""
    machines.stop_daemon(name)
    machines.until(lambda told: name not in told["nodes"], f"the end of {name}'s lease")


def _is_at(name: str, host: str, told: Any) -> bool:
    """Return whether a node and its worker have registered an address."""
    node = told["nodes"].get(name)
    if node is None or not node["workers"]:
        return False
    return node["address"] == f"{host}:7070" and all(
        worker["address"].startswith(f"{host}:") for worker in node["workers"]
    )


def _copy(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
