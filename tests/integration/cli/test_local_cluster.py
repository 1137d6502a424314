"""A local cluster comes up whole and goes away whole, whatever ends it."""

import asyncio
import json
import random
import signal
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.daemon.base.activities import Activities
from headway.daemon.base.errors import ConfigError
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.cluster.cluster_records import NodeFailureRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import GoodputRecord
from headway.daemon.cluster.records import CheckpointRecord, Phase, PhaseRecord, SpecRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.job import JobSection
from headway.daemon.net.rate_limit import OutgoingTransfers, TransferKind
from headway.daemon.node.metrics import serve_metrics
from tests.integration.cli.conftest import Program
from tests.rigs.fake_cluster import SPEC, cluster_view


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


def scrape(port: int) -> dict[str, float]:
    """Every sample of one scrape, by its name with labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def view_with_goodput() -> ClusterView:
    """The fake cluster, whose leader is b, with what b's worker says, a failure of b and a job that ended early."""
    view = cluster_view()
    seconds = {"useful": 80.0, "waiting:stage 0 at a:1": 15.0, "waiting:the coordinator": 5.0}
    record = GoodputRecord(node="b", incarnation="w", seconds=seconds, num_replayed=4, num_resumed=2)
    ended = replace(SPEC, job=JobSection(name="patient"))
    records = {
        Keys.goodput("demo", 3, 1): record,
        Keys.goodput("demo", 3, 99): record,  # of no worker of the plan
        Keys.failure("b", 1): NodeFailureRecord(at=1.0, text="it died"),
        Keys.of("patient", "spec"): SpecRecord(spec=ended, submitted_at=3.0),
        Keys.of("patient", "phase"): PhaseRecord(phase=Phase.FINISHED),
        Keys.of("patient", "checkpoint"): CheckpointRecord(timeline=1, boundary=7, url="/nowhere"),
    }
    for revision, (key, value) in enumerate(records.items()):
        view.apply(key, encode(value), mod_revision=1000 + revision, create_revision=1000)
    return view


async def test_a_leader_tells_of_its_node_and_of_jobs(tmp_path: Path) -> None:
    """A scrape of the leader's daemon has its worker's seconds by class and the job's progress; others' only theirs."""
    reachable, outgoing = [True], OutgoingTransfers()
    outgoing.sent[TransferKind.COPY].num_bytes, outgoing.sent[TransferKind.COPY].held_s = 7, 1.5
    view, store = view_with_goodput(), StateStore(tmp_path / "store", quota_bytes=0)
    found = {}
    for node in ("a", "b"):
        desk: Any = SimpleNamespace(
            node=node, view=view, store=store, etcd_away_s=lambda: None if reachable[0] else 1.0, outgoing=outgoing
        )
        port, stop = serve_metrics("127.0.0.1", 0, desk, Activities())
        try:
            found[node] = await asyncio.to_thread(scrape, port)
            reachable[0] = False
            assert (await asyncio.to_thread(scrape, port))["headway_etcd_reachable"] == 0
            reachable[0] = True
        finally:
            await asyncio.to_thread(stop)
        with pytest.raises(urllib.error.URLError):
            await asyncio.to_thread(scrape, port)
    leader = found["b"]
    assert leader['headway_goodput_seconds_total{class="useful",job="demo",stage="1",worker="1"}'] == 80
    assert leader['headway_goodput_seconds_total{class="waiting",job="demo",stage="1",worker="1"}'] == 20
    assert leader['headway_link_resumes_total{job="demo",stage="1",worker="1"}'] == 2
    assert leader['headway_replayed_batches_total{job="demo",stage="1",worker="1"}'] == 4
    assert (leader["headway_leader"], leader["headway_node_failures"], leader["headway_store_bytes"]) == (1, 1, 0)
    assert leader['headway_transfer_bytes_total{kind="copy"}'] == 7
    assert leader['headway_transfer_held_seconds_total{kind="copy"}'] == 1.5
    assert leader['headway_transfer_seconds_total{kind="recovery"}'] == 0
    assert leader['headway_job_batch{job="demo"}'] == 49
    assert leader['headway_job_loss{job="demo"}'] == 2.5
    assert leader['headway_job_tokens_per_second{job="demo"}'] == 4096
    assert leader['headway_job_lag_batches{job="demo"}'] == 50
    assert leader['headway_job_phase{job="demo",phase="running"}'] == 1
    assert 'headway_job_restorable_boundary{job="demo"}' not in leader, "there is none"
    assert 'headway_job_stopped_early_at{job="demo"}' not in leader, "it is under way"
    assert leader['headway_job_stopped_early_at{job="patient"}'] == 7
    assert found["a"]["headway_etcd_reachable"] == 1
    assert not [name for name in found["a"] if name.startswith(("headway_job", "headway_goodput_seconds_total{"))]


async def test_a_port_in_use_is_one_line() -> None:
    """Two daemons cannot listen at one port: the second says so."""
    desk: Any = SimpleNamespace()  # nobody asks it
    port, stop = serve_metrics("127.0.0.1", 0, desk, Activities())
    try:
        with pytest.raises(ConfigError, match=f"metrics_listen: cannot listen at 127.0.0.1:{port}"):
            serve_metrics("127.0.0.1", port, desk, Activities())
    finally:
        await asyncio.to_thread(stop)


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
