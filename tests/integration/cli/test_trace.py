"""`headway trace` on a running job: what two real workers did, in one timeline, with the prediction beside it."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from tests.integration.cli.conftest import Program

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
