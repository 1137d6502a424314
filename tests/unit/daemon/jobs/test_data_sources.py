"""A job of several data sources: what its file says, what `submit` makes of it, and which sources go together."""

import json
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.blobs.data_source import check_tokenizer
from headway.daemon.client.planned_job import read_planned
from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.records import Device
from headway.daemon.jobs.data_choices import epoch_of, with_flags_of
from headway.daemon.jobs.job import DataSpec, JobSpec, SourceSpec, shares_text
from headway.daemon.jobs.job_file import parse_job, read_job_file
from headway.daemon.jobs.resolve import resolve_job
from headway.stages.data.shard_index import Shard, ShardIndex, read_index
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.spec import TrainSpec

HEAD = '[job]\nname = "mixed"\n[train]\nmicrobatches = 4\nmicrobatch_size = 2\nsequence_length = 16\n'
TWO = '[[data.sources]]\nsource = "a"\nweight = 3\n[[data.sources]]\nsource = "b"\n'


def write(
    folder: Path, *, vocab_size: int = 256, has_flags: bool = False, row_tokens: int = 0, num_held_out: int = 0
) -> str:
    """Write a folder of 1020 tokens. Returns its name."""
    with writing_shards(folder, DataForm(vocab_size=vocab_size, has_flags=has_flags, row_tokens=row_tokens)) as writer:
        for split, number in ((writer, 1020), (writer.validation, num_held_out)):
            if number:
                split.append(np.arange(number) % 200, np.ones(number, dtype=np.uint8) if has_flags else None)
    return read_index(folder).sha256


def resolved(folder: Path, text: str) -> JobSpec:
    file = folder / "job.toml"
    file.write_text(text)
    given, named = read_job_file(file)
    return resolve_job(given, job_file=file, devices=[Device(kind="cpu")], cache_dir=folder, named=named)


def test_a_job_knows_its_sources(tmp_path: Path) -> None:
    """Two folders: whole paths, a hash of each and one of both; its record says it again, and `status` the shares."""
    names = [write(tmp_path / name, vocab_size=250 if name == "x" else 256) for name in ("a", "b")]
    job = resolved(tmp_path, HEAD + TWO)
    assert job.data == DataSpec(
        source="",
        sha256=sha256("".join(f"{line}\n" for line in ("sources", *names)).encode()).hexdigest(),
        sources=(
            SourceSpec(source=str(tmp_path / "a"), weight=3.0, sha256=names[0]),
            SourceSpec(source=str(tmp_path / "b"), weight=1.0, sha256=names[1]),
        ),
    )
    assert resolve_job(job, job_file=tmp_path / "job.toml", devices=[Device(kind="cpu")], cache_dir=tmp_path) == job
    assert decode(encode(job), JobSpec) == job
    assert shares_text(job.data) == f"75 % {tmp_path}/a, 25 % {tmp_path}/b"


def test_one_source_is_the_job_that_names_it_alone(tmp_path: Path) -> None:
    """`[[data.sources]]` with one entry: the spec of `[data] source`, so the same bits."""
    write(tmp_path / "a")
    one = resolved(tmp_path, HEAD + '[[data.sources]]\nsource = "a"\nweight = 7\n')
    assert one == resolved(tmp_path, HEAD + '[data]\nsource = "a"\n')
    assert not shares_text(one.data)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[data]\nsource = "c"\n' + TWO, "data.source: the file names [[data.sources]] as well; leave one of them out"),
        (TWO + "weight = 0\n", "data.sources[1].weight: must be from 1e-06 to 1e+06, is 0"),
        (TWO + "weight = nan\n", "data.sources[1].weight: expected a finite number"),
        (TWO + 'sha256 = "x"\n', "data.sources[1].sha256: 'x' is not a SHA-256"),
        (TWO.replace('"b"', '""'), "data.sources[1].source: is empty"),
        (TWO.replace('"b"', '"\\u001b"'), "data.sources[1].source: '\\x1b' has a character"),
        ("[[data.sources]]\nweight = 1\n", "data.sources[0]: `source` is missing"),
        ('[[data.sources]]\nsource = "a"\n' * 65, "data.sources: names 65 sources; at most 64 are allowed"),
        (TWO.replace("weight", "share"), "data.sources[0].share: unknown key"),
    ],
)
def test_impossible_sources_are_refused(text: str, reason: str) -> None:
    """Each with its key, and one line that says what to do."""
    with pytest.raises(ConfigError) as refused:
        parse_job(HEAD + text)
    assert reason in str(refused.value)


