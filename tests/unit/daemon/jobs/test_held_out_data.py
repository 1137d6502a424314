"""A job that evaluates is refused at its submission unless its data has enough held-out text."""

from pathlib import Path

import numpy as np
import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.records import Device
from headway.daemon.jobs.job_file import read_job_file
from headway.daemon.jobs.resolve import resolve_job
from headway.stages.data.shard_writer import DataForm, writing_shards

JOB = """
[job]
name = "evaluated"

[data]
source = "data"

[train]
microbatches = 4
microbatch_size = 2
sequence_length = 16
eval_every = 10
eval_microbatches = {number}
"""


def resolved(folder: Path, number: int, num_held_out: int) -> int:
    """Resolve a job on 1000 tokens and so many held-out ones. Returns its held-out microbatches."""
    with writing_shards(folder / "data", DataForm(vocab_size=256)) as writer:
        writer.append(np.arange(1000) % 256)
        if num_held_out:
            writer.validation.append(np.arange(num_held_out) % 256)
    file = folder / "job.toml"
    file.write_text(JOB.format(number=number))
    given, named = read_job_file(file)
    job = resolve_job(given, job_file=file, devices=[Device(kind="cpu")], cache_dir=folder, named=named)
    return job.train.eval_microbatches


@pytest.mark.parametrize(
    ("number", "num_held_out", "reason"),
    [
        (2, 0, "train.eval_every: the data has no validation split; `headway data prepare --validation 0.01` holds"),
        (4, 128, "evaluation of 4 microbatches takes 8 rows of 16 tokens, and the validation split has 7; set it to 3"),
        (1, 16, "the validation split has 0; hold out more, or take fewer or shorter sequences"),
    ],
)
def test_too_little_held_out_text_is_refused(tmp_path: Path, number: int, num_held_out: int, reason: str) -> None:
    """Without a split, and one row short: the line says what there is and what to do."""
    with pytest.raises(ConfigError) as refused:
        resolved(tmp_path, number, num_held_out)
    assert reason in str(refused.value)


@pytest.mark.parametrize(("num_held_out", "number"), [(129, 4), (128, 3), (33, 1), (20, 1), (1000, 4)])
def test_an_evaluation_takes_what_there_is(tmp_path: Path, num_held_out: int, number: int) -> None:
    """A job that names no number: windows of 16 tokens, two a microbatch, and as many as the batch's at most."""
    assert resolved(tmp_path, 0, num_held_out) == number
