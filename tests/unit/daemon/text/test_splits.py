"""Packed rows and the validation split, as a job reads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.data_choices import with_flags_of
from headway.daemon.text.batch_encoding import is_held_out
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare
from headway.daemon.text.summary import lines_of
from headway.stages.data.tokens import TokenShards
from headway.stages.spec import TrainSpec

TEXTS = [f"document {number} " + "x" * number for number in range(60)]


def written(tmp_path: Path, texts: list[str], name: str = "in.jsonl") -> str:
    (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(tmp_path / name)


def documents(folder: Path, *, is_validation: bool = False) -> list[str]:
    """The texts of a split that is one stream."""
    shards = TokenShards.open(folder, is_validation=is_validation)
    return bytes(shards._tokens.windows([0], shards.num_tokens)[0].tolist()).decode().split("\0")[:-1]


def test_packed_text_is_trained_on_with_documents_apart(tmp_path: Path) -> None:
    """A job takes rows, mask and documents from the data; each target's place in its document is known."""
    prepared = prepare([written(tmp_path, TEXTS)], tmp_path / "out", Preparation(pack=32))
    assert (prepared.index.row_tokens, prepared.index.format) == (33, 2)
    train = with_flags_of(TrainSpec(sequence_length=32, microbatch_size=4), prepared.index, "job.toml")
    assert (train.loss_mask, train.documents) == ("data", "separate")
    microbatch = TokenShards.open(tmp_path / "out").microbatch(train, seed=0, batch=0, microbatch=0)
    assert microbatch.positions is not None
    assert microbatch.mean_tokens is not None
    assert "60 documents" in "\n".join(lines_of(tmp_path / "out", prepared))
    assert prepared.train.cut_documents == sum(len(text) + 1 > 33 for text in TEXTS)


def test_the_split_depends_on_seed_and_content_alone(tmp_path: Path) -> None:
    """Another order and other neighbours: the same documents are held out; another seed: others."""
    options = Preparation(validation=0.2)
    prepare([written(tmp_path, TEXTS)], tmp_path / "a", options)
    prepare([written(tmp_path, TEXTS[::-1][:40], "b.jsonl")], tmp_path / "b", options)
    prepare([written(tmp_path, TEXTS)], tmp_path / "c", Preparation(validation=0.2, seed=1))
    held_out = documents(tmp_path / "a", is_validation=True)
    assert sorted(documents(tmp_path / "a") + held_out) == sorted(TEXTS)
    assert 4 <= len(held_out) <= 22
    assert documents(tmp_path / "b", is_validation=True) == [text for text in held_out[::-1] if text in TEXTS[20:]]
    assert documents(tmp_path / "c", is_validation=True) != held_out


def test_the_choice_is_the_one_that_the_page_defines() -> None:
    """A known digest: the first 8 bytes of BLAKE2b, keyed with the seed, against the share."""
    import hashlib

    number = int.from_bytes(hashlib.blake2b(b"text", digest_size=8, key=bytes([7] + [0] * 7)).digest(), "little")
    assert is_held_out(b"text", number / 2**64 + 1e-9, seed=7)
    assert not is_held_out(b"text", number / 2**64 - 1e-9, seed=7)


def test_both_splits_have_rows_and_flags_of_one_kind(tmp_path: Path) -> None:
    """Packed: whole rows in both, readable as a job reads them."""
    prepared = prepare([written(tmp_path, TEXTS)], tmp_path / "out", Preparation(pack=32, validation=0.3))
    assert prepared.validation.documents + prepared.train.documents == 60
    shards = TokenShards.open(tmp_path / "out", is_validation=True)
    assert shards.num_tokens == prepared.validation.tokens
    assert shards.num_tokens % 33 == 0
    train = with_flags_of(TrainSpec(sequence_length=32, microbatch_size=2), prepared.index, "job.toml")
    assert shards.microbatch(train, seed=0, batch=0, microbatch=0).inputs.shape == (2, 32)


def test_flags_of_a_stream_name_documents(tmp_path: Path) -> None:
    """Without rows: each document and its end token, the first of them marked."""
    prepare([written(tmp_path, ["ab", "c"])], tmp_path / "out", Preparation(flags=True))
    assert TokenShards.open(tmp_path / "out")._flags.windows([0], 5).tolist() == [[3, 1, 1, 3, 1]]


def test_bad_records_are_left_out_up_to_a_limit(tmp_path: Path) -> None:
    """Three bad lines: each is named in a warning and the rest is used; with a limit of two, the third ends it."""
    lines = ['{"text": "a"}', "[", '{"body": 1}', '{"text": "b"}', '{"text": "\\ud800"}', '{"text": "c"}']
    (tmp_path / "in.jsonl").write_text("".join(line + "\n" for line in lines))
    warnings: list[str] = []
    prepared = prepare([str(tmp_path / "in.jsonl")], tmp_path / "out", Preparation(max_bad=3), warn=warnings.append)
    assert documents(tmp_path / "out") == ["a", "b", "c"]
    assert prepared.num_bad == 3
    assert [warning.partition("line ")[2][0] for warning in warnings] == ["2", "3", "5"]
    with pytest.raises(ConfigError, match=r"line 5: .*; more than 2 records are bad"):
        prepare([str(tmp_path / "in.jsonl")], tmp_path / "other", Preparation(max_bad=2))


def test_a_line_that_is_too_long_is_left_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rest is not taken for further lines."""
    monkeypatch.setattr("headway.daemon.text.record_files.MAX_RECORD_BYTES", 20)
    source = written(tmp_path, ["a", "x" * 75, "b"])
    assert prepare([source], tmp_path / "out", Preparation(max_bad=1)).num_bad == 1
    assert documents(tmp_path / "out") == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"validation": 0.5}, "--validation: leaves the (training|validation) split empty"),
        ({"validation": 1.0}, "--validation: 1.0 is not a share"),
        ({"pack": 1}, "--pack: 1 is not from 2"),
        ({"seed": -1}, "--seed: -1 is not"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: Any, reason: str) -> None:
    """A split of one document, and numbers out of bounds: one line, no folder."""
    source = written(tmp_path, TEXTS[:1])
    with pytest.raises(ConfigError, match=reason):
        prepare([source], tmp_path / "out", Preparation(**options))
    assert not (tmp_path / "out").exists()
