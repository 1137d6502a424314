"""Epochs become batches when a job is submitted."""

from pathlib import Path

import numpy as np
import pytest

from headway.daemon.errors import ConfigError
from headway.daemon.jobs.data_choices import epoch_of
from headway.daemon.jobs.job_file import read_job_file
from headway.daemon.jobs.resolve import resolve_job
from headway.daemon.records.records import Device
from headway.stages.data.shard_writer import writing_shards
from headway.stages.spec import TrainSpec

JOB = """
[job]
name = "epochs"

[data]
source = "data"

[train]
microbatches = 4
microbatch_size = 2
sequence_length = 16
epochs = 3
"""


def batches_of(folder: Path, text: str, *, num_tokens: int = 16 * 21 + 1) -> int:
    """Resolve a job on so many tokens: 21 rows by default."""
    with writing_shards(folder / "data", vocab_size=256) as writer:
        writer.append(np.arange(num_tokens) % 256)
    file = folder / "job.toml"
    file.write_text(text)
    given, named = read_job_file(file)
    devices = [Device(kind="cpu")]
    found = resolve_job(given, job_file=file, devices=devices, cache_dir=folder, named=named)
    assert resolve_job(found, job_file=file, devices=devices, cache_dir=folder) == found, "the record says it again"
    return found.train.batches


def test_epochs_become_batches(tmp_path: Path) -> None:
    """Three times 21 rows, eight a batch: eight batches, of which the last sees one row of a fourth epoch."""
    assert batches_of(tmp_path, JOB) == 8


@pytest.mark.parametrize(
    ("text", "num_tokens", "reason"),
    [
        (
            JOB + "batches = 9",
            337,
            "train.batches: 3 epochs of 21 rows take 8 batches, not 9; leave one of the",
        ),
        (JOB, 16, "16 tokens of data are too few"),
        (JOB + 'data_order = "sample"', 337, "train.data_order: rows drawn anew each time make no epochs"),
    ],
)
def test_what_makes_no_epochs_is_refused(tmp_path: Path, text: str, num_tokens: int, reason: str) -> None:
    """Two lengths at once, data of less than a row, rows that are drawn anew each time."""
    with pytest.raises(ConfigError) as refused:
        batches_of(tmp_path, text, num_tokens=num_tokens)
    assert reason in str(refused.value)


def test_a_batch_knows_its_epoch() -> None:
    """Eight batches of three epochs: the last is of the third, though one of its rows begins a fourth."""
    train = TrainSpec(epochs=3, batches=8)
    assert [epoch_of(train, batch) for batch in range(8)] == [1, 1, 1, 2, 2, 2, 3, 3]
    assert epoch_of(TrainSpec(batches=8), 3) is None
