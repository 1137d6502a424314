"""The history of a job as its user reads it, while failures come and after it is over."""

import json
from collections.abc import Callable
from typing import Any

from headway.daemon.reports.writers import wandb_records
from tests.rigs.paces import paced_layers

BATCHES = 100
LAYER_S = 0.01
"""Pace of the layers until the pause, so that it does not come too late."""


def test_a_follower_has_each_batch_once_over_a_change_of_plan(program: Any, wait_until: Callable[..., None]) -> None:
    """The job pauses and goes on; `history --follow` ends with it, and has all of it.

    Afterwards the whole past is the same, and each 7th batch of it is told alone.
    """
    program.up("--nodes", "2", variables=paced_layers(program.folder, LAYER_S))
    job = program.job(batches=BATCHES, more="[fault]\nsnapshot_every = 10\n")
    assert program.run("submit", str(job))[0] == 0
    copies = ("--jsonl", "rows.jsonl", "--tensorboard", "runs", "--wandb", "offline")
    follower = program.start("history", "tiny", "--follow", "--json", *copies)

    def rows_in(text: str) -> list[dict[str, float]]:
        return [row for row in map(json.loads, text.splitlines()) if "batch" in row]

    def batches(*options: str) -> list[int]:
        return [int(row["batch"]) for row in rows_in(program.run("history", "tiny", "--json", *options)[1])]

    wait_until(batches, "a row")
    assert program.run("pause", "tiny", "--wait")[0] == 0
    paced_layers(program.folder, 0)
    assert program.run("resume", "tiny")[0] == 0
    code, out, err = program.ended(follower)
    assert code == 0, err
    rows = rows_in(out)
    assert [row["batch"] for row in rows] == list(range(BATCHES))
    *again, end = map(json.loads, program.run("history", "tiny", "--json")[1].splitlines())
    assert again == rows
    assert end == {"goodput_s": json.loads(program.run("report", "tiny", "--json")[1])["goodput_s"]}
    assert end["goodput_s"]["useful"] > 0
    code, text, _ = program.run("history", "tiny", *copies)
    assert code == 0
    assert text.splitlines()[-1].startswith("goodput ")
    assert "goodput" not in program.run("history", "tiny", "--csv")[1]
    assert list(map(json.loads, (program.folder / "rows.jsonl").read_text().splitlines())) == rows
    assert len([*(program.folder / "runs" / "tiny").iterdir()]) == 1
    files = sorted((program.folder / "wandb").glob("offline-run-*/*.wandb"))
    steps = [[each.history.step.num for each in wandb_records(path) if each.HasField("history")] for path in files]
    assert steps == [[*range(BATCHES)], []]
    assert all(row["gradient_norm"] > 0 for row in rows)
    assert len({row["generation"] for row in rows}) > 1
    assert program.run("export", "tiny", "--out", "exported")[0] == 0
    beside = (program.folder / "exported" / "metrics.jsonl").read_text().splitlines()
    assert list(map(json.loads, beside)) == rows
    assert batches("--every", "7", "--from", "9") == [*range(14, BATCHES, 7), BATCHES - 1]
