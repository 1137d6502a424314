"""The history of a job as its user reads it, while failures come and after it is over."""

import json
import os
import signal
from collections.abc import Callable
from operator import itemgetter
from typing import Any

EVERY_DIGIT = itemgetter("batch", "loss", "learning_rate")


def test_a_follower_has_each_batch_once_over_a_change_of_plan(program: Any, wait_until: Callable[..., None]) -> None:
    """A worker is killed; `history --follow` ends with the job, and has its curve.

    Its digits are those of the reference; afterwards each 7th batch is told from any node.
    """
    program.up("--nodes", "2")
    job = program.job(batches=400, more="[fault]\nsnapshot_every = 5\n")
    assert program.run("submit", str(job))[0] == 0
    follower = program.start("history", "tiny", "--follow", "--json")

    def batches(*options: str) -> list[int]:
        told = program.run("history", "tiny", "--json", *options)[1].splitlines()
        return [json.loads(line)["batch"] for line in told]

    wait_until(batches, "a row")
    os.kill(program.workers()[-1], signal.SIGKILL)
    code, out, err = program.ended(follower)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert program.run("reference", str(job), "--out", "plain")[0] == 0
    plain = [json.loads(line) for line in (program.folder / "plain" / "metrics.jsonl").read_text().splitlines()]
    assert list(map(EVERY_DIGIT, rows)) == list(map(EVERY_DIGIT, plain))
    assert len({row["generation"] for row in rows}) > 1
    assert batches("--every", "7", "--from", "9") == list(range(14, 400, 7))
