"""Data that another tokenizer made is refused before a job starts from a model's folder."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.blobs.data_source import check_tokenizer
from headway.daemon.jobs.job import DataSpec, JobSection, JobSpec, OriginSpec
from headway.stages.data.shard_writer import DataForm, writing_shards

VOCABULARY = {f"t{number}": number for number in range(200)}


def write_tokenizer(folder: Path, vocabulary: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return folder


def data_made_by(tmp_path: Path, vocabulary: object) -> DataSpec:
    """A data folder with a tokenizer beside its shards."""
    with writing_shards(tmp_path / "data", DataForm(vocab_size=256), tokenizer="tokenizer.json") as writer:
        writer.append(np.zeros(64, dtype=np.uint8))
    return DataSpec(source=str(write_tokenizer(tmp_path / "data", vocabulary)))


def job_from(folder: Path, data: DataSpec) -> JobSpec:
    return JobSpec(job=JobSection(name="j"), data=data, origin=OriginSpec(url=str(folder), job="j"))


def test_the_models_own_tokenizer_passes_and_so_do_a_few_tokens_more(tmp_path: Path) -> None:
    """Equal vocabularies, also written as a list with scores, and one with five additional tokens."""
    added = VOCABULARY | {f"mine{number}": 200 + number for number in range(5)}
    spec = job_from(write_tokenizer(tmp_path / "model", VOCABULARY), data_made_by(tmp_path, added))
    check_tokenizer(spec, tmp_path / "job.toml")
    write_tokenizer(tmp_path / "model", [[token, 0.5] for token in VOCABULARY])
    check_tokenizer(spec, tmp_path / "job.toml")


@pytest.mark.parametrize("source", ["another tokenizer", "python-stdlib"])
def test_other_numbers_for_the_same_tokens_are_refused(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shifted numbers, and the built-in bytes that a job without [data] has: one line names the command."""
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path))
    shifted = {token: number + 1 for token, number in VOCABULARY.items()}
    data = data_made_by(tmp_path, shifted) if source == "another tokenizer" else DataSpec(source=source)
    spec = job_from(write_tokenizer(tmp_path / "model", VOCABULARY), data)
    with pytest.raises(ConfigError, match=r"run `headway data prepare` with --tokenizer .*/model") as refused:
        check_tokenizer(spec, Path("job.toml"))
    assert refused.value.where == "job.toml:data.source"


def test_nothing_to_compare_passes(tmp_path: Path) -> None:
    """A folder without a tokenizer, one that says no numbers, and a job without a folder."""
    data = data_made_by(tmp_path, {"x": 3})
    (tmp_path / "model").mkdir()
    spec = job_from(tmp_path / "model", data)
    check_tokenizer(spec, tmp_path / "job.toml")
    (tmp_path / "model/tokenizer.json").write_text("[" * 100000)
    check_tokenizer(spec, tmp_path / "job.toml")
    check_tokenizer(replace(spec, origin=OriginSpec()), tmp_path / "job.toml")
