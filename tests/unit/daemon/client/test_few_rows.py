"""Data that makes few batches is told of, with rows that make enough: what is promised is what packing anew gives."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.daemon.client.few_rows import few_rows
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare
from headway.stages.data.shard_index import ShardIndex, read_index
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.spec import TrainSpec

TRAIN = TrainSpec(microbatches=4, microbatch_size=2, sequence_length=2048, epochs=1)


def packed(folder: Path, *, num_texts: int = 300, length: int = 2048, validation: float = 0.0) -> ShardIndex:
    """Prepare so many short texts, of 30 to 120 bytes."""
    texts = [json.dumps({"text": f"{number} " * (10 + number % 20)}) for number in range(100, 100 + num_texts)]
    (folder / "texts.jsonl").write_text("\n".join(texts))
    out = folder / f"of-{length}"
    prepare([str(folder / "texts.jsonl")], out, Preparation(pack=length, validation=validation))
    return read_index(out)


def test_short_texts_in_long_rows_are_told_with_the_rows_that_make_enough_batches(tmp_path: Path) -> None:
    """300 texts fill 12 rows of 2,048, two batches an epoch: the promise for --pack 256 is what packing anew gives."""
    told = few_rows(TRAIN, tmp_path / "of-2048", packed(tmp_path))
    assert "the data has 12 rows of 2,048 tokens: 2 batches of 4 × 2 rows an epoch" in told
    found = re.search(r"; `headway data prepare --pack (\d+)` gives (\d+) batches$", told)
    assert found is not None, told
    anew = packed(tmp_path, length=int(found[1]))
    assert -(-anew.num_rows(int(found[1])) // 8) == int(found[2]) >= 10
    assert few_rows(replace(TRAIN, sequence_length=int(found[1])), tmp_path / f"of-{found[1]}", anew) == ""


def test_where_shorter_rows_would_cut_texts_microbatches_are_made_smaller(tmp_path: Path) -> None:
    """Eighty texts of up to 117 bytes: rows of 128 cut none, and take microbatches of one row besides."""
    told = few_rows(TRAIN, tmp_path / "of-2048", packed(tmp_path, num_texts=80))
    assert told.endswith("`headway data prepare --pack 128` and microbatch_size = 1 give 15 batches"), told
    assert -(-packed(tmp_path, num_texts=80, length=128).num_rows(128) // 4) == 15


def test_few_held_out_rows_are_told_with_what_holds_out_enough(tmp_path: Path) -> None:
    """One row is held out, and a microbatch has four: shorter rows hold out more of the same texts."""
    index = packed(tmp_path, validation=0.03)
    train = replace(TRAIN, microbatch_size=4, epochs=0, eval_every=1)
    told = few_rows(train, tmp_path / "of-2048", index)
    assert told.startswith("the validation split has 1 row, and a microbatch 4: each evaluation repeats rows; ")
    found = re.search(r"--pack (\d+)` gives (\d+) held-out rows$", told)
    assert found is not None, told
    anew = packed(tmp_path, length=int(found[1]), validation=0.03)
    assert anew.num_rows(int(found[1]), of=anew.validation) == int(found[2]) >= 4


def test_a_stream_gives_more_batches_with_shorter_sequences(tmp_path: Path) -> None:
    """20,000 tokens of one stream at a URL are known by their index alone: then only microbatches may shrink."""
    with writing_shards(tmp_path / "data", DataForm(vocab_size=256)) as writer:
        writer.append(np.arange(20_000) % 256)
    index = read_index(tmp_path / "data")
    assert few_rows(TRAIN, tmp_path / "data", index).endswith(
        "2 batches of 4 × 2 rows an epoch; sequence_length = 256 gives 10 batches"
    )
    assert few_rows(TRAIN, None, index).endswith("; microbatch_size = 1 gives 3 batches")


@pytest.mark.parametrize("train", [replace(TRAIN, epochs=0), replace(TRAIN, sequence_length=64)])
def test_nothing_is_said_of_enough(tmp_path: Path, train: TrainSpec) -> None:
    """A job that counts batches and not epochs, and one with many rows."""
    with writing_shards(tmp_path / "data", DataForm(vocab_size=256)) as writer:
        writer.append(np.arange(20_000) % 256)
    assert few_rows(train, tmp_path / "data", read_index(tmp_path / "data")) == ""
