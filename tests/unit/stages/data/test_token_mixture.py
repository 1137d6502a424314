"""Rows of several data folders: each is a row of one of them, and all that depends on many rows counts every source."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headway.stages.data.shard_index import BEGINS_DOCUMENT, IS_TARGET
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.source_choice import source_of
from headway.stages.data.token_mixture import open_tokens
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import DataError
from headway.stages.spec import TrainSpec

SEED, WEIGHTS = 5, (1.0, 2.0)
STREAM = TrainSpec(microbatches=3, microbatch_size=4, sequence_length=16)
MASKED = TrainSpec(
    microbatches=3, microbatch_size=4, sequence_length=16, loss_mask="data", documents="separate", eval_every=2
)


def stream(folder: Path, first: int, *, num_tokens: int = 1000) -> Path:
    """Tokens that count upwards from `first`, in files of 100."""
    with writing_shards(folder, DataForm(vocab_size=65536, most_tokens=100)) as writer:
        writer.append(np.arange(first, first + num_tokens))
    return folder


def packed(folder: Path, token: int, *, num_targets: int, num_held_out: int = 40) -> Path:
    """Rows of one token each, in which the first so many targets count."""
    flags = np.array([BEGINS_DOCUMENT, *[IS_TARGET] * num_targets, *[0] * (16 - num_targets)])
    with writing_shards(folder, DataForm(vocab_size=256, has_flags=True, row_tokens=17)) as writer:
        writer.append(np.full(17 * 10, token), np.tile(flags, 10))
        writer.validation.append(np.full(17 * num_held_out, token + 100), np.tile(flags, num_held_out))
    return folder


def opened(*folders: Path, weights: tuple[float, ...] = WEIGHTS) -> TokenShards:
    return open_tokens(folders, [""] * len(folders), weights)


def test_each_row_is_that_of_its_source_alone(tmp_path: Path) -> None:
    """Of 96 rows each equals the row at its place in the source that it chose, and both sources come."""
    folders = stream(tmp_path / "a", 0), stream(tmp_path / "b", 30000, num_tokens=777)
    alone, mixture = [TokenShards.open(folder) for folder in folders], opened(*folders)
    chosen = set()
    for batch in range(8):
        for i in range(3):
            found = mixture.microbatch(STREAM, seed=SEED, batch=batch, microbatch=i)
            expected = [each.microbatch(STREAM, seed=SEED, batch=batch, microbatch=i) for each in alone]
            for row in range(4):
                source = source_of(f"{SEED}/{batch}/{i}/{row}", WEIGHTS)
                chosen.add(source)
                assert torch.equal(found.inputs[row], expected[source].inputs[row])
                assert torch.equal(found.targets[row], expected[source].targets[row])
    assert chosen == {0, 1}


def test_no_window_reaches_into_another_source(tmp_path: Path) -> None:
    """Sources barely longer than a window: all rows count upwards by one."""
    folders = [stream(tmp_path / f"{n}", 1000 * n, num_tokens=18) for n in range(3)]
    mixture = opened(*folders, weights=(1.0, 1.0, 1.0))
    for batch in range(20):
        inputs = mixture.microbatch(STREAM, seed=SEED, batch=batch, microbatch=0).inputs
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(16))


def test_one_source_has_the_rows_of_its_folder(tmp_path: Path) -> None:
    """One folder, whatever its weight: what `TokenShards` draws."""
    folder = stream(tmp_path / "a", 0)
    one, expected = opened(folder, weights=(7.0,)), TokenShards.open(folder)
    assert type(one) is TokenShards
    for batch in range(3):
        found = one.microbatch(STREAM, seed=SEED, batch=batch, microbatch=1)
        assert torch.equal(found.inputs, expected.microbatch(STREAM, seed=SEED, batch=batch, microbatch=1).inputs)


def test_rows_do_not_depend_on_who_draws_them(tmp_path: Path) -> None:
    """Drawn in another order by another opening, and in larger microbatches: equal rows, as replicas and cuts need."""
    folders = stream(tmp_path / "a", 0), stream(tmp_path / "b", 30000)
    one, other = opened(*folders), opened(*folders)
    places = [(b, i) for b in range(3) for i in range(3)]
    expected = {at: one.microbatch(STREAM, seed=SEED, batch=at[0], microbatch=at[1]).inputs for at in places}
    for b, i in reversed(places):
        assert torch.equal(other.microbatch(STREAM, seed=SEED, batch=b, microbatch=i).inputs, expected[b, i])
    larger = TrainSpec(microbatches=3, microbatch_size=8, sequence_length=16)
    found = other.microbatch(larger, seed=SEED, batch=2, microbatch=1).inputs
    assert torch.equal(found[:4], expected[2, 1])


def test_the_divisor_counts_the_targets_of_all_sources(tmp_path: Path) -> None:
    """Rows with 2 and with 9 targets: the divisor is their sum over the batch, by its number of microbatches."""
    mixture = opened(packed(tmp_path / "a", 1, num_targets=2), packed(tmp_path / "b", 2, num_targets=9))
    for batch in range(4):
        rows = [mixture.microbatch(MASKED, seed=SEED, batch=batch, microbatch=i) for i in range(3)]
        tokens = torch.cat([each.inputs[:, 0] for each in rows]).tolist()
        assert set(tokens) == {1, 2}
        expected = torch.tensor((2 * tokens.count(1) + 9 * tokens.count(2)) / 3, dtype=torch.float32)
        for each in rows:
            assert each.mean_tokens is not None
            assert torch.equal(each.mean_tokens, expected)
        assert sum(int((each.targets != -100).sum()) for each in rows) == 2 * tokens.count(1) + 9 * tokens.count(2)


def test_held_out_rows_come_from_all_sources_in_turn(tmp_path: Path) -> None:
    """The choice of each row has its number, not the seed; the divisor counts both sources' targets."""
    mixture = opened(packed(tmp_path / "a", 1, num_targets=2), packed(tmp_path / "b", 2, num_targets=9))
    rows = [mixture.held_out(MASKED, i) for i in range(3)]
    tokens = torch.cat([each.inputs[:, 0] for each in rows]).tolist()
    assert tokens == [101 + source_of(f"held-out/{number}", WEIGHTS) for number in range(12)]
    assert set(tokens) == {101, 102}
    expected = torch.tensor((2 * tokens.count(101) + 9 * tokens.count(102)) / 3, dtype=torch.float32)
    assert all(each.mean_tokens is not None and torch.equal(each.mean_tokens, expected) for each in rows)


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    """Rows and a stream, too few held-out rows, no flags where the job has a mask, epochs."""
    rows, few = packed(tmp_path / "a", 1, num_targets=2), packed(tmp_path / "b", 2, num_targets=2, num_held_out=1)
    plain = stream(tmp_path / "c", 0)
    with pytest.raises(DataError, match="rows of several lengths"):
        opened(rows, plain)
    with pytest.raises(DataError, match="an evaluation takes 12"):
        opened(rows, few).held_out(MASKED, 0)
    with pytest.raises(DataError, match="no validation split"):
        opened(plain, plain).held_out(STREAM, 0)
    with pytest.raises(DataError, match="has no flags"):
        opened(plain, plain).microbatch(MASKED, seed=SEED, batch=0, microbatch=0)
    with pytest.raises(DataError, match="makes no epochs"):
        opened(plain, plain).microbatch(TrainSpec(data_order="epochs"), seed=SEED, batch=0, microbatch=0)
