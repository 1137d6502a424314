"""Several data sources and early stopping, as `plan`, `reference` and `status` tell people of them."""

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from headway.daemon.reports.watch_view import Snapshot, render
from headway.stages.data.shard_writer import DataForm, writing_shards
from tests.rigs.displays import report

Headway = Callable[..., tuple[int, str, str]]

JOB = """\
[job]
name = "mixed"
[model]
num_hidden_layers = 1
hidden_size = 16
intermediate_size = 24
num_attention_heads = 2
num_key_value_heads = 2
[[data.sources]]
source = "one"
weight = 3.0
[[data.sources]]
source = "other"
weight = 1.0
[train]
batches = 30
microbatches = 2
microbatch_size = 2
sequence_length = 16
eval_every = 1
eval_patience = 2
eval_min_delta = 100.0
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    for name in ("one", "other"):
        with writing_shards(tmp_path / name, DataForm(vocab_size=256)) as writer:
            writer.append(np.arange(2000) % 250)
            writer.validation.append(np.arange(400) % 250)
    (tmp_path / "job.toml").write_text(JOB)
    return str(tmp_path / "job.toml")


def test_a_plan_names_the_sources_and_their_shares(headway: Headway, job: str, tmp_path: Path) -> None:
    """Sources with weights 3 and 1 that evaluations may end: a sentence each, and both in JSON."""
    code, out, _ = headway("plan", job, "--nodes", "2")
    assert code == 0
    shares = f"75 % {tmp_path}/one, 25 % {tmp_path}/other"
    assert f"Microbatches draw their rows from several sources: {shares}." in out.splitlines()
    assert "Evaluations may end the job before its last batch." in out.splitlines()
    _, out, _ = headway("plan", job, "--nodes", "2", "--json")
    assert (json.loads(out)["data"], json.loads(out)["may_stop_early"]) == (shares, True)


def test_a_reference_says_that_evaluations_ended_it(headway: Headway, job: str, tmp_path: Path) -> None:
    """No evaluation falls by 100: patience ends after batch 2, and two batches of the delay and one follow."""
    code, out, _ = headway("reference", job, "--out", str(tmp_path / "plain"))
    assert code == 0
    assert len((tmp_path / "plain/metrics.jsonl").read_text().splitlines()) == 5
    first, *_, last = out.splitlines()
    assert (first.partition("  ")[0], first.partition("; ")[2]) == ("batch 5/30", "evaluations ended the job")
    assert last == "every run of this job on one arithmetic class has these bits"


def test_the_picture_of_a_job_names_its_sources() -> None:
    """A job with several sources has a line of them, one with one source has none."""

    def shown(data: str) -> str:
        console = Console(file=io.StringIO(), width=80)
        console.print(render(Snapshot(report=dataclasses.replace(report(9), data=data)), width=80))
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    assert "data: 75 % /one, 25 % /other" in shown("75 % /one, 25 % /other")
    assert "data:" not in shown("")