@pytest.mark.parametrize("setting", ["epochs = 2", 'data_order = "epochs"'])
def test_epochs_of_several_sources_are_refused(setting: str) -> None:
    """Rows drawn by weight make no epochs."""
    with pytest.raises(ConfigError, match="several sources are drawn by weight, and an epoch"):
        parse_job(HEAD + setting + "\n" + TWO)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"vocab_size": 255}, "has 255 tokens of bytes, and {a} has 256 tokens of bytes; prepare both with one"),
        ({"row_tokens": 17}, "has rows packed with --pack 16, and {a} has no packed rows; prepare both with one"),
        ({"has_flags": True}, "has flags, and {a} has no flags; prepare both with --flags, or set loss_mask"),
    ],
)
def test_sources_that_differ_are_refused_by_name(tmp_path: Path, other: dict[str, int], reason: str) -> None:
    """Another vocabulary, rows, flags: both folders, and what to do."""
    write(tmp_path / "a")
    write(tmp_path / "b", **other)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        resolved(tmp_path, HEAD + TWO)
    assert f"data.sources[1].source: {tmp_path / 'b'} {reason.format(a=tmp_path / 'a')}" in str(refused.value)


def test_flags_may_differ_without_a_mask(tmp_path: Path) -> None:
    """Streams, one with flags, and loss_mask = "none": nobody reads them."""
    write(tmp_path / "a")
    write(tmp_path / "b", has_flags=True)
    assert resolved(tmp_path, HEAD + 'loss_mask = "none"\n' + TWO).train.loss_mask == "none"


