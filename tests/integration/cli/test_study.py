"""`headway study`: interrupted and resumed, and its trainings as jobs of a cluster."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headway.daemon.study.study_run import Row, losses_sha256
from headway.stages.data.shard_writer import DataForm, writing_shards

STUDY = """\
job.name = "tried"
[study]
seeds = {seeds}
[model]
num_hidden_layers = 4
hidden_size = 32
intermediate_size = 48
num_attention_heads = 4
num_key_value_heads = 2
[data]
source = "data"
[train]
batches = 8
microbatches = 4
microbatch_size = 2
sequence_length = 16
[optimizer.Muon.optim]
matrices = {{ name = "muon", lr = 1e-2 }}
[treatment.sync.train]
schedule = "1f1b"
[treatment."delay 1".optim]
error_feedback = 0.0
[treatment.EF]
"""


def study(program: Any, *, seeds: int = 1) -> Path:
    """A study of three trainings a seed, and data of which a part is held out."""
    tokens = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    with writing_shards(program.folder / "data", DataForm(vocab_size=256)) as writer:
        writer.append(tokens[:4000])
        writer.validation.append(tokens[4000:])
    path: Path = program.folder / "study.toml"
    path.write_text(STUDY.format(seeds=seeds))
    return path


def rows(program: Any) -> list[Row]:
    """The results in the folder of the study."""
    lines = (program.folder / "out" / "results.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Row) for line in lines]


def test_a_study_goes_on_where_it_was_killed(program: Any) -> None:
    """SIGKILL after the first result, with a torn line behind it: the same command keeps that one, and goes on."""
    path = study(program, seeds=2)
    first = program.start("study", str(path), "--out", "out", "--processes", "1")
    results = program.folder / "out" / "results.jsonl"
    while not (results.exists() and results.read_bytes().count(b"\n")):
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    kept = rows(program)
    assert len(kept) < 6
    with results.open("ab") as stream:
        stream.write(b'{"optimizer": "Mu')

    code, out, err = program.run("study", str(path), "--out", "out")
    assert code == 0, err
    assert err.startswith(f"{len(kept)} done; ")
    found = rows(program)
    assert found[: len(kept)] == kept
    assert sorted({row.cell for row in found}) == sorted(row.cell for row in found)
    assert len(found) == 6
    assert "| Muon | EF | 1 |" in out
    assert (program.folder / "out" / "study.png").read_bytes().startswith(b"\x89PNG")

    assert program.leftovers() == []


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGINT])
def test_a_study_leaves_no_process_whoever_ends_it(program: Any, ended_by: signal.Signals) -> None:
    """The kernel ends its first process alone; Ctrl-C reaches all, and those that are about to begin say nothing."""
    path = study(program)
    path.write_text(path.read_text().replace("batches = 8", "batches = 1000000"))
    first = program.start("study", str(path), "--out", "out", "--processes", "2")
    while len(program.pids("spawn_main")) < 2:
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.02)
    (os.kill if ended_by is signal.SIGKILL else os.killpg)(first.pid, ended_by)
    assert program.leftovers(within_s=60) == []
    code, _, err = program.ended(first)
    assert "Traceback" not in err
    if ended_by is signal.SIGINT:
        told = "stopped with 0 trainings done (out/results.jsonl); the same command goes on from there"
        assert (code, err.splitlines()[-1]) == (130, told)


@pytest.mark.slow
@pytest.mark.parametrize("treatment", ["sync", "EF"])
def test_a_cluster_has_the_bits_of_a_training(program: Any, treatment: str) -> None:
    """Four stages train the job file that a study has left: the same losses."""
    path = study(program)
    assert program.run("study", str(path), "--out", "out")[0] == 0
    row = next(row for row in rows(program) if row.treatment == treatment and row.seed == 0)
    code, _, err = program.run("run", f"out/jobs/Muon-{treatment}-x1-seed0.toml", "--nodes", "4", "--out", "piped")
    assert code == 0, err
    metrics = (program.folder / "piped" / "metrics.jsonl").read_text().splitlines()
    assert losses_sha256([json.loads(line)["loss"] for line in metrics]) == row.losses_sha256


def test_another_job_is_trained_anew_and_data_elsewhere_is_not(program: Any) -> None:
    """A study whose job has changed keeps nothing; one whose data has only moved keeps all."""
    path = study(program)
    assert program.run("study", str(path), "--out", "out", "--processes", "1")[0] == 0
    (program.folder / "data").rename(program.folder / "moved")
    path.write_text(path.read_text().replace('source = "data"', 'source = "moved"'))
    code, _, err = program.run("study", str(path), "--out", "out")
    assert (code, err) == (0, "")
    path.write_text(path.read_text().replace("batches = 8", "batches = 9"))
    code, _, err = program.run("study", str(path), "--out", "out", "--processes", "1")
    assert (code, err[:8]) == (0, "0 done; ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ('source = "data"', 'source = "headway-docs"'),
            "holds no row of 16 tokens out, and a study compares held-out losses",
        ),
        (("seeds = 1", "seds = 1"), "study.toml:study.seds: unknown key; did you mean `seeds`?"),
        (("hidden_size = 32", "hidden_size = 65536"), "study.toml (Muon, sync):model: weights, optimizers and one"),
    ],
)
def test_what_cannot_be_studied_is_refused_in_a_line(program: Any, change: tuple[str, str], says: str) -> None:
    path = study(program)
    path.write_text(path.read_text().replace(*change))
    code, _, err = program.run("study", str(path), "--out", "out")
    assert code != 0
    assert says in err
    assert err.count("\n") == 1
