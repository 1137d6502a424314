"""What happens to nodes at five places while they train: the job goes on over what is left, and keeps its bits."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machines.observer import TIMEOUT_S, assert_same_bits
from tests.machines.sites import NODES, Sites

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Plain = Callable[[Sites, Path], dict[str, bytes]]
LONG = 150
"""Number of batches that last until something has struck the job."""
SHIFTED_CLOCK = Path(__file__).with_name("shifted_clock.c")


def goes_on(sites: Sites, job: str, *, without: tuple[str, ...] = ()) -> None:
    """Wait until a job computes new batches, under a plan without some nodes."""
    before = sites.look()["jobs"][job]["batch"]

    def has_moved(told: Any) -> bool:
        found = told["jobs"][job]
        assert found["phase"] != "failed", found
        return found["phase"] == "finished" or (found["batch"] > before and not {*without} & {*found["plan"]})

    sites.until(has_moved, f"{job} goes on without {without}")


def test_a_node_behind_nat_is_killed(sites: Sites, plain: Plain) -> None:
    """SIGKILL: the others go on without it, and it may come back."""
    job = sites.submit("killed", batches=LONG, min_nodes=3)
    sites.until_batch("killed", 10)
    sites.stop_daemon("node-c")
    goes_on(sites, "killed", without=("node-c",))
    sites.start_daemon("node-c")
    assert_same_bits(sites.finished("killed"), plain(sites, job))


def test_a_node_behind_nat_is_drained(sites: Sites, plain: Plain) -> None:
    """It leaves by a planned change and is let in again."""
    job = sites.submit("drained", batches=LONG, min_nodes=3)
    sites.until_batch("drained", 10)
    code, said = sites.headway("drain", "node-d")
    assert code == 0, said
    goes_on(sites, "drained", without=("node-d",))
    assert not any(sites.look()["failures"].values())
    assert sites.headway("nodes", "release", "node-d")[0] == 0
    assert_same_bits(sites.finished("drained"), plain(sites, job))


@pytest.mark.parametrize("seconds", [10, 60])
def test_a_line_is_cut(sites: Sites, plain: Plain, seconds: int) -> None:
    """Nothing leaves or reaches a node, silently, and the job wants all five: it goes on when the line is back."""
    name = f"cut-{seconds}"
    job = sites.submit(name, batches=LONG, min_nodes=5)
    sites.until_batch(name, 10)
    sites.internet.cut("node-d")
    time.sleep(seconds)
    sites.internet.heal("node-d")
    goes_on(sites, name)
    assert_same_bits(sites.finished(name), plain(sites, job))


def test_one_direction_is_blocked(sites: Sites, plain: Plain) -> None:
    """node-a, where two nodes stand by, hears nothing from node-b's router."""
    job = sites.submit("one-way", batches=LONG, min_nodes=2)
    sites.until_batch("one-way", 10)
    sites.internet.drop_from("node-a", sites.internet.hosts["node-b"].address)
    goes_on(sites, "one-way")
    assert_same_bits(sites.finished("one-way"), plain(sites, job))


def test_the_node_at_which_another_stands_by_is_killed(sites: Sites, plain: Plain) -> None:
    """node-b takes node-e's only way along: the other three go on, and both come back."""
    job = sites.submit("relay", batches=LONG, min_nodes=2)
    sites.until_batch("relay", 10)
    sites.stop_daemon("node-b")
    goes_on(sites, "relay", without=("node-b",))
    sites.start_daemon("node-b")
    assert_same_bits(sites.finished("relay"), plain(sites, job))


def test_a_router_gets_another_address(sites: Sites, plain: Plain) -> None:
    """The connections of node-c are gone at once, and the job wants all five."""
    job = sites.submit("moved", batches=LONG, min_nodes=5)
    sites.until_batch("moved", 10)
    sites.internet.move("node-c", "203.0.113.21")
    goes_on(sites, "moved")
    assert_same_bits(sites.finished("moved"), plain(sites, job))


@pytest.fixture(params=[86400, -1800], ids=["a day ahead", "half an hour behind"])
def wrong_clock(sites: Sites, request: pytest.FixtureRequest) -> Iterator[Sites]:
    """node-d's daemon and workers believe that it is another time; afterwards they are as they were."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library = sites.folder / "shared" / "clock.so"
    command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SHIFTED_CLOCK), "-ldl"]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    told = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK_S": str(request.param)}
    sites.restart_daemon("node-d", environment=told)
    yield sites
    sites.restart_daemon("node-d")


def test_a_clock_is_wrong(wrong_clock: Sites, plain: Plain) -> None:
    """All five train, the node with the wrong clock too, and nobody is blamed."""
    name = f"clock-{time.monotonic_ns()}"
    job = wrong_clock.submit(name, batches=60, min_nodes=5)
    told = wrong_clock.until_batch(name, 5)
    assert sorted(told["jobs"][name]["plan"]) == [*NODES]
    assert abs(told["nodes"]["node-d"]["started_at"] - time.time()) > 1000, "its clock is right"
    assert_same_bits(wrong_clock.finished(name), plain(wrong_clock, job))
    assert not any(wrong_clock.look()["failures"].values())
