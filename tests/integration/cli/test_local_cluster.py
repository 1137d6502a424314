"""A local cluster comes up whole and goes away whole, whatever ends it."""

import json
import random
import signal
import time
import urllib.error
import urllib.request
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from tests.integration.cli.conftest import Program


def test_up_registers_its_nodes_and_leaves_nothing(program: Any) -> None:
    """Two nodes are up and known, each with metrics of its own; Ctrl-C ends all: exit 0, nothing is left."""
    up = program.up("--nodes", "2", variables={"HEADWAY_METRICS_LISTEN": "127.0.0.1:0"})
    said = list(iter(up.stdout.readline, "Ctrl-C here saves every job and stops\n"))
    addresses = [line for line in said if line.startswith("metrics of ")]
    assert [line.split(":")[0] for line in addresses] == ["metrics of node-1", "metrics of node-2"]
    for number, line in enumerate(addresses, start=1):
        with urllib.request.urlopen(line.split()[-1], timeout=10) as answer:
            assert f'headway_etcd_reachable{{node="node-{number}"}} 1' in answer.read().decode()
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


BATCHES, MICROBATCHES = 100_000, 4


def events_of(document: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Row's name to operation to its event."""
    names = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    rows: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            assert event["name"] not in rows[names[event["pid"]]], "an operation is told twice"
            rows[names[event["pid"]]][event["name"]] = event
    return rows


@pytest.mark.slow
def test_a_running_job_shows_its_last_batches(standing: Program) -> None:
    """Two nodes train; a trace of five batches has all of them, in an order that is possible; a picture is drawn."""
    program = standing
    assert program.run("submit", str(program.job(name="traced", batches=BATCHES, min_nodes=2)))[0] == 0
    assert program.run("trace", "other")[0] == 2

    arguments = ("trace", "traced", "--batches", "5", "--png", "t.png", "--out", "t.json")
    code, out, err = 3, "", ""
    for _ in range(20):
        code, out, err = program.run(*arguments, "--json")
        if code == 0 and json.loads(out)["last_batch"] >= 10:
            break
        assert code in (0, 2, 3), err  # it is queued, or no batch has gone through yet
    assert code == 0, err
    told = json.loads(out)
    first, last = told["first_batch"], told["last_batch"]
    assert last - first == 4
    assert told["clocks"].keys() == {"node-1", "node-2"}
    assert {clock["error_s"] for clock in told["clocks"].values()} == {0.0}, "one machine has one clock"
    assert told["troubles"] == []
    for worker in told["workers"]:
        assert 0 < worker["measured"]["forward_s"] < 1
        assert 0 <= worker["measured"]["idle"] < 1
        assert worker["predicted"]["forward_s"] > 0

    assert (program.folder / "t.png").read_bytes().startswith(b"\x89PNG")
    rows = events_of(json.loads((program.folder / "t.json").read_text()))
    assert [name.split()[0] for name in rows] == ["measured"] * 2 + ["predicted"] * 2
    upper, lower = (rows[name] for name in rows if name.startswith("measured"))
    for row in (upper, lower):
        of_batches = {name for name, event in row.items() if first <= event["args"]["batch"] <= last}
        microbatches = {f"{k}{b}.{i}" for k in "FB" for b in range(first, last + 1) for i in range(MICROBATCHES)}
        assert of_batches == microbatches | {f"U{b}" for b in range(first, last + 1)}
        for one, other in pairwise(sorted(row.values(), key=lambda event: event["ts"])):
            assert one["ts"] + one["dur"] <= other["ts"] + 1
    for batch in range(first, last + 1):
        for i in range(MICROBATCHES):
            assert lower[f"F{batch}.{i}"]["ts"] > upper[f"F{batch}.{i}"]["ts"], "no input before it was computed"
            assert upper[f"B{batch}.{i}"]["ts"] > lower[f"B{batch}.{i}"]["ts"], "no gradient before it was computed"

    assert program.run("pause", "traced", "--wait")[0] == 0
    code, _, err = program.run("trace", "traced")
    assert code == 2
    assert err == "headway: job traced: is paused: no worker runs, so there is nothing to trace\n"
