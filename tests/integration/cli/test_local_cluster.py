"""A local cluster comes up whole and goes away whole, whatever ends it."""

import json
import random
import signal
import time
import urllib.request
from typing import Any

import pytest


def test_up_registers_its_nodes_and_leaves_nothing(program: Any) -> None:
    """Two nodes are up and known, each with metrics of its own; Ctrl-C ends all: exit 0, nothing is left."""
    up = program.up("--nodes", "2", variables={"HEADWAY_METRICS_LISTEN": "127.0.0.1:0"})
    said = list(iter(up.stdout.readline, "Ctrl-C here saves every job and stops\n"))
    addresses = [line for line in said if line.startswith("metrics of ")]
    assert [line.split(":")[0] for line in addresses] == ["metrics of node-1", "metrics of node-2"]
    for line in addresses:
        with urllib.request.urlopen(line.split()[-1], timeout=10) as answer:
            assert b"headway_etcd_reachable 1" in answer.read()
    code, out, err = program.run("nodes", "--json")
    assert code == 0, err
    assert [node["name"] for node in json.loads(out)] == ["node-1", "node-2"]
    up.send_signal(signal.SIGINT)
    _, err = up.communicate(timeout=100)
    assert up.returncode == 0, err
    assert program.leftovers() == []
    assert not (program.folder / ".headway" / "cluster.json").exists()
    assert program.run("nodes")[0] == 3


def test_a_killed_parent_takes_everything_with_it(program: Any) -> None:
    """SIGKILL of `up`: etcd, daemons and workers die with it, and the run folder and its certificates are deleted."""
    up = program.up("--nodes", "2")
    assert program.leftovers() != []
    up.kill()
    up.communicate(timeout=30)
    assert program.leftovers(within_s=30) == []


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_leaves_nothing(program: Any, seed: int) -> None:
    """Ctrl-C while `up` is starting, at a moment drawn by chance: it ends and leaves nothing."""
    up = program.start("up", "--nodes", "2")
    time.sleep(random.Random(seed).uniform(0.05, 4.0))
    up.send_signal(signal.SIGINT)
    _, err = up.communicate(timeout=100)
    assert up.returncode in (0, 130, -signal.SIGINT), err  # 0: it was up already
    assert "Traceback" not in err or up.returncode == -signal.SIGINT
    assert program.leftovers(within_s=5) == []


def test_a_second_ctrl_c_does_not_wait(program: Any) -> None:
    """Ctrl-C twice: the daemons are killed at once, and nothing is left all the same."""
    up = program.up("--nodes", "1")
    up.send_signal(signal.SIGINT)
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=30)
    assert (
        program.leftovers(within_s=10) == []
    )  # a killed daemon's worker ends by itself, on a busy machine a bit later


def test_a_state_folder_serves_one_cluster(standing: Any) -> None:
    """A second `up` on the folder of a running one is refused in one line, and does no harm to the first."""
    code, _, err = standing.run("up", "--nodes", "1")
    assert code == 2
    assert "a cluster runs on this state folder" in err
    assert err.count("\n") == 1
    assert standing.run("nodes")[0] == 0