def test_sources_of_several_tokenizers_are_refused(tmp_path: Path) -> None:
    """Vocabularies of one size whose tokens have other numbers: both folders are named."""
    for name, tokens in (("a", ["x", "y"]), ("b", ["y", "x"])):
        write(tmp_path / name)
        index = json.loads((tmp_path / name / "shards.json").read_text())
        (tmp_path / name / "shards.json").write_text(json.dumps(index | {"tokenizer": "tokenizer.json"}))
        model = {"type": "WordLevel", "vocab": {token: number for number, token in enumerate(tokens)}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
    job = resolved(tmp_path, HEAD + TWO)
    with pytest.raises(
        ConfigError, match=r"sources\[1\].source: .*/b was not made with the tokenizer of .*/a; prepare"
    ):
        check_tokenizer(job, tmp_path / "job.toml")


@pytest.mark.parametrize(
    ("held_out", "number"), [((200, 200), 4), ((200, 33), 0), ((33, 200), 1), ((0, 200), -1), ((200, 0), -1)]
)
def test_an_evaluation_takes_what_all_sources_have(tmp_path: Path, held_out: tuple[int, int], number: int) -> None:
    """Rows are drawn by weight until a source has no more; a source without held-out text is named."""
    for name, num_tokens in zip("ab", held_out, strict=True):
        write(tmp_path / name, num_held_out=num_tokens)
    text = HEAD + "eval_every = 5\n" + TWO
    if number > 0:
        assert resolved(tmp_path, text).train.eval_microbatches == number
        return
    if number == 0:  # the second source is drawn once in four times
        assert 1 <= resolved(tmp_path, text).train.eval_microbatches <= 4
        return
    with pytest.raises(ConfigError, match=f"data source {held_out.index(0)} has no validation split"):
        resolved(tmp_path, text)


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
    with writing_shards(folder / "data", DataForm(vocab_size=256)) as writer:
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


def index(*, has_flags: bool, row_tokens: int = 0) -> ShardIndex:
    shard = Shard(file="a", num_tokens=0, sha256="", flags="b" if has_flags else "")
    return ShardIndex(dtype="uint8", vocab_size=256, shards=(shard,), sha256="", row_tokens=row_tokens, format=2)


@pytest.mark.parametrize(
    ("has_flags", "row_tokens", "given", "mask"),
    [
        (False, 0, "auto", "none"),
        (False, 129, "auto", "none"),
        (True, 0, "auto", "data"),
        (True, 129, "auto", "data"),
        (True, 0, "none", "none"),
        (True, 129, "data", "data"),
    ],
)
def test_auto_becomes_what_the_data_has(has_flags: bool, row_tokens: int, given: str, mask: str) -> None:
    """Flags → the mask counts, unless the job says otherwise."""
    train = TrainSpec(loss_mask=given)  # type: ignore[arg-type]
    found = with_flags_of(train, index(has_flags=has_flags, row_tokens=row_tokens), "job.toml")
    assert found.loss_mask == mask
    assert found.documents == ("separate" if has_flags and row_tokens else "joined")


def test_pairs_and_what_is_learned_go_together() -> None:
    """Pairs with next_token, or rows of single documents with dpo → the key, and what to do."""
    rows = index(has_flags=True, row_tokens=129)
    with pytest.raises(ConfigError, match=r'job.toml:train.objective: .*; set it to "dpo"'):
        with_flags_of(TrainSpec(), replace(rows, holds_pairs=True), "job.toml")
    with pytest.raises(ConfigError, match=r"job.toml:train.objective: .*prepare the data with --pairs"):
        with_flags_of(TrainSpec(objective="dpo"), rows, "job.toml")
    found = with_flags_of(TrainSpec(objective="dpo"), replace(rows, holds_pairs=True), "job.toml")
    assert (found.loss_mask, found.documents) == ("data", "separate")


@pytest.mark.parametrize(
    ("train", "has_flags", "row_tokens", "reason"),
    [
        (TrainSpec(loss_mask="data"), False, 0, r'job.toml:train.loss_mask: "data" needs flags'),
        (TrainSpec(loss_mask="none"), True, 129, r"job.toml:train.loss_mask: .* padding of packed rows"),
        (TrainSpec(documents="separate"), False, 0, r'job.toml:train.documents: "separate" needs data with flags'),
        (TrainSpec(), True, 65, r"job.toml:train.sequence_length: .* sequences of 64 tokens, not 128; set it to 64"),
    ],
)
def test_what_does_not_fit_the_data_is_refused(train: TrainSpec, has_flags: bool, row_tokens: int, reason: str) -> None:
    """A mask without flags, all targets of padded rows, rows of another length → the key and what to do."""
    with pytest.raises(ConfigError, match=reason):
        with_flags_of(train, index(has_flags=has_flags, row_tokens=row_tokens), "job.toml")


@pytest.mark.parametrize(("typed", "meant"), [("chat", "chats"), ("python-stdlb", "python-stdlib")])
def test_mistyped_data_is_answered_with_the_data_that_is_there(tmp_path: Path, typed: str, meant: str) -> None:
    """`submit` and `run` refuse; `plan`, for which data may be elsewhere, says that they will."""
    write(tmp_path / "chats")
    text, hint = f'{HEAD}[data]\nsource = "{typed}"\n', rf"data\.source: .*; did you mean `{meant}`\?$"
    with pytest.raises(ConfigError, match=hint):
        resolved(tmp_path, text)
    told: list[str] = []
    read_planned(tmp_path / "job.toml", warn=told.append)
    assert [bool(re.search(f"^`headway submit` would refuse.*{hint}", line)) for line in told] == [True]
    (tmp_path / "job.toml").write_text(text.replace(typed, "elsewhere"))
    told.clear()
    read_planned(tmp_path / "job.toml", warn=told.append)
    assert told == []
